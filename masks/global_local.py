"""global_local: a window for all tokens, the whole sequence for a few."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import quantity
from flexcp.masks.core import Mask
from flexcp.masks.tables import clamped, columns, drop_single_row, last_index, rows, scalar, take


class GlobalLocal(Mask):
    def __init__(self, window: int, is_global: Tensor):
        table = drop_single_row(is_global)
        self.window = window
        self._furthest = scalar(window - 1).to(table.device)
        self._is_global = table
        self._clamp_to = last_index(table)
        self.batch = table.shape[0] if table.dim() == 2 else None
        self.seq_len = table.shape[-1]
        # For classes: the nearest global token at or after each position, and the nearest others on either
        # side.
        position = torch.arange(self.seq_len, device=table.device, dtype=torch.int32).expand(table.shape)
        self._next_global = _nearest_after(position, table)
        self._next_local = _nearest_after(position, ~table)
        self._previous_local = position.masked_fill(table, -1).cummax(-1).values

    def __call__(self, b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        q_idx = clamped(q_idx, self._clamp_to)
        kv_idx = clamped(kv_idx, self._clamp_to)
        if self.batch is None:
            either = self._is_global[q_idx] | self._is_global[kv_idx]
        else:
            either = self._is_global[b, q_idx] | self._is_global[b, kv_idx]
        return either | ((distance >= -self._furthest) & (distance <= self._furthest))

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        q_hi, kv_hi = q_hi.clamp(max=self.seq_len), kv_hi.clamp(max=self.seq_len)
        far = self.window - 1
        some = (kv_lo <= (q_hi - 1 + far)[:, None]) & (kv_hi - 1 >= (q_lo - far)[:, None])
        some = some | rows(take(self._next_global, q_lo) < q_hi) | columns(take(self._next_global, kv_lo) < kv_hi)
        # What is left for the window: the local queries against the local keys, of which the ends are
        # furthest apart.
        first_q, last_q = take(self._next_local, q_lo), take(self._previous_local, q_hi - 1)
        first_kv, last_kv = take(self._next_local, kv_lo), take(self._previous_local, kv_hi - 1)
        near = (rows(last_q) - far <= columns(first_kv)) & (rows(first_q) + far >= columns(last_kv))
        return some, near | rows(first_q >= q_hi) | columns(first_kv >= kv_hi)

    def __repr__(self) -> str:
        return f"global_local({self.window}, is_global{list(self._is_global.shape)})"


def _nearest_after(position: Tensor, wanted: Tensor) -> Tensor:
    """The nearest wanted position at or after each; the length of the sequence where there is none."""
    candidates = position.masked_fill(~wanted, position.shape[-1])
    return candidates.flip(-1).cummin(-1).values.flip(-1).contiguous()


def global_local(window: int, is_global: Tensor) -> Mask:
    """A two-sided window; global tokens see and are seen by every token: |q - kv| < window, or q or kv is
    global.

        window 2, is_global 1 0 0 0
        kv 0 1 2 3
      q 0  # # # #
        1  # # #
        2  # # # #
        3  #   # #

    Args:
        window: keys on each side, the query itself included, in tokens, at least 1.
        is_global: bool tensor [S] or [B, S].

    Returns:
        A Mask for sequences of exactly S tokens. Not causal; compose with causal(). Its classes are exact.

    Raises:
        ValueError: window is not an int of at least 1, or is_global is not a bool tensor of shape [S] or [B,
        S].

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.global_local(2, torch.tensor([True, False, False, False]))
        >>> mask(0, 0, torch.tensor(3), torch.arange(4)).int().tolist()
        [1, 0, 1, 1]

    Source: Beltagy et al. 2020, "Longformer", 3.1.
    """
    quantity("global_local", "window", window)
    if not isinstance(is_global, Tensor) or is_global.dtype != torch.bool:
        kind = is_global.dtype if isinstance(is_global, Tensor) else type(is_global).__name__
        raise ValueError(f"global_local: is_global must be a bool tensor [S] or [B, S], got {kind}.")
    if is_global.dim() not in (1, 2) or is_global.numel() == 0:
        raise ValueError(
            f"global_local: is_global must have shape [S] or [B, S] and not be empty, got {list(is_global.shape)}."
        )
    return GlobalLocal(window, is_global)
