"""padding: sequences of different lengths in one batch."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import flag, integers, quantity
from flexcp.masks.core import Mask
from flexcp.masks.tables import column


class Padding(Mask):
    def __init__(self, lengths: Tensor, queries: bool):
        self._lengths = lengths.to(torch.int32)  # 0-d, or [B]
        self.batch = None if lengths.dim() == 0 else lengths.numel()
        self.queries = queries

    def __call__(self, b, h, q_idx, kv_idx):
        length = self._lengths if self.batch is None else self._lengths[b]
        return (kv_idx < length) & (q_idx < length) if self.queries else kv_idx < length

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        length = column(self._lengths, q_lo.device)
        some, every = kv_lo < length, kv_hi <= length
        if self.queries:
            some, every = some & (q_lo[:, None] < length), every & (q_hi[:, None] <= length)
        return some, every

    def __repr__(self) -> str:
        return f"padding({self._lengths.tolist()}{', queries=True' if self.queries else ''})"


def padding(lengths: int | Tensor, *, queries: bool = False) -> Mask:
    """Keys at or beyond each row's length are invisible: kv < lengths[b].

        lengths 3             queries=True
        kv 0 1 2 3            kv 0 1 2 3
      q 0  # # #            q 0  # # #
        1  # # #              1  # # #
        2  # # #              2  # # #
        3  # # #              3

    Args:
        lengths: real tokens, at least 0: an int for all batch rows, or an integer tensor [B].
        queries: padded queries see nothing either (out 0, lse -inf).

    Returns:
        A Mask for any sequence length. Its classes are exact.

    Raises:
        ValueError: lengths is negative or not an int or integer tensor [B], or queries is not a bool.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.padding(torch.tensor([3, 1]))
        >>> mask(torch.tensor(1), 0, torch.tensor(0), torch.arange(4)).int().tolist()
        [1, 0, 0, 0]

    Source: key_padding_mask of torch.nn.MultiheadAttention.
    """
    queries = flag("padding", "queries", queries)
    if not isinstance(lengths, Tensor | list | tuple):
        return Padding(torch.tensor(quantity("padding", "lengths", lengths, least=0)), queries)
    lengths = integers("padding", "lengths", lengths, (0, 1), "[B]")
    if int(lengths.min()) < 0:
        raise ValueError(f"padding: lengths must be at least 0, got {int(lengths.min())}.")
    return Padding(lengths.reshape(()) if lengths.numel() == 1 else lengths, queries)
