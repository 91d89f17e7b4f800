"""sandwich: the product of two sinusoidal positions, as a bias."""

from __future__ import annotations

import torch

from flexcp.masks.checks import quantity
from flexcp.masks.score import Score


class Sandwich(Score):
    def __init__(self, num_heads: int, max_distance: int, dim: int):
        self.num_heads, self.max_distance, self.dim = num_heads, max_distance, dim
        frequency = 10000.0 ** (-2 * torch.arange(1, dim // 2 + 1, dtype=torch.float64) / dim)
        distance = torch.arange(max_distance + 1, dtype=torch.float64)
        bias = torch.zeros_like(distance)
        for each in frequency:  # in float64: fp32 phases are off by 0.04 at a million tokens
            bias += torch.cos(distance * each)
        self._bias = bias.float()
        self._ratio = (8.0 * torch.arange(1, num_heads + 1, dtype=torch.float64) / num_heads).reciprocal().float()
        self._limit = torch.tensor(max_distance, dtype=torch.int32)

    def __call__(self, score, b, h, q_idx, kv_idx):
        distance = torch.minimum(torch.maximum(q_idx - kv_idx, kv_idx - q_idx), self._limit)
        return score + self._bias[distance] * self._ratio[h]

    def __repr__(self) -> str:
        return f"sandwich({self.num_heads}, {self.max_distance}, dim={self.dim})"


def sandwich(num_heads: int, max_distance: int, *, dim: int = 128) -> Score:
    """score + sum over i = 1 .. dim / 2 of cos((q - kv) / 10000^(2i / dim)) / ratio[h], with ratio[h] = 8 (h
    + 1) / H.

    Args:
        num_heads: H, the number of query heads.
        max_distance: of the table, in tokens; pairs further apart have its last value. 4 bytes each.
        dim: of the sinusoidal positions (the paper's d-bar), even.

    Returns:
        A Score without parameters.

    Raises:
        ValueError: an argument is not an int of at least 1, or dim is odd.

    Example:
        >>> import torch
        >>> from flexcp.masks import scores
        >>> bias = scores.sandwich(8, 16, dim=4)
        >>> bias(torch.tensor(0.0), 0, torch.tensor(0), torch.tensor(3), torch.tensor(3)).item()
        2.0

    Source: Chi et al. 2023, "Dissecting Transformer Length Extrapolation via the Lens of Receptive Field
    Analysis", 5.
    """
    for name, value in (("num_heads", num_heads), ("max_distance", max_distance), ("dim", dim)):
        quantity("sandwich", name, value)
    if dim % 2:
        raise ValueError(f"sandwich: dim must be even, got {dim}; half of it are cosines.")
    return Sandwich(num_heads, max_distance, dim)
