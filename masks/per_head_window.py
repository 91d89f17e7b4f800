"""per_head_window: a sliding window of its own for each head."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import flag, integers
from flexcp.masks.core import Mask


class PerHeadWindow(Mask):
    def __init__(self, windows: Tensor, two_sided: bool):
        self._furthest = (windows - 1).to(torch.int32)  # [H]
        self.two_sided = two_sided
        self.heads = windows.numel()

    def __call__(self, b, h, q_idx, kv_idx):
        distance, furthest = q_idx - kv_idx, self._furthest[h]
        nearest = -furthest if self.two_sided else 0
        return (distance >= nearest) & (distance <= furthest)

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        furthest = self._furthest.to(q_lo.device, torch.int64)[:, None, None]
        nearest = -furthest if self.two_sided else furthest.new_zeros(1, 1, 1)
        first, last = q_lo[:, None], q_hi[:, None] - 1
        some = (last - nearest >= kv_lo) & (first - furthest <= kv_hi - 1)
        every = (first - nearest >= kv_hi - 1) & (last - furthest <= kv_lo)
        return some[None], every[None]

    def __repr__(self) -> str:
        two_sided = ", two_sided=True" if self.two_sided else ""
        return f"per_head_window({(self._furthest + 1).tolist()}{two_sided})"


def per_head_window(windows: Tensor, *, two_sided: bool = False) -> Mask:
    """Head h sees the windows[h] keys that end at the query: q - windows[h] < kv <= q.

        head 0: windows[0] 1    head 1: windows[1] 3
        kv 0 1 2 3              kv 0 1 2 3
      q 0  #                  q 0  #
        1    #                  1  # #
        2      #                2  # # #
        3        #              3    # # #

    Args:
        windows: integer tensor [H], one for each query head, in tokens, at least 1.
        two_sided: also the windows[h] - 1 keys after it. Not causal.

    Returns:
        A Mask for any sequence length and H query heads. Its classes are exact.

    Raises:
        ValueError: windows is not an integer tensor [H] of at least 1, or two_sided is not a bool.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.per_head_window(torch.tensor([1, 3]))
        >>> mask(0, torch.tensor(1), torch.tensor(3), torch.arange(4)).int().tolist()
        [0, 1, 1, 1]

    Source: Sukhbaatar et al. 2019, "Adaptive Attention Span in Transformers".
    """
    windows = integers("per_head_window", "windows", windows, (1,), "[H]").long()
    if int(windows.min()) < 1:
        raise ValueError(f"per_head_window: every window must be at least 1, got {int(windows.min())}.")
    return PerHeadWindow(windows, flag("per_head_window", "two_sided", two_sided))
