"""causal and full: the two masks that need nothing."""

from __future__ import annotations

import torch

from flexcp.masks.core import Mask


class Causal(Mask):
    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        return q_hi[:, None] > kv_lo, q_lo[:, None] >= kv_hi - 1

    def __repr__(self) -> str:
        return "causal()"


class Full(Mask):
    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx.new_ones((), dtype=torch.bool)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        every = q_lo.new_ones((1, 1), dtype=torch.bool)
        return every, every

    def __repr__(self) -> str:
        return "full()"


def causal() -> Mask:
    """Each query sees its own position and everything before it: kv <= q.

        kv 0 1 2 3
      q 0  #
        1  # #
        2  # # #
        3  # # # #

    Returns:
        A Mask for any sequence length. Its classes are exact.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.causal()(0, 0, torch.tensor(2), torch.tensor([1, 2, 3])).tolist()
        [True, True, False]

    Source: Vaswani et al. 2017, "Attention Is All You Need", 3.2.3.
    """
    return Causal()


def full() -> Mask:
    """Each query sees every key.

        kv 0 1 2 3
      q 0  # # # #
        1  # # # #
        2  # # # #
        3  # # # #

    Returns:
        A Mask for any sequence length. Its classes are exact. Called, it returns a 0-d True that broadcasts.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.full()(0, 0, torch.tensor(0), torch.tensor(3)).item()
        True

    Source: Vaswani et al. 2017, "Attention Is All You Need", 3.2.3 (the encoder).
    """
    return Full()
