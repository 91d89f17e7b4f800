"""softcap: scores squashed into (-cap, cap)."""

from __future__ import annotations

import torch

from flexcp.masks.score import Score


class Softcap(Score):
    def __init__(self, cap: float):
        self.cap = cap
        self._cap = torch.tensor(cap, dtype=torch.float32)

    def __call__(self, score, b, h, q_idx, kv_idx):
        return self._cap * torch.tanh(score / self._cap)

    def __repr__(self) -> str:
        return f"softcap({self.cap})"


def softcap(cap: float) -> Score:
    """cap * tanh(score / cap).

    Args:
        cap: the bound, above 0, in units of the scaled score (Gemma 2: 50).

    Returns:
        A Score without parameters.

    Raises:
        ValueError: cap is not a finite number above 0.

    Example:
        >>> import torch
        >>> from flexcp.masks import scores
        >>> scores.softcap(50.0)(torch.tensor(1e9), 0, 0, 0, 0).item()
        50.0

    Source: Gemma Team 2024, "Gemma 2", 2 (logit soft-capping).
    """
    if isinstance(cap, bool) or not isinstance(cap, int | float) or not 0 < cap < float("inf"):
        raise ValueError(f"softcap: cap must be a finite number above 0, got {cap!r}.")
    return Softcap(float(cap))
