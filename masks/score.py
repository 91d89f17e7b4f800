"""What a score is: a score_mod in global indices that can be moved and composed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from flexcp.masks.checks import count_positional

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Score:
    """A score_mod(score, b, h, q_idx, kv_idx) in global indices, under vmap with 0-d tensors and by
    broadcasting.

    Captured numbers are tensors, because torch.compile specialises on Python numbers. Captured parameters are
    the user's own tensors, so gradients reach them. Table look-ups are clamped: flex_attention also asks
    about masked pairs.
    """

    def __call__(self, score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} does not define __call__(score, b, h, q_idx, kv_idx).")

    def to(self, device: torch.device | str) -> Score:
        """The same score with its captured tensors on `device`; gradients flow back to the originals."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor | Score):
                setattr(moved, name, value.to(device))
            elif isinstance(value, tuple):
                items = (item.to(device) if isinstance(item, Tensor | Score) else item for item in value)
                setattr(moved, name, tuple(items))
        return moved


class Composed(Score):
    def __init__(self, scores: tuple[ScoreMod, ...]):
        self.scores = scores

    def __call__(self, score, b, h, q_idx, kv_idx):
        for each in self.scores:
            score = each(score, b, h, q_idx, kv_idx)
        return score

    def __repr__(self) -> str:
        return f"compose({', '.join(getattr(each, '__name__', repr(each)) for each in self.scores)})"


def compose(*scores: ScoreMod) -> Score:
    """One score after the other, from left to right: the second gets what the first returns.

    Args:
        scores: scores of this library or plain functions score_mod(score, b, h, q_idx, kv_idx), at least one.
            The order
            matters: compose(softcap(50.0), alibi(8)) caps before the bias is added.

    Returns:
        A Score.

    Raises:
        ValueError: there is none, or one is not a function of five arguments.

    Example:
        >>> import torch
        >>> from flexcp.masks import scores
        >>> both = scores.compose(scores.softcap(2.0), lambda score, b, h, q_idx, kv_idx: score + kv_idx)
        >>> both(torch.tensor(1e9), 0, 0, 0, torch.tensor(3)).item()
        5.0

    Source: none.
    """
    if not scores:
        raise ValueError("compose: at least one score is needed; give functions score_mod(score, b, h, q_idx, kv_idx).")
    for each in scores:
        if not callable(each) or count_positional(each) not in (5, None):
            raise ValueError(
                f"compose: a score is a function of (score, b, h, q_idx, kv_idx), got {each!r}"
                f"{'; a mask goes into the block mask' if callable(each) and count_positional(each) == 4 else ''}."
            )
    return Composed(scores)


def parameter(factory: str, name: str, value: object, dims: tuple[int, ...], shape: str) -> Tensor:
    """`value` as a floating-point tensor with one of `dims` dimensions; itself, so that gradients reach it."""
    if (
        not isinstance(value, Tensor)
        or not value.dtype.is_floating_point
        or value.dim() not in dims
        or not value.numel()
    ):
        given = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{factory}: {name} must be a floating-point tensor {shape}, got {given}.")
    return value
