"""attention_sink: a sliding window that keeps the first tokens in sight."""

from __future__ import annotations

from flexcp.masks.checks import quantity
from flexcp.masks.core import Mask
from flexcp.masks.tables import scalar


class AttentionSink(Mask):
    def __init__(self, num_sinks: int, window: int):
        self.num_sinks, self.window = num_sinks, window
        self._num_sinks, self._window = scalar(num_sinks), scalar(window)

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & ((kv_idx < self._num_sinks) | (q_idx - kv_idx < self._window))

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        below = kv_lo < q_hi[:, None]
        some = below & ((kv_lo < self.num_sinks) | (kv_hi - 1 > (q_lo - self.window)[:, None]))
        # The furthest pair that needs the window: the last query and the first key that is no sink.
        beyond = kv_lo.clamp(min=self.num_sinks)
        near = (kv_hi <= self.num_sinks) | (beyond > (q_hi - 1 - self.window)[:, None])
        return some, (kv_hi - 1 <= q_lo[:, None]) & near

    def __repr__(self) -> str:
        return f"attention_sink({self.num_sinks}, {self.window})"


def attention_sink(num_sinks: int, window: int) -> Mask:
    """Causal; each query sees the first num_sinks keys and the `window` keys that end at its own position.

        num_sinks 1, window 2
        kv 0 1 2 3
      q 0  #
        1  # #
        2  # # #
        3  #   # #

    Args:
        num_sinks: keys at the start that stay visible, in tokens, at least 1.
        window: keys up to the query, itself included, in tokens, at least 1.

    Returns:
        A Mask for any sequence length. Its classes are exact.

    Raises:
        ValueError: num_sinks or window is not an int of at least 1.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.attention_sink(1, 2)(0, 0, torch.tensor(3), torch.arange(4)).int().tolist()
        [1, 0, 1, 1]

    Source: Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks", 3.2.
    """
    return AttentionSink(
        quantity("attention_sink", "num_sinks", num_sinks), quantity("attention_sink", "window", window)
    )
