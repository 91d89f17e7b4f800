"""From a mask to block classes, in global indices and without ever evaluating S x S."""

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.blockmask import FULL, PARTIAL, block_classes
from flexcp.maskmods import MaskMod, as_bool, name_of, reads

# Pairs of (query, key) evaluated at once where a mask can only be asked pair by pair: 4M bools and their int64
# indices stay under 100 MiB.
_PAIRS_AT_ONCE = 1 << 22
# On a GPU many pairs are worth a compiled program (some seconds), which keeps no pair in memory.
_PAIRS_WORTH_COMPILING = 1 << 33
_PAIRS_AT_ONCE_COMPILED = 1 << 30


@runtime_checkable
class ClosedFormMask(Protocol):
    """A mask_mod that can also class boxes of pairs without looking at the pairs (flexcp.masks.Mask is one)."""

    batch: int | None
    heads: int | None
    needs_pairs: bool
    seq_len: int | None

    def __call__(self, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor: ...

    def to(self, device: torch.device | str) -> "ClosedFormMask": ...

    def inside(self) -> "ClosedFormMask": ...

    def classify(self, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor) -> tuple[Tensor, Tensor]: ...


class BlockSource:
    """Answers which class each block has; knows the true mask_mod, in global indices.

    Attributes:
        mask_mod: the mask in global indices, safe to call with any index in [0, seq_len).
        seq_len: S, the number of real tokens.
        block_size: (queries, keys) in a block.
        batch, heads: 1 where the mask is the same for all of them, else how many it distinguishes.
        needs_pairs: True where classes cost an evaluation of pairs, so that ranks should share the work.
    """

    needs_pairs = False

    def __init__(
        self,
        mask_mod: MaskMod,
        seq_len: int,
        block_size: tuple[int, int],
        batch: int | None,
        heads: int | None,
    ) -> None:
        self.mask_mod = mask_mod
        self.seq_len = seq_len
        self.block_size = block_size
        self.batch = batch or 1
        self.heads = heads or 1

    def inner_classes(self, q_start: Tensor, kv_start: Tensor) -> Tensor:
        """Classes of the blocks that begin at these global indices, all below seq_len, ignoring padding.

        Args:
            q_start: [nq] int64, kv_start: [nk] int64.
        Returns:
            uint8 [batch, heads, nq, nk].
        """
        raise NotImplementedError

    def classes(self, q_start: Tensor, kv_start: Tensor) -> Tensor:
        """As `inner_classes`, but for any blocks of the padded sequence: padding sees nothing and is not seen.

        A block that holds both real tokens and padding is never full.
        """
        q_real, kv_real = q_start < self.seq_len, kv_start < self.seq_len
        result = torch.zeros(
            self.batch,
            self.heads,
            q_start.numel(),
            kv_start.numel(),
            dtype=torch.uint8,
            device=q_start.device,
        )
        if not (q_real.any() and kv_real.any()):
            return result
        inner = self.inner_classes(q_start[q_real], kv_start[kv_real])
        torn = (q_start[q_real] + self.block_size[0] > self.seq_len)[:, None] | (
            kv_start[kv_real] + self.block_size[1] > self.seq_len
        )
        inner = torch.where(torn & (inner == FULL), PARTIAL, inner).to(torch.uint8)
        rows = result.new_zeros(self.batch, self.heads, inner.shape[2], kv_start.numel())
        rows[..., kv_real] = inner
        result[:, :, q_real] = rows
        return result

    def global_mask_mod(self, device: torch.device) -> MaskMod:
        """The mask in global indices of the padded sequence: padding sees nothing and is not seen."""
        seq_len = torch.tensor(self.seq_len, dtype=torch.int32, device=device)
        last = seq_len - 1
        mask_mod = self.mask_mod

        def global_mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            q_real, kv_real = q < seq_len, kv < seq_len
            # A mask's captured tables end with the sequence, so padding asks for its last token. (FLASH, in
            # torch 2.11, knows `where` but not `minimum`.)
            seen = mask_mod(b, h, torch.where(q_real, q, last), torch.where(kv_real, kv, last))
            return q_real & kv_real & seen

        return global_mask_mod

    def local_mask_mod(self, q_start: Tensor, kv_start: Tensor) -> MaskMod:
        """The mask in *local* indices: two int32 tables lead to global ones.

        They are tensors, so that a new layout is new data and not a new program. They have an entry a row and not a
        block: inside a partial block a kernel asks for each pair, and what it computes there is most of a partial
        block's time (docs/decisions/0021). For the same reason padding is told apart only where some block holds
        tokens and padding; nobody asks about blocks of padding alone.

        Args:
            q_start: [nq] int64, kv_start: [nk] int64, global index of each block's first row.
        """
        mask_mod, seq_len = self.mask_mod, self.seq_len
        torn = any(seq_len % size for size in self.block_size)
        rows = (row_positions(start, size) for start, size in zip((q_start, kv_start), self.block_size))
        q_position, kv_position = (x.masked_fill(x >= seq_len, -1 if torn else 0).to(torch.int32) for x in rows)

        def whole(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return mask_mod(b, h, q_position[q_idx], kv_position[kv_idx])

        def local_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            q, kv = q_position[q_idx], kv_position[kv_idx]
            q_real, kv_real = q >= 0, kv >= 0
            # A mask's captured tables begin and end with the sequence, so padding asks for its first token.
            seen = mask_mod(b, h, torch.where(q_real, q, 0), torch.where(kv_real, kv, 0))
            return q_real & kv_real & seen

        return local_mask_mod if torn else whole


def row_positions(start: Tensor, size: int) -> Tensor:
    """Global index of each row of the blocks of `size` rows that begin at `start`; int64, padding not told apart."""
    return (start[:, None] + torch.arange(size, device=start.device)).flatten()


class Everything(BlockSource):
    """Full attention: every real token sees every other."""

    def __init__(self, seq_len: int, block_size: tuple[int, int]) -> None:
        super().__init__(_see_all, seq_len, block_size, None, None)

    def inner_classes(self, q_start: Tensor, kv_start: Tensor) -> Tensor:
        return torch.full((1, 1, q_start.numel(), kv_start.numel()), FULL, dtype=torch.uint8, device=q_start.device)


def _see_all(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx == q_idx


class _TableSource(BlockSource):
    """A BlockMask made elsewhere: its blocks are looked up and kept, whatever its mask_mod says of them."""

    def __init__(self, block_mask: BlockMask, seq_len: int) -> None:
        table = block_classes(block_mask)
        super().__init__(block_mask.mask_mod, seq_len, block_mask.BLOCK_SIZE, table.shape[0], table.shape[1])
        self.table = table

    def inner_classes(self, q_start: Tensor, kv_start: Tensor) -> Tensor:
        rows = self.table[:, :, (q_start // self.block_size[0]).to(self.table.device)]
        return rows[..., (kv_start // self.block_size[1]).to(self.table.device)].to(q_start.device)


class _MaskSource(BlockSource):
    """A closed-form mask, or a plain mask_mod, of which every block is undecided until its pairs are evaluated."""

    def __init__(
        self,
        mask: MaskMod,
        seq_len: int,
        block_size: tuple[int, int],
        batch: int | None,
        heads: int | None,
    ) -> None:
        self.closed_form = mask if isinstance(mask, ClosedFormMask) else None
        super().__init__(self.closed_form.inside() if self.closed_form else mask, seq_len, block_size, batch, heads)
        self.needs_pairs = self.closed_form is None or self.closed_form.needs_pairs

    def inner_classes(self, q_start: Tensor, kv_start: Tensor) -> Tensor:
        shape = (self.batch, self.heads, q_start.numel(), kv_start.numel())
        if self.closed_form is None:
            result = torch.full(shape, PARTIAL, dtype=torch.uint8, device=q_start.device)
        else:
            q_end = (q_start + self.block_size[0]).clamp(max=self.seq_len)
            kv_end = (kv_start + self.block_size[1]).clamp(max=self.seq_len)
            seen, whole = self.closed_form.classify(q_start, q_end, kv_start, kv_end)
            result = (seen.to(torch.uint8) + (seen & whole).to(torch.uint8)).expand(shape).contiguous()
        if self.needs_pairs:
            self._look_at_pairs(result, q_start, kv_start)
        return result

    def _look_at_pairs(self, classes: Tensor, q_start: Tensor, kv_start: Tensor) -> None:
        """Decides the PARTIAL blocks of `classes`, in place, by evaluating their pairs, a bounded number at once."""
        pairs = self.block_size[0] * self.block_size[1]
        undecided = (classes == PARTIAL).nonzero()
        compiled = classes.device.type == "cuda" and undecided.shape[0] * pairs >= _PAIRS_WORTH_COMPILING
        decide = torch.compile(self._decide, dynamic=False, fullgraph=True) if compiled else self._decide
        at_once = max(1, (_PAIRS_AT_ONCE_COMPILED if compiled else _PAIRS_AT_ONCE) // pairs)
        for some in undecided.split(at_once):
            count = some.shape[0]
            if compiled:  # one shape, one program
                some = torch.cat([some, some[-1:].expand(at_once - count, -1)])
            b, h, i, j = some.unbind(1)
            try:
                seen, whole = decide(b, h, q_start[i], kv_start[j])
            except (IndexError, KeyError, ArithmeticError) as error:
                name = name_of(self.mask_mod)
                raise ValueError(f"the mask_mod {name} raised {type(error).__name__}: {error}") from error
            classes[b, h, i, j] = seen.to(torch.uint8) + (seen & whole).to(torch.uint8)

    def _decide(self, b: Tensor, h: Tensor, q_start: Tensor, kv_start: Tensor) -> tuple[Tensor, Tensor]:
        """Whether any and whether all of each block's real pairs are visible: bool [n] each, from int64 [n]."""
        q = q_start[:, None] + torch.arange(self.block_size[0], device=q_start.device)
        kv = kv_start[:, None] + torch.arange(self.block_size[1], device=q_start.device)
        outside = (q >= self.seq_len)[:, :, None] | (kv >= self.seq_len)[:, None, :]
        last = self.seq_len - 1
        mask_mod = torch.vmap(torch.vmap(self.mask_mod, in_dims=(None, None, None, 0)), in_dims=(None, None, 0, None))
        visible = as_bool(torch.vmap(mask_mod)(b, h, q.clamp(max=last), kv.clamp(max=last)))
        seen = (visible & ~outside).flatten(1).any(1)
        return seen, (visible | outside).flatten(1).all(1)


def block_source(
    mask: BlockMask | MaskMod,
    seq_len: int,
    block_size: tuple[int, int] | None,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | str = "cpu",
) -> BlockSource:
    """The source of classes for whatever a user may hand over as a mask.

    Args:
        mask: a BlockMask of the whole sequence, a closed-form mask, or a mask_mod in global indices.
        seq_len: S, tokens.
        block_size: (queries, keys), tokens; None: the BlockMask's own, else 128 x 128.
        batch, heads: how many a plain mask_mod distinguishes; None: it reads neither.
        device: where its blocks are classed; what a plain mask_mod captures must live there already.
    Raises:
        ValueError, TypeError: one sentence; see the checks.
    """
    if isinstance(mask, BlockMask):
        _check_block_mask(mask, seq_len, block_size)
        return _TableSource(mask.to(device), seq_len)
    if not callable(mask):
        raise TypeError(
            f"a mask is a mask_mod (a function of b, h, q_idx, kv_idx), a flexcp.masks.Mask or a BlockMask, "
            f"got {type(mask).__name__}"
        )
    if isinstance(mask, ClosedFormMask):
        if mask.seq_len is not None and mask.seq_len != seq_len:
            raise ValueError(
                f"{mask!r} is made for a sequence of {mask.seq_len} tokens, but seq_len is {seq_len}; "
                "make the mask for the whole sequence, before it is sharded"
            )
        batch, heads = _merged("batch", batch, mask.batch), _merged("heads", heads, mask.heads)
        mask = mask.to(device)
    else:
        _check_reads(mask, batch, heads, device)
    return _MaskSource(mask, seq_len, block_size or (128, 128), batch, heads)


def _merged(name: str, given: int | None, own: int | None) -> int | None:
    if given is not None and own is not None and given != own:
        raise ValueError(f"plan was told {name}={given}, but the mask is made for {name}={own}")
    return own if given is None else given


def _check_block_mask(mask: BlockMask, seq_len: int, block_size: tuple[int, int] | None) -> None:
    own = mask.BLOCK_SIZE
    if (mask.kv_num_blocks < 0).any():
        raise ValueError(
            "this is the block_mask of a flexcp plan, which only stands for its mask; pass the mask itself"
        )
    if block_size is not None and tuple(block_size) != tuple(own):
        raise ValueError(f"plan was told block_size={block_size}, but the BlockMask has BLOCK_SIZE={own}")
    if getattr(mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ValueError("this BlockMask was sliced, which loses its mask_mod; pass the whole BlockMask instead")
    for what, length, size in zip(("queries", "keys"), mask.seq_lengths, own):
        if length not in (seq_len, -(-seq_len // size) * size):
            raise ValueError(
                f"the BlockMask is made for {length} {what}, but seq_len is {seq_len}; "
                "make it for the whole sequence (context parallelism is for self-attention)"
            )
    if mask.kv_indices.dim() != 4:
        raise ValueError(
            f"the BlockMask's kv_indices have {mask.kv_indices.dim()} dimensions, but [batch, heads, rows, columns] "
            "is needed; unsqueeze the missing ones"
        )


def _check_reads(mask_mod: MaskMod, batch: int | None, heads: int | None, device: torch.device | str) -> None:
    """Refuses a mask_mod that reads b or h without a declared number: its blocks would be classed for index 0 alone."""
    asked = zip(("b", "h"), ("batch", "heads"), ("batch rows", "query heads"), reads(mask_mod, device), (batch, heads))
    for letter, argument, what, is_read, given in asked:
        if is_read and given is None:
            raise ValueError(
                f"the mask_mod {name_of(mask_mod)} reads {letter}, so plan needs {argument}=, the number of {what} it "
                "distinguishes"
            )
