"""graph_bias: a learned bias for each distance in a graph."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import integers
from flexcp.masks.score import Score, parameter


class GraphBias(Score):
    def __init__(self, table: Tensor, distances: Tensor):
        self.table = table
        self._distances = distances.clamp(0, table.shape[1] - 1).to(torch.int32)
        self._last = torch.tensor(distances.shape[-1] - 1, dtype=torch.int32)
        self._batched = distances.dim() == 3

    def __call__(self, score, b, h, q_idx, kv_idx):
        q_idx = torch.minimum(q_idx, self._last)
        kv_idx = torch.minimum(kv_idx, self._last)
        distance = self._distances[b, q_idx, kv_idx] if self._batched else self._distances[q_idx, kv_idx]
        return score + self.table[h, distance]

    def __repr__(self) -> str:
        return f"graph_bias(table{list(self.table.shape)}, distances{list(self._distances.shape)})"


def graph_bias(table: Tensor, distances: Tensor) -> Score:
    """score + table[h, distances[q, kv]], Graphormer's spatial encoding.

    Args:
        table: floating point [H, R], usually a Parameter; distances from R - 1 on share its last column.
        distances: integer tensor [S, S] or [B, S, S], shortest paths between nodes, at least 0. S x S by its
            nature.

    Returns:
        A Score; gradients reach `table`. Indices beyond S (padding) read the last node.

    Raises:
        ValueError: table is not a floating-point matrix, or distances are negative, not integers or not
        square.

    Example:
        >>> import torch
        >>> from flexcp.masks import scores
        >>> bias = scores.graph_bias(torch.tensor([[0.0, 5.0]]), torch.tensor([[0, 1], [1, 0]]))
        >>> bias(torch.tensor(0.0), 0, torch.tensor(0), torch.tensor(1), torch.tensor(0)).item()
        5.0

    Source: Ying et al. 2021, "Do Transformers Really Perform Bad for Graph Representation?", 3.1.2.
    """
    table = parameter("graph_bias", "table", table, (2,), "[H, R]")
    distances = integers("graph_bias", "distances", distances, (2, 3), "[S, S] or [B, S, S]")
    if distances.shape[-1] != distances.shape[-2] or int(distances.min()) < 0:
        raise ValueError(
            f"graph_bias: distances must be square and at least 0, got shape {list(distances.shape)} with minimum "
            f"{int(distances.min())}; give unreachable pairs a distance of their own."
        )
    return GraphBias(table, distances).to(table.device)
