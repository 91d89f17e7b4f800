"""offset: a mask somewhere else in the sequence."""

from __future__ import annotations

import torch

from flexcp.masks.core import Mask, MaskMod, lift
from flexcp.masks.tables import scalar


class Offset(Mask):
    def __init__(self, mask: Mask, q: int, kv: int):
        self.mask, self.q, self.kv = mask, q, kv
        self._q, self._kv = scalar(q), scalar(kv)
        self._size = scalar(2**31 - 1 if mask.seq_len is None else mask.seq_len)
        self.batch, self.heads, self.needs_pairs = mask.batch, mask.heads, mask.needs_pairs

    def __call__(self, b, h, q_idx, kv_idx):
        q_idx, kv_idx = q_idx + self._q, kv_idx + self._kv
        inside = (q_idx >= 0) & (kv_idx >= 0) & (q_idx < self._size) & (kv_idx < self._size)
        return inside & self.mask(b, h, q_idx.clamp(min=0), kv_idx.clamp(min=0))

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        q_lo, q_hi, q_some, q_every = self._inside(q_lo + self.q, q_hi + self.q)
        kv_lo, kv_hi, kv_some, kv_every = self._inside(kv_lo + self.kv, kv_hi + self.kv)
        some, every = self.mask.classify(q_lo, q_hi, kv_lo, kv_hi)
        return some & q_some[:, None] & kv_some, every & q_every[:, None] & kv_every

    def _inside(self, lo, hi):
        """The part of each range within the mask's sequence (one token where there is none): lo, hi, some, all."""
        size = 2**31 - 1 if self.mask.seq_len is None else self.mask.seq_len
        some, every = (hi > 0) & (lo < size), (lo >= 0) & (hi <= size)
        lo = lo.clamp(0, size - 1)
        return lo, torch.maximum(hi.clamp(max=size), lo + 1), some, every

    def __repr__(self) -> str:
        return f"offset({self.mask!r}, q={self.q}, kv={self.kv})"


def offset(mask: Mask | MaskMod, *, q: int = 0, kv: int = 0) -> Mask:
    """`mask` asked about (q_idx + q, kv_idx + kv): positive for a chunk of queries that starts at q (chunked
    prefill, decoding), negative to place a mask behind others (an image after q text tokens). Outside the
    mask's own sequence nothing is visible.

        offset(causal(), q=2)      offset(full(), q=-2, kv=-2)
        kv 0 1 2 3                 kv 0 1 2 3
      q 0  # # #                 q 0
        1  # # # #                 1
                                   2      # #
                                   3      # #

    Args:
        mask: a mask or plain function mask_mod(b, h, q_idx, kv_idx).
        q, kv: added to the indices, in tokens; either sign.

    Returns:
        A Mask for any sequence length. Its classes are as exact as those of `mask`.

    Raises:
        ValueError: q or kv is not an int that fits into 31 bits.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.offset(masks.causal(), q=2)(0, 0, torch.tensor(0), torch.arange(4)).int().tolist()
        [1, 1, 1, 0]

    Source: "chunked prefill", Agrawal et al. 2024, "Sarathi-Serve", 4.
    """
    for name, value in (("q", q), ("kv", kv)):
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**31:
            raise ValueError(f"offset: {name} must be an int below 2^31 in size, got {value!r}.")
    return Offset(lift(mask), q, kv)
