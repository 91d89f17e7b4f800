"""`flexcp.plan` and the Plan it returns: planning and communication joined for the user."""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from flexcp import balance as balancing
from flexcp import planner, sharding
from flexcp.agreement import agree, mask_digest, others_are_told, table_digest
from flexcp.blocksource import BlockSource, Everything, block_source
from flexcp.comm import Link
from flexcp.cost import CostModel
from flexcp.errors import unknown
from flexcp.group import ranks_of, ulysses_ranks
from flexcp.heads import check_heads
from flexcp.layout import Layout
from flexcp.maskmods import MaskMod
from flexcp.planner import Schedule
from flexcp.table import Table, num_blocks, rows_of, table_of
from flexcp.tokens import Token
from flexcp.version import __version__

Mask = BlockMask | MaskMod


def plan(
    mask: Mask | Mapping[str, Mask],
    seq_len: int,
    mesh: DeviceMesh | int,
    *,
    rank: int | None = None,
    batch: int | None = None,
    heads: int | None = None,
    block_size: int | tuple[int, int] | None = None,
    balance: str = "auto",
    comm: str = "auto",
    head_groups: int | None = None,
    ulysses: int | None = None,
    cost: CostModel | None = None,
    like: "Plan | None" = None,
    device: torch.device | str | None = None,
) -> "Plan":
    """Decides which rank holds which part of the sequence and what it receives when, from the mask alone.

    Every rank of the group must call it with equal arguments.

    Args:
        mask: a flexcp.masks.Mask, a mask_mod(b, h, q_idx, kv_idx) -> bool in global indices, or a BlockMask of the
            whole sequence; or several by name, for a model whose layers differ.
        seq_len: S, tokens of the whole sequence; any length, the tail is padded inside.
        mesh: the `cp` group: a DeviceMesh that is one-dimensional or has a dimension named "cp"; or the size of a group
            that does not exist yet (1 does). With a dimension named "ulysses" after that, the group is of both, and the
            ranks along it share the heads.
        rank: whose plan this is, where mesh is a size; default 0.
        batch, heads: how many batch rows and query heads a plain mask_mod distinguishes; None: it reads neither.
        block_size: tokens, or (queries, keys); None: the BlockMask's own, else 128.
        balance: "contiguous", "head_tail", "per_document" (head_tail within every document), "ptrr", "min_heap",
            "affinity" (chunks that see the same keys together, as far as balance allows), or "auto": of all these the
            one whose slowest rank is expected to be the fastest, with what of its communication hides behind nothing.
        comm: "gather", "ring", "exchange" (only the blocks that the mask needs). "ulysses": ranks swap rows for heads,
            and each computes some heads of the whole sequence. "ulysses+gather", "ulysses+ring", "ulysses+exchange":
            runs of ranks share the heads, and keys move between these as the second word says. "auto": exchange where
            it moves clearly less than gather, and ulysses where `cost` tells the heads and it is clearly faster.
        head_groups: into how many groups of KV heads gather and exchange divide their work, so that the keys of the
            next group arrive while one is computed; None: as many as the cost model finds best, or 1 where both layout
            and comm are named. A number that does not divide the model's KV heads counts as its greatest divisor in
            common with them.
        ulysses: how many consecutive ranks share the heads, for a comm that begins with ulysses, which it makes of
            "auto"; None: the mesh's dimension of that name, all ranks for "ulysses", and for the others the greatest
            divisor of cp_size below itself that divides the KV heads of `cost`.
        cost: what "auto" compares by; None: one layer of Llama3-8B at nominal rates. With several masks its shape may
            be a tuple, one for each: layers of different heads, head_dim and number.
        like: the plan of an earlier step over the same length and group, for a mask that changes from step to step
            (packed documents): kind of communication, head groups and the size of a stage stay its own, so that no
            shape changes. What does not fit into a stage of exchange makes a second one of the same size.
        device: where the plan's tensors live; None: the mesh's device type, else CPU.
    Raises:
        ValueError, TypeError: one sentence that says what was given, what is needed and what to do; on every rank where
            the ranks of a group were given different things.

    >>> import flexcp
    >>> plan = flexcp.plan(lambda b, h, q, kv: q >= kv, seq_len=1000, mesh=2, rank=1, balance="contiguous")
    >>> plan.local_len, plan.positions[0, :3].tolist()
    (512, [512, 513, 514])
    """
    ranks = ranks_of(mesh, rank)
    link, size, rank = ranks.link, ranks.size, ranks.rank
    with others_are_told(link, torch.device(ranks.device)):
        _check_numbers(seq_len, batch=batch, heads=heads, head_groups=head_groups, ulysses=ulysses)
        _check_name("balance", balance, balancing.BALANCES)
        _check_name("comm", comm, ("auto", *planner.COMMS))
        device = torch.device(device or ranks.device)
        blocks = _block_size(block_size)
        masks = dict(mask) if isinstance(mask, Mapping) else {_ONLY: mask}
        if not masks:
            raise ValueError("plan was given no mask at all; name at least one")
        if like is not None:
            _check_like(like, seq_len, size, list(masks))
            head_groups = head_groups or next(iter(like.schedules.values())).head_groups
            if comm == "auto":
                comm, ulysses = like.comm, ulysses or like.ulysses
        model = cost or CostModel()
        shares_named = bool(ulysses or ranks.ulysses)
        ulysses = ulysses_ranks(comm, ulysses or ranks.ulysses, size, model.one.num_kv_heads)
        sources = {name: block_source(one, seq_len, blocks, batch, heads, device) for name, one in masks.items()}
        for source, shape in zip(sources.values(), model.shapes(len(sources))):
            if source.heads > 1:  # else the same for all heads, however many there are
                check_heads(source.heads, ulysses)
            if cost is not None:
                check_heads(shape.num_heads, ulysses)
        sizes = {source.block_size for source in sources.values()}
        if len(sizes) > 1:
            raise ValueError(f"all masks of a plan share one layout and so one block size, got {sorted(sizes)}")
        asked = {
            "version": f"flexcp {__version__}, torch {torch.__version__}",
            "seq_len": seq_len,
            "masks": ", ".join(masks),
            "block_size": sizes,
            "batch": [source.batch for source in sources.values()],
            "heads": [source.heads for source in sources.values()],
            "mask": "; ".join(map(mask_digest, masks.values())) if link is not None and size > 1 else "",
            "balance": balance,
            "comm": comm,
            "head_groups": head_groups,
            "ulysses": ulysses,
            "cost": cost or "default",
        }
    agree(link, asked, device)
    with others_are_told(link, device):
        shared = _Shared(None if link is None or link.simulated else link, size, device)
        tables = lambda: [shared.table(source) for source in sources.values()]  # noqa: E731
        choice = seq_len, size, sizes.pop(), tables, model, head_groups
        if comm == "auto" and cost is not None and not shares_named and size > 1:
            layout, kind, groups, ulysses = balancing.choose_sharing(balance, *choice)
        else:
            few, kind = size // ulysses, planner.of_stages(comm)
            layout, kind, groups = balancing.choose(balance, kind, seq_len, few, *choice[2:], ulysses)
        if kind != "gather" and layout.cp_size > 1:
            for source in sources.values():
                shared.table(source)
        schedules = {
            name: planner.build_schedule(
                source,
                layout,
                rank,
                kind,
                lambda source=source: shared.table(source),
                device,
                groups,
                None if like is None else like.schedules[name].slots,
                ulysses,
            )
            for name, source in sources.items()
        }
        digests = [table_digest(table) for table in shared.tables] if link is not None and size > 1 else []
        derived = {"classes of blocks": digests, "layout": layout, "comm": kind, "head_groups": groups}
    agree(link, derived, device)
    if link is not None:
        if ulysses > 1:
            link.divided(ulysses)
        link.counters.clear()
    if comm == "auto":
        comm = planner.named(kind, ulysses, size)
    return Plan(layout.divided(ulysses), rank, comm, schedules, link, device)


_ONLY = "mask"


class _Shared:
    """What ranks must agree on: every rank derives it alone, or each does its share and they exchange it."""

    def __init__(self, link: Link | None, size: int, device: torch.device) -> None:
        self.link, self.size, self.device = link if size > 1 else None, size, device
        self._tables: dict[int, Table] = {}

    @property
    def tables(self) -> list[Table]:
        """Those that were needed so far, which are the same ones on every rank."""
        return list(self._tables.values())

    def table(self, source: BlockSource) -> Table:
        if id(source) not in self._tables:
            self._tables[id(source)] = self._table(source)
        return self._tables[id(source)]

    def _table(self, source: BlockSource) -> Table:
        if self.link is None or not source.needs_pairs:
            return table_of(source, self.device)
        rows, num_keys = num_blocks(source)
        share = -(-rows // self.size)
        first = min(self.link.rank * share, rows)
        # One message: each row's count and its bits.
        mine = np.zeros((share, 8 + source.heads * -(-num_keys // 8)), dtype=np.uint8)
        failure: Exception | None = None
        try:
            counts, bits = rows_of(source, first, min(first + share, rows), self.device)
            mine[: len(counts), :8] = counts[:, None].view(np.uint8)
            mine[: len(counts), 8:] = bits.swapaxes(0, 1).reshape(len(counts), mine.shape[1] - 8)
        except Exception as error:  # of the user's function, perhaps in this rank's rows alone
            mine[:, :8] = 255
            failure = error
        received = self.link.all_gather(torch.from_numpy(mine).to(self.device)).cpu()
        if failure is not None:
            raise failure
        if (received[:, 0, :8] == 255).all(1).any():
            agree(self.link, {}, self.device)  # hears from those that failed
        every = received.flatten(0, 1)[:rows].numpy()
        counts = np.ascontiguousarray(every[:, :8]).view(np.int64)[:, 0]
        bits = every[:, 8:].reshape(rows, source.heads, -1).swapaxes(0, 1)
        return Table(source.block_size, num_keys, counts, bits)


class Plan:
    """One layout of one sequence over one group, with a schedule for each mask. Made by `flexcp.plan`.

    Attributes:
        layout: which rank owns which chunk.
        rank, cp_size: this rank's number in the group and the group's size.
        comm: how keys move; one of planner.COMMS.
        ulysses: ranks that share the heads.
        seq_len: S, real tokens; local_len: L, rows of this rank, padding included.
        schedules: by the mask's name ("mask" where there is only one).
        link: the connection to the group, with counters of what was sent.
        device: where the plan's tensors live.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        comm: str,
        schedules: dict[str, Schedule],
        link: Link | None,
        device: torch.device,
    ) -> None:
        self.layout, self.rank, self.comm, self.schedules, self.device = layout, rank, comm, schedules, device
        self._link = link
        self.ulysses = next(iter(schedules.values())).ulysses
        self.cp_size, self.seq_len, self.local_len = layout.cp_size, layout.seq_len, layout.local_len
        positions = layout.positions(rank)[None].to(device)
        self.valid = positions < self.seq_len
        self.positions = positions.clamp(max=self.seq_len - 1)
        self._tokens = {name: Token(self, schedule, device) for name, schedule in schedules.items()}

    def __repr__(self) -> str:
        return (
            f"Plan(seq_len={self.seq_len}, rank={self.rank} of {self.cp_size}, local_len={self.local_len}, "
            f"layout={self.layout.name!r}, comm={self.comm!r}, masks={list(self.schedules)})"
        )

    @property
    def link(self) -> Link:
        self.require_group()
        assert self._link is not None
        return self._link

    def require_group(self) -> None:
        """Raises RuntimeError where the plan was made for a group that does not exist."""
        if self._link is None:
            raise RuntimeError(
                f"this plan was made for a group of {self.cp_size} that does not exist; "
                "to run it, pass flexcp.plan a DeviceMesh of that many ranks"
            )

    @property
    def block_mask(self) -> BlockMask:
        """What to hand to flex_attention inside the context; a token, not the mask itself (see `schedules`)."""
        if len(self._tokens) != 1:
            raise ValueError(
                f"this plan has several masks; use plan.block_masks[name], with name of {list(self._tokens)}"
            )
        return next(iter(self._tokens.values())).block_mask

    @property
    def block_masks(self) -> dict[str, BlockMask]:
        """As `block_mask`, by the mask's name."""
        return {name: token.block_mask for name, token in self._tokens.items()}

    @cached_property
    def whole_sequence_token(self) -> Token:
        """Stands for full attention over the whole sequence, which is what block_mask=None means."""
        some, device = next(iter(self.schedules.values())), self.device
        source = Everything(self.seq_len, some.source.block_size)
        table = lambda: table_of(source, device)  # noqa: E731
        schedule = planner.build_schedule(
            source, some.layout, self.rank, some.comm, table, device, some.head_groups, None, some.ulysses
        )
        return Token(self, schedule, device)

    def shard(self, x: Tensor, dim: int = 1, pad: float | int | bool | None = None) -> Tensor:
        """This rank's rows of a tensor that holds the whole sequence along `dim`, in local order.

        Args:
            x: size seq_len along dim; the same on every rank.
            pad: value of the padded tail; None: 0 for floating point, and refused for integers where there is a tail.
        Returns:
            x with size local_len along dim. Differentiable.
        Raises:
            ValueError: the size is not seq_len, or pad is missing.
        """
        return sharding.shard(x, self.layout, self.rank, dim, pad)

    def unshard(self, x: Tensor, dim: int = 1, grad: str | None = None) -> Tensor:
        """The whole sequence, in order and without its padding, from every rank's rows. A collective.

        Args:
            x: size local_len along dim.
            grad: for a tensor that requires grad: "replicated" (every rank computes the same loss from the result:
                backward slices) or "partial" (the ranks' losses differ and add up: backward reduce-scatters).
        Returns:
            x with size seq_len along dim, exactly what went into `shard`.
        Raises:
            ValueError: the size is not local_len, or grad is missing or unknown.
        """
        return sharding.unshard(x, self.layout, self.link, dim, grad)


def _check_like(like: Plan, seq_len: int, size: int, names: list[str]) -> None:
    if not isinstance(like, Plan):
        raise TypeError(f"like is an earlier flexcp.Plan, got {type(like).__name__}")
    own = like.seq_len, like.cp_size, list(like.schedules)
    if own != (seq_len, size, names):
        raise ValueError(
            f"like is a plan of {own[0]} tokens over {own[1]} ranks with masks {own[2]}, but this one is of {seq_len} "
            f"over {size} with {names}; leave like out where they change"
        )


def _check_numbers(seq_len: int, **optional: int | None) -> None:
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
        raise ValueError(f"seq_len is the number of tokens of the whole sequence, at least 1, got {seq_len!r}")
    if seq_len >= 2**31:
        raise ValueError(f"seq_len is below 2^31, since indices of tokens are int32, got {seq_len}")
    for what, number in optional.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{what} is a whole number, at least 1, got {number!r}")


def _block_size(given: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if given is None:
        return None
    pair = tuple(given) if isinstance(given, (tuple, list)) else (given, given)
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in pair):
        raise ValueError(f"block_size is a number of tokens or (queries, keys), each at least 1, got {given!r}")
    return pair


def _check_name(what: str, given: str, known: tuple[str, ...]) -> None:
    if given not in known:
        raise unknown(what, given, known)
