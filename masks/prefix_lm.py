"""prefix_lm: a prompt seen from everywhere, then causal."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import integers, quantity
from flexcp.masks.core import Mask
from flexcp.masks.tables import column


class PrefixLM(Mask):
    def __init__(self, prefix_len: Tensor):
        self._prefix = prefix_len.to(torch.int32)  # 0-d, or [B]
        self.batch = None if prefix_len.dim() == 0 else prefix_len.numel()

    def __call__(self, b, h, q_idx, kv_idx):
        prefix = self._prefix if self.batch is None else self._prefix[b]
        return (kv_idx < prefix) | (kv_idx <= q_idx)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        # Both parts see keys from the left: the first key decides any, the last decides all.
        prefix = column(self._prefix, q_lo.device)  # [B or 1, 1, 1, 1]
        some = (kv_lo < prefix) | (kv_lo < q_hi[:, None])
        every = (kv_hi <= prefix) | (kv_hi - 1 <= q_lo[:, None])
        return some, every

    def __repr__(self) -> str:
        return f"prefix_lm({self._prefix.tolist()})"


def prefix_lm(prefix_len: int | Tensor) -> Mask:
    """Every query sees the first prefix_len keys; the rest is causal: kv < prefix_len or kv <= q.

        prefix_len 2
        kv 0 1 2 3
      q 0  # #
        1  # #
        2  # # #
        3  # # # #

    Args:
        prefix_len: length of the prefix in tokens, at least 0: an int for all batch rows, or an integer
            tensor [B]. A prefix as long as the sequence or longer makes the mask full.

    Returns:
        A Mask for any sequence length. Its classes are exact.

    Raises:
        ValueError: prefix_len is negative, a bool, a float, or a tensor that is not [B] of integers.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.prefix_lm(2)(0, 0, torch.tensor(0), torch.arange(4)).int().tolist()
        [1, 1, 0, 0]

    Source: Raffel et al. 2020, "T5", 3.2.1; Liu et al. 2018, "Generating Wikipedia by Summarizing Long
    Sequences".
    """
    if isinstance(prefix_len, Tensor | list | tuple):
        prefix_len = integers("prefix_lm", "prefix_len", prefix_len, (0, 1), "[B]")
        if int(prefix_len.min()) < 0:
            raise ValueError(f"prefix_lm: prefix_len must be at least 0, got {int(prefix_len.min())}.")
        return PrefixLM(prefix_len.reshape(()) if prefix_len.numel() == 1 else prefix_len)
    return PrefixLM(torch.tensor(quantity("prefix_lm", "prefix_len", prefix_len, least=0)))
