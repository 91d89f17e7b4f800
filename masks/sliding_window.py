"""sliding_window: each query sees its neighbourhood."""

from __future__ import annotations

import copy

from flexcp.masks.causal import Causal
from flexcp.masks.checks import flag, quantity
from flexcp.masks.core import Mask
from flexcp.masks.tables import scalar


class SlidingWindow(Mask):
    def __init__(self, window: int, two_sided: bool, dilation: int):
        self.window, self.two_sided, self.dilation = window, two_sided, dilation
        self.furthest = (window - 1) * dilation  # the largest visible distance
        self._furthest = scalar(self.furthest)
        self._dilation = scalar(dilation)
        self._dilated = dilation > 1
        self.text: str | None = None

    def __call__(self, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        # No abs(): CUDA 13's ptxas has been seen to miscompile its predicate in the backward kernel.
        nearest = -self._furthest if self.two_sided else 0
        visible = (distance >= nearest) & (distance <= self._furthest)
        return visible & (distance % self._dilation == 0) if self._dilated else visible

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        # A box holds every distance q - kv from q_lo - (kv_hi - 1) to (q_hi - 1) - kv_lo; visible are those
        # in [nearest, furthest], of them the multiples of the dilation. Sides are moved so that only bools
        # are nQ x nK.
        nearest = -self.furthest if self.two_sided else 0
        above = (q_hi - 1 - nearest)[:, None] >= kv_lo
        some = above & ((q_lo - self.furthest)[:, None] <= kv_hi - 1)
        every = ((q_lo - nearest)[:, None] >= kv_hi - 1) & ((q_hi - 1 - self.furthest)[:, None] <= kv_lo)
        if not self._dilated:
            return some, every
        low = (q_lo[:, None] - (kv_hi - 1)).clamp_(min=nearest)
        high = ((q_hi - 1)[:, None] - kv_lo).clamp_(max=self.furthest)
        some &= high.div_(self.dilation, rounding_mode="floor").mul_(self.dilation) >= low
        single = (q_hi - q_lo == 1)[:, None] & (kv_hi - kv_lo == 1)
        return some, some & single

    def joined(self, other: Mask, text: str) -> Mask | None:
        """With causal, which it is by itself."""
        if not isinstance(other, Causal) or self.two_sided:
            return None
        same = copy.copy(self)
        same.text, same.precedence = text, 3
        return same

    def __repr__(self) -> str:
        if self.text is not None:
            return self.text
        two_sided = ", two_sided=True" if self.two_sided else ""
        dilation = f", dilation={self.dilation}" if self._dilated else ""
        return f"sliding_window({self.window}{two_sided}{dilation})"


def sliding_window(window: int, *, two_sided: bool = False, dilation: int = 1) -> Mask:
    """Each query sees the `window` keys that end at its own position: q - window < kv <= q.

        window 2              window 2, two-sided     window 2, dilation 2
        kv 0 1 2 3            kv 0 1 2 3              kv 0 1 2 3
      q 0  #                q 0  # #                q 0  #
        1  # #                1  # # #                1    #
        2    # #              2    # # #              2  #   #
        3      # #            3      # #              3    #   #

    Args:
        window: number of keys a query sees on one side, itself included, in tokens; at least 1.
        two_sided: also the window - 1 keys after it: |q - kv| < window. Not causal.
        dilation: gap between visible keys, in tokens: the window reaches (window - 1) * dilation back and
            only distances that are multiples of dilation are visible.

    Returns:
        A Mask for any sequence length, causal unless two_sided. Its classes are exact.

    Raises:
        ValueError: window or dilation is not an int of at least 1, or two_sided is not a bool.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.sliding_window(2)(0, 0, torch.tensor(3), torch.arange(5)).int().tolist()
        [0, 0, 1, 1, 0]

    Source: Beltagy et al. 2020, "Longformer", 3.1; Jiang et al. 2023, "Mistral 7B", 2.
    """
    quantity("sliding_window", "window", window)
    quantity("sliding_window", "dilation", dilation)
    return SlidingWindow(window, flag("sliding_window", "two_sided", two_sided), dilation)
