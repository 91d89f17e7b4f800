"""where_head and per_batch: another mask for some heads, or for each batch row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexcp.masks.checks import integers, merge_sizes, quantity
from flexcp.masks.core import Mask, MaskMod, lift


class WhereHead(Mask):
    _parts = ("mask", "otherwise")

    def __init__(self, chosen: Tensor, mask: Mask, otherwise: Mask):
        self._chosen = chosen  # bool [H]
        self.mask, self.otherwise = mask, otherwise
        sides = f"{mask!r} and {otherwise!r}"
        self.batch = merge_sizes("batch rows", mask.batch, otherwise.batch, sides)
        self.seq_len = merge_sizes("tokens", mask.seq_len, otherwise.seq_len, sides)
        inner = merge_sizes("heads", mask.heads, otherwise.heads, sides)
        self.heads = merge_sizes("heads", chosen.numel(), inner, f"where_head and {sides}")
        self.needs_pairs = mask.needs_pairs or otherwise.needs_pairs

    def __call__(self, b, h, q_idx, kv_idx):
        chosen = self._chosen[h]
        return (chosen & self.mask(b, h, q_idx, kv_idx)) | (~chosen & self.otherwise(b, h, q_idx, kv_idx))

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        chosen = self._chosen.to(q_lo.device)[:, None, None]
        these = self.mask.classify(q_lo, q_hi, kv_lo, kv_hi)
        those = self.otherwise.classify(q_lo, q_hi, kv_lo, kv_hi)
        return torch.where(chosen, these[0], those[0]), torch.where(chosen, these[1], those[1])

    def __repr__(self) -> str:
        heads = self._chosen.nonzero().flatten().tolist()
        return f"where_head({heads}, {self.mask!r}, {self.otherwise!r}, num_heads={self.heads})"


def where_head(
    heads: Sequence[int] | Tensor, mask: Mask | MaskMod, otherwise: Mask | MaskMod, *, num_heads: int
) -> Mask:
    """`mask` for the heads named, `otherwise` for the rest.

        where_head([0], causal(), sliding_window(2), num_heads=2)
        head 0                  head 1
        kv 0 1 2 3              kv 0 1 2 3
      q 0  #                  q 0  #
        1  # #                  1  # #
        2  # # #                2    # #
        3  # # # #              3      # #

    Args:
        heads: query heads, each in [0, num_heads).
        mask, otherwise: masks or plain functions mask_mod(b, h, q_idx, kv_idx).
        num_heads: H, the number of query heads.

    Returns:
        A Mask for H query heads. Its classes are as exact as those of the two.

    Raises:
        ValueError: a head is out of range, or the masks are made for different sizes.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.where_head([0], masks.causal(), masks.sliding_window(2), num_heads=2)
        >>> mask(0, torch.tensor([[0], [1]]), torch.tensor(3), torch.arange(4)).int().tolist()
        [[1, 1, 1, 1], [0, 0, 1, 1]]

    Source: the streaming and retrieval heads of Xiao et al. 2025, "DuoAttention".
    """
    quantity("where_head", "num_heads", num_heads)
    heads = integers("where_head", "heads", heads, (1,), "[n]").long()
    if int(heads.min()) < 0 or int(heads.max()) >= num_heads:
        raise ValueError(f"where_head: heads must lie in [0, {num_heads}), got {heads.tolist()}; check num_heads.")
    chosen = torch.zeros(num_heads, dtype=torch.bool, device=heads.device)
    chosen[heads] = True
    return WhereHead(chosen, lift(mask), lift(otherwise))


class PerBatch(Mask):
    def __init__(self, masks: tuple[Mask, ...]):
        self.masks = masks
        self._rows = tuple(torch.tensor(row) for row in range(len(masks)))
        self.batch = len(masks)
        self.needs_pairs = any(mask.needs_pairs for mask in masks)
        for mask in masks:
            if mask.batch not in (None, 1):
                raise ValueError(
                    f"per_batch: {mask!r} already distinguishes {mask.batch} batch rows; give one mask for one row."
                )
            sides = f"the rows of per_batch, {masks[0]!r} and {mask!r}"
            self.heads = merge_sizes("heads", self.heads, mask.heads, sides)
            self.seq_len = merge_sizes("tokens", self.seq_len, mask.seq_len, sides)

    def __call__(self, b, h, q_idx, kv_idx):
        visible = (b == self._rows[0]) & self.masks[0](b, h, q_idx, kv_idx)
        for row, mask in zip(self._rows[1:], self.masks[1:]):
            visible = visible | ((b == row) & mask(b, h, q_idx, kv_idx))
        return visible

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        shape = (1, self.heads or 1, q_lo.numel(), kv_lo.numel())
        answers = [mask.classify(q_lo, q_hi, kv_lo, kv_hi) for mask in self.masks]
        return tuple(torch.cat([answer[i].expand(shape) for answer in answers]) for i in (0, 1))

    def __repr__(self) -> str:
        return f"per_batch([{', '.join(map(repr, self.masks))}])"


def per_batch(masks: Sequence[Mask | MaskMod]) -> Mask:
    """masks[b] for batch row b.

        per_batch([causal(), full()])
        row 0                   row 1
        kv 0 1                  kv 0 1
      q 0  #                  q 0  # #
        1  # #                  1  # #

    Args:
        masks: one mask or plain function for each batch row. Each is evaluated for every row, so where many
            rows have one kind of mask, prefer a mask with a table [B, ...].

    Returns:
        A Mask for len(masks) batch rows. Its classes are as exact as those of the masks.

    Raises:
        ValueError: there is no mask, one distinguishes batch rows itself, or they are made for different
        sizes.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.per_batch([masks.causal(), masks.full()])
        >>> mask(torch.tensor([[0], [1]]), 0, torch.tensor(0), torch.arange(2)).int().tolist()
        [[1, 0], [1, 1]]

    Source: none; rows of a batch are independent.
    """
    if not isinstance(masks, list | tuple) or not masks:
        raise ValueError(f"per_batch: a list of masks is needed, one for each batch row, got {masks!r}.")
    return PerBatch(tuple(lift(mask) for mask in masks))
