"""What each rank computes and receives when: from a layout and a mask to a schedule of stages. No collectives.

One executor walks many schedules. A *stage* is one call of the kernel: this rank's queries against the keys and values
of some ranks. `gather` is a single stage over everybody's; `ring` is one stage per rank; `exchange` is a single stage
over the blocks that its queries see, or several where a stage's size is fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.blockmask import local_block_mask
from flexcp.blocksource import BlockSource
from flexcp.exchange import Exchange, needs_by_owner, plan_exchange
from flexcp.heads import share_of_source, share_of_table
from flexcp.layout import Layout
from flexcp.maskmods import MaskMod
from flexcp.table import Table

# How keys reach the stages.
KINDS = ("gather", "ring", "exchange")
# "ulysses" swaps rows for heads; with another kind, among some of the ranks, and that kind moves keys between the rest.
COMMS = (*KINDS, "ulysses", *(f"ulysses+{kind}" for kind in KINDS))


def of_stages(comm: str) -> str:
    """The kind of communication by which stages get their keys: comm without ulysses."""
    return {"ulysses": "gather"}.get(comm, comm.removeprefix("ulysses+"))


def named(kind: str, ulysses: int, size: int) -> str:
    """The inverse of `of_stages` on a group of `size` ranks, `ulysses` of which share the heads."""
    if ulysses == 1:
        return kind
    return "ulysses" if ulysses == size else f"ulysses+{kind}"


@dataclass(frozen=True)
class Stage:
    """One kernel call of one rank.

    Attributes:
        sources: the ranks whose keys and values it reads, in the order in which they lie in the buffer.
        send_to: the rank that needs this rank's keys and values in the same step, or None.
        receive_from: the rank whose keys and values this rank needs in this step, or None.
        block_mask: local queries against the sources' keys; None where this rank computes nothing (it may still send).
        q_start, kv_start: int64, global index of the first row of each local query block and of each key block.
        mask_mod: the mask in global indices, False for padding.
        seq_len: S; rows at or past it are padding.
        exchange: the blocks that travel, where only needed ones do; sources is then empty.
    """

    sources: tuple[int, ...]
    send_to: int | None
    receive_from: int | None
    block_mask: BlockMask | None
    q_start: Tensor
    kv_start: Tensor
    mask_mod: MaskMod
    seq_len: int
    exchange: Exchange | None = None


@dataclass(frozen=True)
class Schedule:
    """One mask on one layout over one kind of communication, as one rank sees it.

    Attributes:
        layout: of the ranks among which keys move; with ulysses, each stands for those that share its rows.
        rank: among those.
        comm: "gather", "ring" or "exchange": how keys move.
        stages: in order of execution.
        source: the mask that they were made from, for the heads that this rank computes.
        head_groups: into how many groups of KV heads `gather` and `exchange` divide their work; groups: see
            `headgroups`.
        ulysses: ranks that share the heads.
    """

    layout: Layout
    rank: int
    comm: str
    source: BlockSource
    stages: tuple[Stage, ...]
    head_groups: int = 1
    ulysses: int = 1
    groups: dict[tuple[int, int], list] = field(default_factory=dict, repr=False)

    @property
    def mask_heads(self) -> int:
        """Query heads that the mask distinguishes, over all ranks; 1 where it is the same for all."""
        return 1 if self.source.heads == 1 else self.source.heads * self.ulysses

    @property
    def slots(self) -> int:
        """Blocks that each stage of `exchange` reads; 0 for other kinds."""
        return 0 if self.stages[0].exchange is None else self.stages[0].kv_start.numel()


def build_schedule(
    source: BlockSource,
    layout: Layout,
    rank: int,
    comm: str,
    table: Callable[[], Table],
    device: torch.device,
    head_groups: int = 1,
    slots: int | None = None,
    ulysses: int = 1,
) -> Schedule:
    """The stages of one rank.

    Args:
        layout: over the ranks among which keys move, which are those of the group / ulysses.
        rank: in the group; ranks that share heads follow one another.
        comm: "gather", "ring" or "exchange".
        table: gives what each query block of the sequence sees; `gather` does not ask. Every rank must get the same.
        slots: blocks that each stage of `exchange` reads; None: as many as make it one stage.
    """
    rank, index = divmod(rank, ulysses)
    source = share_of_source(source, ulysses, index)
    if comm == "gather" or layout.cp_size == 1:
        stages = _gather_stages(source, layout, rank, device)
    elif comm == "ring":
        need = sees(share_of_table(table(), ulysses, index), layout)
        stages = _ring_stages(source, layout, rank, need, device)
    else:
        some = share_of_table(table(), ulysses, index)
        stages = _exchange_stages(source, layout, rank, some, device, slots)
    return Schedule(layout, rank, comm, source, stages, head_groups, ulysses)


def sees(table: Table, layout: Layout) -> np.ndarray:
    """Which ranks' keys each rank's queries see at all: bool [reader, owner]."""
    return np.logical_or.reduce(needs_by_owner(table, layout), axis=(0, 3))


def _gather_stages(source: BlockSource, layout: Layout, rank: int, device: torch.device) -> tuple[Stage, ...]:
    """Everybody's keys at once, in rank order: large kernels, nothing to merge."""
    return (_stage(source, layout, rank, tuple(range(layout.cp_size)), device),)


def _ring_stages(
    source: BlockSource, layout: Layout, rank: int, need: np.ndarray, device: torch.device
) -> tuple[Stage, ...]:
    """In step t the keys of rank r - t arrive straight from their owner, if r sees any of them.

    Straight from the owner and not handed on by the neighbour: the bytes are the same, but nobody carries keys that it
    does not see itself, and no rank waits for a chain of others (docs/decisions/0003). A step in which a rank does
    nothing stays in its list, since all ranks must post their messages in the same order.
    """
    size = layout.cp_size
    stages = []
    for step in range(size):
        owner, reader = (rank - step) % size, (rank + step) % size
        stages.append(
            _stage(
                source,
                layout,
                rank,
                (owner,),
                device,
                computes=bool(need[rank, owner]),
                send_to=reader if step and need[reader, rank] else None,
                receive_from=owner if step and need[rank, owner] else None,
            )
        )
    return tuple(stages)


def _exchange_stages(
    source: BlockSource, layout: Layout, rank: int, table: Table, device: torch.device, slots: int | None
) -> tuple[Stage, ...]:
    """The blocks that this rank's queries see, and no others, at once; in several stages only for want of slots."""
    exchange, kv_starts = plan_exchange(table, layout, rank, slots)
    return tuple(_stage(source, layout, rank, (), device, kv_start=some, exchange=exchange) for some in kv_starts)


def _stage(
    source: BlockSource,
    layout: Layout,
    rank: int,
    sources: tuple[int, ...],
    device: torch.device,
    computes: bool = True,
    send_to: int | None = None,
    receive_from: int | None = None,
    kv_start: Tensor | None = None,
    exchange: Exchange | None = None,
) -> Stage:
    q_start = layout.starts(rank, source.block_size[0]).to(device)
    if kv_start is None:
        kv_start = torch.cat([layout.starts(other, source.block_size[1]) for other in sources])
    kv_start = kv_start.to(device)
    block_mask = None
    if computes:
        classes = source.classes(q_start, kv_start)
        block_mask = local_block_mask(classes, source.block_size, source.local_mask_mod(q_start, kv_start))
    return Stage(
        sources,
        send_to,
        receive_from,
        block_mask,
        q_start,
        kv_start,
        source.global_mask_mod(device),
        source.seq_len,
        exchange,
    )


def visible_work(schedule: Schedule) -> int:
    """Pairs in the non-empty blocks of this rank's stages, over the mask's batch rows and heads."""
    size = schedule.source.block_size
    masks = [stage.block_mask for stage in schedule.stages if stage.block_mask is not None]
    counts = [int(m.kv_num_blocks.sum()) + int(m.full_kv_num_blocks.sum()) for m in masks]  # type: ignore[union-attr]
    return sum(counts) * size[0] * size[1]
