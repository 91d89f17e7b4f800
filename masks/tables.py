"""Tables that a mask captures: per-token values, looked up safely on every device and on padded indices."""

from __future__ import annotations

import torch
from torch import Tensor


def take(table: Tensor, index: Tensor) -> Tensor:
    """table[..., index] as int64 on the index's device, for `classify`; table is [S] or [B, S], index [n]."""
    return table[..., index.to(table.device)].to(index.device, torch.int64)


def column(values: Tensor, device: torch.device) -> Tensor:
    """Per-batch values, 0-d or [B], as [B or 1, 1, 1, 1] for `classify`."""
    return values.to(device, torch.int64).reshape(-1, 1, 1, 1)


def rows(values: Tensor) -> Tensor:
    """What take returned, [nQ] or [B, nQ], as [nQ, 1] or [B, 1, nQ, 1]: it varies along the query ranges."""
    return values[:, None] if values.dim() == 1 else values[:, None, :, None]


def columns(values: Tensor) -> Tensor:
    """What take returned, [nK] or [B, nK], as [nK] or [B, 1, 1, nK]: it varies along the key ranges."""
    return values if values.dim() == 1 else values[:, None, None, :]


def runs_of(ids: Tensor) -> Tensor:
    """Number of the run of equal neighbours each position is in, from 0: int64, [S] or [B, S] like ids."""
    starts = torch.zeros(ids.shape, dtype=torch.int64, device=ids.device)
    starts[..., 1:] = ids[..., 1:] != ids[..., :-1]
    return starts.cumsum(-1)
