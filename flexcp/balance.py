"""Choosing the layout from the work that the mask gives each rank. Pure index arithmetic."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from flexcp.layout import LAYOUTS, Layout

BALANCES = ("auto", *LAYOUTS)


def choose_layout(
    balance: str,
    seq_len: int,
    cp_size: int,
    block_size: tuple[int, int],
    row_work: Callable[[Tensor], Tensor],
) -> Layout:
    """The named layout, or for "auto" the one whose busiest rank has the least work.

    Args:
        balance: one of BALANCES.
        row_work: global starts of query blocks [n] int64 -> their work [n]; asked only by "auto", and every rank must
            get the same answer.
    Returns:
        for "auto", of two equal ones the first of LAYOUTS: contiguous, which moves fewer keys.
    """
    align = math.lcm(*block_size)
    if balance != "auto":
        return LAYOUTS[balance](seq_len, cp_size, align)
    layouts = [make(seq_len, cp_size, align) for make in LAYOUTS.values()]
    if cp_size == 1:
        return layouts[0]
    starts = torch.arange(0, seq_len, block_size[0])
    work = row_work(starts)
    return min(layouts, key=lambda layout: int(rank_work(layout, work, block_size[0]).max()))


def rank_work(layout: Layout, work: Tensor, q_block_size: int) -> Tensor:
    """Work of each rank: [cp_size], from the work of each query block of the unpadded sequence [n]."""
    padded = torch.zeros(layout.padded_len // q_block_size, dtype=work.dtype)
    padded[: work.numel()] = work.cpu()
    blocks = [layout.starts(rank, q_block_size) // q_block_size for rank in range(layout.cp_size)]
    return torch.stack([padded[mine].sum() for mine in blocks])
