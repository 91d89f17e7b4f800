"""Tables that a mask captures: per-token values, looked up safely on every device and on padded indices.

In `classify`, a range may end beyond the table (the last block of a sequence that is no multiple of the block
size): what lies beyond reads as the last token, which changes neither "any" nor "all".
"""

from __future__ import annotations

import torch
from torch import Tensor


def last_index(table: Tensor) -> Tensor:
    """The last index of a table as a 0-d tensor, for `clamped` in `__call__`."""
    return torch.tensor(table.shape[-1] - 1, dtype=torch.int32, device=table.device)


def clamped(index: Tensor, last: Tensor | None) -> Tensor:
    """An index that a table has, for whoever asks about padding; None: nobody does (`Mask.inside`)."""
    return index if last is None else torch.minimum(index, last)


def scalar(value: int) -> Tensor:
    """An int that `__call__` reads: a tensor, because torch.compile specialises on Python ints."""
    return torch.tensor(value, dtype=torch.int32)


def take(table: Tensor, index: Tensor) -> Tensor:
    """table[..., index] as int64 on the index's device; table is [S] or [B, S], index [n]."""
    inside = index.clamp(0, table.shape[-1] - 1)
    return table[..., inside.to(table.device)].to(index.device, torch.int64)


def extreme(table: Tensor, lo: Tensor, hi: Tensor, largest: bool) -> Tensor:
    """The largest or smallest entry of each range [lo, hi) of a table [S] or [B, S]: int64 [n] or [B, n].

    Doubling: ranges of up to 2^k entries are covered by two windows of 2^k', and only one level of windows is
    held at a time, so it costs S log(longest range) work and O(S) memory, whatever the ranges.
    """
    pick = torch.maximum if largest else torch.minimum
    size, device = table.shape[-1], lo.device
    lo = lo.clamp(0, size - 1).to(table.device)
    hi = torch.maximum(hi.to(table.device).clamp(max=size), lo + 1)
    level = torch.frexp((hi - lo).double()).exponent - 1
    result = table.new_empty((*table.shape[:-1], lo.numel()))
    windows, width = table, 1
    for current in range(int(level.max()) + 1):
        here = level == current
        result[..., here] = pick(windows[..., lo[here]], windows[..., hi[here] - width])
        if windows.shape[-1] > width:
            windows, width = pick(windows[..., :-width], windows[..., width:]), 2 * width
    return result.to(device, torch.int64)


def column(values: Tensor, device: torch.device) -> Tensor:
    """Per-batch values, 0-d or [B], as [B or 1, 1, 1, 1]."""
    return values.to(device, torch.int64).reshape(-1, 1, 1, 1)


def rows(values: Tensor) -> Tensor:
    """Per query range, [nQ] or [B, nQ], as [nQ, 1] or [B, 1, nQ, 1]."""
    return values[:, None] if values.dim() == 1 else values[:, None, :, None]


def columns(values: Tensor) -> Tensor:
    """Per key range, [nK] or [B, nK], as [nK] or [B, 1, 1, nK]."""
    return values if values.dim() == 1 else values[:, None, None, :]


def runs_of(ids: Tensor) -> Tensor:
    """Number of the run of equal neighbours each position is in, from 0: int64, [S] or [B, S] like ids."""
    starts = torch.zeros(ids.shape, dtype=torch.int64, device=ids.device)
    starts[..., 1:] = ids[..., 1:] != ids[..., :-1]
    return starts.cumsum(-1)


def run_starts(runs: Tensor) -> Tensor:
    """The first position of the run each position is in; runs as `runs_of` returns them."""
    position = torch.arange(runs.shape[-1], device=runs.device).expand(runs.shape)
    begins = position.masked_fill(torch.cat([runs[..., :1] < 0, runs.diff() == 0], -1), 0)
    return begins.cummax(-1).values


def run_ends(runs: Tensor) -> Tensor:
    """One past the last position of the run each position is in; runs as `runs_of` returns them."""
    size = runs.shape[-1]
    position = torch.arange(size, device=runs.device).expand(runs.shape)
    last = runs.new_zeros(runs.shape).scatter_reduce(-1, runs, position, "amax")
    return last.gather(-1, runs) + 1


def drop_single_row(table: Tensor) -> Tensor:
    """[1, S] as [S]: one row distinguishes nothing."""
    return table[0] if table.dim() == 2 and table.shape[0] == 1 else table
