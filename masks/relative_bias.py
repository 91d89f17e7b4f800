"""relative_bias and distance_bias: learned biases that depend on q - kv only."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flexcp.masks.checks import flag, quantity
from flexcp.masks.score import Score, parameter


class RelativeBias(Score):
    def __init__(self, table: Tensor, bidirectional: bool, max_distance: int):
        self.table, self.bidirectional, self.max_distance = table, bidirectional, max_distance
        # From max_distance on a bucket holds everything, so the buckets of nearer pairs are all there is to
        # store.
        distance = torch.arange(-max_distance, max_distance + 1)
        self._bucket = buckets(distance, table.shape[0], bidirectional, max_distance).to(torch.int32)
        self._limit = torch.tensor(max_distance, dtype=torch.int32)

    def __call__(self, score, b, h, q_idx, kv_idx):
        distance = torch.minimum(torch.maximum(q_idx - kv_idx, -self._limit), self._limit)
        return score + self.table[self._bucket[distance + self._limit], h]

    def __repr__(self) -> str:
        bidirectional = ", bidirectional=True" if self.bidirectional else ""
        return f"relative_bias(table{list(self.table.shape)}{bidirectional}, max_distance={self.max_distance})"


def buckets(distance: Tensor, num_buckets: int, bidirectional: bool, max_distance: int) -> Tensor:
    """T5's bucket of each distance q - kv: one each for near ones, logarithmic up to max_distance, one beyond."""
    base = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        base = (distance < 0) * num_buckets  # keys after the query have the upper half
        distance = distance.abs()
    distance = distance.clamp(min=0)
    exact = num_buckets // 2
    ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return base + torch.where(distance < exact, distance, far)


def relative_bias(table: Tensor, *, bidirectional: bool = False, max_distance: int = 128) -> Score:
    """score + table[bucket(q - kv), h], T5's relative position bias.

    Args:
        table: floating point [num_buckets, H], usually a Parameter (T5: 32 buckets).
        bidirectional: half of the buckets for keys after the query (encoder); else those share bucket 0.
        max_distance: in tokens, from which on all share the last bucket; more than half the buckets of one
            side.

    Returns:
        A Score; gradients reach `table`.

    Raises:
        ValueError: table is not a floating-point matrix with at least 2 buckets (4 if bidirectional), or
            max_distance is too small for them.

    Example:
        >>> import torch
        >>> from flexcp.masks import scores
        >>> bias = scores.relative_bias(torch.arange(32.0)[:, None])
        >>> bias(torch.tensor(0.0), 0, torch.tensor(0), torch.tensor(9), torch.tensor(2)).item()
        7.0

    Source: Raffel et al. 2020, "T5", 2.1, with the buckets of the authors' code.
    """
    table = parameter("relative_bias", "table", table, (2,), "[num_buckets, H]")
    bidirectional = flag("relative_bias", "bidirectional", bidirectional)
    least = 4 if bidirectional else 2
    if table.shape[0] < least or (bidirectional and table.shape[0] % 2):
        raise ValueError(
            f"relative_bias: the table needs at least {least} buckets{', an even number,' if bidirectional else ''} "
            f"got {table.shape[0]}."
        )
    exact = table.shape[0] // 4 if bidirectional else table.shape[0] // 2
    quantity("relative_bias", "max_distance", max_distance, least=exact + 1)
    return RelativeBias(table, bidirectional, max_distance).to(table.device)


class DistanceBias(Score):
    def __init__(self, table: Tensor):
        self.table = table
        self._last = torch.tensor(table.shape[1] - 1, dtype=torch.int32)

    def __call__(self, score, b, h, q_idx, kv_idx):
        distance = torch.maximum(q_idx - kv_idx, kv_idx - q_idx)
        return score + self.table[h, torch.minimum(distance, self._last)]

    def __repr__(self) -> str:
        return f"distance_bias(table{list(self.table.shape)})"


def distance_bias(table: Tensor) -> Score:
    """score + table[h, |q - kv|], one learned number for each distance.

    Args:
        table: floating point [H, R], usually a Parameter; distances from R - 1 on share its last column.

    Returns:
        A Score; gradients reach `table`.

    Raises:
        ValueError: table is not a floating-point matrix.

    Example:
        >>> import torch
        >>> from flexcp.masks import scores
        >>> bias = scores.distance_bias(torch.tensor([[0.0, 1.0, 4.0]]))
        >>> bias(torch.tensor(0.0), 0, torch.tensor(0), torch.tensor(9), torch.tensor(8)).item()
        1.0

    Source: Shaw et al. 2018, "Self-Attention with Relative Position Representations", 3.2 (clipped
    distances).
    """
    table = parameter("distance_bias", "table", table, (2,), "[H, R]")
    return DistanceBias(table).to(table.device)
