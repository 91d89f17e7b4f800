"""Reach: each key is visible from its own position up to an end of its own, kv <= q < end[kv].

Packed causal documents, shared prefixes and trees in depth-first order are all of this form, and boxes of it
have an exact closed form that needs only the largest and smallest end over the keys of the box.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.core import Classes, Mask
from flexcp.masks.tables import clamped, columns, drop_single_row, extreme, last_index


def reach_classes(
    q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor, largest_end: Tensor, smallest_end: Tensor
) -> Classes:
    """Classes of kv <= q < end[kv], where every end lies beyond its key.

    any: a key that the box shares with its own queries sees itself, so a box that straddles the diagonal
    (kv_lo < q_hi < kv_hi) sees something. A box whose keys all lie before q_hi sees something if some end
    reaches past q_lo.
    all: the last key must lie before the first query, and every end beyond the last query.

    Args:
        largest_end, smallest_end: over the keys of each range, broadcastable to [.., 1, nK].
    """
    first, last = q_lo[:, None], q_hi[:, None]
    some = (kv_lo < last) & ((kv_hi > last) | (largest_end > first))
    every = (kv_hi - 1 <= first) & (smallest_end >= last)
    return some, every


class Reach(Mask):
    """kv <= q < ends[kv], with ends a table [S] or [B, S]; `text` is the expression that made it."""

    def __init__(self, ends: Tensor, text: str):
        ends = drop_single_row(ends)
        self._ends = ends.to(torch.int32)
        self._clamp_to = last_index(ends)
        self.batch = ends.shape[0] if ends.dim() == 2 else None
        self.seq_len = ends.shape[-1]
        self.text = text

    def __call__(self, b, h, q_idx, kv_idx):
        key = clamped(kv_idx, self._clamp_to)
        end = self._ends[key] if self.batch is None else self._ends[b, key]
        return (kv_idx <= q_idx) & (q_idx < end)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        largest = columns(extreme(self._ends, kv_lo, kv_hi, largest=True))
        smallest = columns(extreme(self._ends, kv_lo, kv_hi, largest=False))
        return reach_classes(q_lo, q_hi, kv_lo, kv_hi, largest, smallest)

    def __repr__(self) -> str:
        return self.text
