"""Choosing the layout from the work that the mask gives each rank. Pure index arithmetic."""

import math
from collections.abc import Callable

import numpy as np

from flexcp.layout import LAYOUTS, Layout
from flexcp.table import Table, rank_rows

BALANCES = ("auto", *LAYOUTS)


def choose_layout(
    balance: str,
    seq_len: int,
    cp_size: int,
    block_size: tuple[int, int],
    tables: Callable[[], list[Table]],
) -> Layout:
    """The named layout, or for "auto" the one whose busiest rank has the least work.

    Args:
        balance: one of BALANCES.
        tables: what each mask lets every query block see; asked only by "auto", and every rank must get the same.
    Returns:
        for "auto", of two equal ones the first of LAYOUTS: contiguous, which moves fewer keys.
    """
    align = math.lcm(*block_size)
    if balance != "auto":
        return LAYOUTS[balance](seq_len, cp_size, align)
    layouts = [make(seq_len, cp_size, align) for make in LAYOUTS.values()]
    if cp_size == 1:
        return layouts[0]
    seen = tables()
    return min(layouts, key=lambda layout: int(np.sum([rank_work(layout, table) for table in seen], axis=0).max()))


def rank_work(layout: Layout, table: Table) -> np.ndarray:
    """Pairs in the non-empty blocks of each rank: int64 [cp_size]."""
    work = table.work()
    return np.array([work[rows].sum() for rows in rank_rows(table, layout)])
