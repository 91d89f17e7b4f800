"""alibi: a penalty that grows with distance, steeper for some heads."""

from __future__ import annotations

import math

import torch

from flexcp.masks.checks import quantity
from flexcp.masks.score import Score


class Alibi(Score):
    def __init__(self, num_heads: int):
        self.num_heads = num_heads
        self._slopes = torch.tensor(slopes(num_heads), dtype=torch.float32)

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score - self._slopes[h] * torch.maximum(q_idx - kv_idx, kv_idx - q_idx)

    def __repr__(self) -> str:
        return f"alibi({self.num_heads})"


def slopes(num_heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ... for a power of two n; the rest of the heads take every other slope of 2n heads."""
    below = 2 ** int(math.log2(num_heads))
    first = [2.0 ** (-8 * (head + 1) / below) for head in range(below)]
    between = [2.0 ** (-8 * (head + 1) / (2 * below)) for head in range(0, 2 * below, 2)]
    return first + between[: num_heads - below]


def alibi(num_heads: int) -> Score:
    """score - slope[h] * |q - kv|.

    Args:
        num_heads: H, the number of query heads.

    Returns:
        A Score without parameters.

    Raises:
        ValueError: num_heads is not an int of at least 1.

    Example:
        >>> import torch
        >>> from flexcp.masks import scores
        >>> scores.alibi(8)(torch.tensor(0.0), 0, torch.tensor(0), torch.tensor(5), torch.tensor(3)).item()
        -1.0

    Source: Press et al. 2022, "Train Short, Test Long", 3; the authors' code for numbers of heads that are no
    power of two. Symmetric, so that it also serves bidirectional masks.
    """
    return Alibi(quantity("alibi", "num_heads", num_heads))
