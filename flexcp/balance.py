"""Choosing who holds what and how it travels, from exact block counts. Pure index arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from flexcp import placement, search
from flexcp.cost import Cost, CostModel
from flexcp.exchange import needs_by_owner, num_slots
from flexcp.layout import LAYOUTS, Layout
from flexcp.table import Table, rank_rows

BALANCES = ("auto", *LAYOUTS, "per_document", "ptrr", "min_heap", "affinity")

# By how much a rank's work may exceed the mean for the sake of its traffic; "auto" tries all.
_SLACKS = (0.03, 0.12, 0.4)
_AFFINITY_SLACK = 0.124
# Predicted times that differ by less say nothing.
_SAME_TIME = 1.005
# `exchange` packs and unpacks rows, so it must move clearly less than `gather` to be chosen.
_CLEARLY_LESS = 0.9


@dataclass(frozen=True)
class Candidate:
    """A layout over a kind of communication, and what it costs.

    Attributes:
        pairs: int64 [cp_size], (query, key) pairs that each rank computes, over all query heads and masks.
        kv_rows: int64 [cp_size], (KV head, token) pairs that each rank receives, over all masks.
    """

    layout: Layout
    comm: str
    pairs: np.ndarray
    kv_rows: np.ndarray
    cost: Cost


def choose(
    balance: str,
    comm: str,
    seq_len: int,
    cp_size: int,
    block_size: tuple[int, int],
    tables: Callable[[], Sequence[Table]],
    model: CostModel,
    head_groups: int | None = None,
    ulysses: int = 1,
) -> tuple[Layout, str, int]:
    """The layout, the kind of communication and the number of head groups.

    Args:
        balance: one of BALANCES; "auto": the layout whose slowest rank is expected to be the fastest, with what of its
            communication hides behind nothing.
        comm: how keys move in stages: "gather", "ring", "exchange", or "auto": `exchange` where it moves clearly less
            than `gather`.
        tables: what each mask lets every query block see. Not asked where nothing depends on it; every rank must get
            the same.
        head_groups: None: as many as `CostModel.head_groups` finds best, where the tables are asked at all; else 1.
        ulysses: ranks that share the heads. cp_size and the layout are of the others, each of which stands for so many.
    """
    align = math.lcm(*block_size, ulysses)
    if cp_size == 1:
        balance = "contiguous" if balance == "auto" else balance
        comm = "gather" if comm == "auto" else comm
    if balance in LAYOUTS and comm != "auto":
        return LAYOUTS[balance](seq_len, cp_size, align), comm, head_groups or 1
    seen = tables()
    # The traffic of exchange decides the layout where the kind is open, as it is never more than that of gather.
    kind = "exchange" if comm == "auto" else comm
    if balance == "auto":
        layouts = candidates(seq_len, cp_size, align, seen, work_weights(seen, model))
        # A new mask must not change the shapes.
        least = min(layout.local_len for layout in layouts)
        shortest = [layout for layout in layouts if layout.local_len == least]
        some = [evaluate(layout, kind, seen, model, ulysses) for layout in shortest]
        # Swaps may make the faster of what the slowest rank alone decides, so both begin.
        starts = {id(one): one for one in (best(some, lambda cost: cost.forward_s), best(some, model.expected_s))}
        layout = best([improved(one, align, seen, model, ulysses) for one in starts.values()], model.expected_s).layout
    else:
        layout = make(balance, seq_len, cp_size, align, seen, work_weights(seen, model))
    if comm == "auto":
        moved = {kind: evaluate(layout, kind, seen, model).kv_rows.max() for kind in ("exchange", "gather")}
        comm = "exchange" if moved["exchange"] < _CLEARLY_LESS * moved["gather"] else "gather"
    if head_groups is None:
        head_groups = 1 if comm == "ring" else model.head_groups(evaluate(layout, comm, seen, model, ulysses).cost)
    return layout, comm, head_groups


def choose_sharing(
    balance: str,
    seq_len: int,
    cp_size: int,
    block_size: tuple[int, int],
    tables: Callable[[], Sequence[Table]],
    model: CostModel,
    head_groups: int | None = None,
) -> tuple[Layout, str, int, int]:
    """As `choose` for comm "auto", and how many ranks share the heads: more than 1 where that is clearly faster.

    To be asked only where the heads are known. What ulysses swaps hides behind nothing, so it must save more than that.
    """
    shapes = model.shapes(len(tables()))
    fitting = [n for n in range(2, cp_size + 1) if cp_size % n == 0 and all(s.num_heads % n == 0 for s in shapes)]
    # Few are tried: all ranks, and as many as there are KV heads for.
    most = max((n for n in fitting if model.one.num_kv_heads % n == 0 and n < cp_size), default=1)
    chosen, fastest = None, math.inf
    for ulysses in sorted({1, most, *fitting[-1:]}):
        found = choose(balance, "auto", seq_len, cp_size // ulysses, block_size, tables, model, head_groups, ulysses)
        cost = evaluate(*found[:2], tables(), model, ulysses).cost
        if ulysses == 1 and _CLEARLY_LESS * (cost.forward_s + cost.backward_s) <= cost.least_s:
            return *found, 1
        taken = (cost.forward_s + cost.backward_s) / (_CLEARLY_LESS if ulysses > 1 else 1)
        if taken < fastest:
            chosen, fastest = (*found, ulysses), taken
    assert chosen is not None
    return chosen


def best(some: Sequence[Candidate], seconds: Callable[[Cost], float]) -> Candidate:
    """The fastest; of those that are as good as equally fast, the one with the least traffic, then the least work."""
    times = [seconds(one.cost) for one in some]
    longest = min(times) * _SAME_TIME
    return min(
        (one for one, time in zip(some, times) if time <= longest),
        key=lambda one: (one.kv_rows.max(), one.pairs.max()),
    )


def improved(start: Candidate, align: int, tables: Sequence[Table], model: CostModel, ulysses: int = 1) -> Candidate:
    """The candidate, or what swaps of chunks make of it where only needed blocks travel and that is faster."""
    layout, cost = start.layout, start.cost
    cp, size = layout.cp_size, placement.fine_chunk(layout.seq_len, layout.cp_size, align)
    bound_s = cost.compute_s.mean() + cost.switch_s  # no layout's slowest rank is faster
    if start.comm != "exchange" or cost.forward_s <= bound_s * _SAME_TIME or layout.chunk_size % size:
        return start
    chunks = placement.chunks_of(tables, layout.seq_len, cp, size, work_weights(tables, model))
    if len(chunks.work) * size != layout.padded_len:
        return start
    work_s = cost.compute_s.sum() / max(1, chunks.work.sum())
    # Masks whose keys differ in size count by their mean.
    nothing, shapes = np.zeros(cp), model.shapes(len(tables))
    rows = [np.full(cp, size * max(1, shape.num_kv_heads // ulysses)) for shape in shapes]
    costs = [model.of(s).cost(nothing, some, ulysses).comm_s[0] * s.layers for s, some in zip(shapes, rows)]
    chunk_s = float(np.mean(costs))
    swapped = search.least_time(chunks, layout, work_s, chunk_s)
    return min(start, evaluate(swapped, start.comm, tables, model, ulysses), key=lambda one: one.cost.forward_s)


def make(
    balance: str, seq_len: int, cp_size: int, align: int, tables: Sequence[Table], weights: Sequence[int] | None = None
) -> Layout:
    """The named layout; weights: see `work_weights`, None: equal ones."""
    if balance in LAYOUTS:
        return LAYOUTS[balance](seq_len, cp_size, align)
    if balance == "ptrr":
        return placement.ptrr(tables, seq_len, cp_size, align, weights)
    chunks = placement.chunks_of(tables, seq_len, cp_size, placement.fine_chunk(seq_len, cp_size, align), weights)
    if balance == "affinity":
        most = int(chunks.work.sum() / cp_size * (1 + _AFFINITY_SLACK))
        return search.least_traffic(chunks, placement.affinity(chunks, _AFFINITY_SLACK), most)
    return {"per_document": placement.per_document, "min_heap": placement.min_heap}[balance](chunks)


def candidates(
    seq_len: int, cp_size: int, align: int, tables: Sequence[Table], weights: Sequence[int] | None = None
) -> list[Layout]:
    """Every layout that "auto" compares, simple ones first: of equals the first is taken."""
    chunks = placement.chunks_of(tables, seq_len, cp_size, placement.fine_chunk(seq_len, cp_size, align), weights)
    layouts = [make(seq_len, cp_size, align) for make in LAYOUTS.values()]
    layouts += [placement.per_document(chunks), placement.min_heap(chunks)]
    layouts += [placement.affinity(chunks, slack) for slack in _SLACKS]
    return [*layouts, placement.ptrr(tables, seq_len, cp_size, align, weights)]


def evaluate(layout: Layout, comm: str, tables: Sequence[Table], model: CostModel, ulysses: int = 1) -> Candidate:
    """Counts what each rank computes and receives, exactly; of ranks that share heads, their mean."""
    pairs, rows = np.zeros(layout.cp_size, dtype=np.int64), np.zeros(layout.cp_size, dtype=np.int64)
    costs = []
    for table, shape in zip(tables, model.shapes(len(tables))):
        heads, groups = shape.num_heads, shape.num_kv_heads
        of_mask = rank_work(layout, table) * max(1, heads // math.gcd(table.heads, heads)) // ulysses
        arriving = kv_rows(layout, comm, table, groups) * max(1, groups // ulysses) // groups
        cost = model.of(shape).cost(of_mask, arriving, ulysses, layout.local_len // ulysses)
        costs.append(cost.times(shape.layers))
        pairs, rows = pairs + of_mask, rows + arriving
    return Candidate(layout, comm, pairs, rows, reduce(Cost.plus, costs))


def work_weights(tables: Sequence[Table], model: CostModel) -> list[int]:
    """What a block of each mask costs, in whole numbers: the heads that a count does not count, head_dim, layers."""
    weights = [
        max(1, shape.num_heads // math.gcd(table.heads, shape.num_heads)) * shape.head_dim * shape.layers
        for table, shape in zip(tables, model.shapes(len(tables)))
    ]
    common = math.gcd(*weights)
    return [weight // common for weight in weights]


def rank_work(layout: Layout, table: Table) -> np.ndarray:
    """Pairs in the non-empty blocks of each rank: int64 [cp_size]."""
    work = table.work()
    return np.array([work[rows].sum() for rows in rank_rows(table, layout)])


def buffer_rows(layout: Layout, comm: str, tables: Sequence[Table], num_kv_heads: int) -> int:
    """(KV head, token) pairs that the fullest rank holds at once beside its own shard."""
    if comm == "gather":
        return layout.padded_len * num_kv_heads
    if comm == "ring":
        return min(2, layout.cp_size - 1) * layout.local_len * num_kv_heads
    most = 0
    for table in tables:
        most = max(most, num_slots(needs_by_owner(table, layout)) * table.block_size[1])
    return most * num_kv_heads


def kv_rows(layout: Layout, comm: str, table: Table, num_kv_heads: int) -> np.ndarray:
    """(KV head, token) pairs that each rank receives: int64 [cp_size]."""
    cp = layout.cp_size
    if comm == "gather":
        return np.full(cp, (cp - 1) * layout.local_len * num_kv_heads)
    needs = needs_by_owner(table, layout)
    needs[:, np.arange(cp), np.arange(cp)] = False
    if comm == "ring":
        return np.logical_or.reduce(needs, axis=(0, 3)).sum(axis=1) * (layout.local_len * num_kv_heads)
    # Query heads that share a KV head share what it receives.
    groups = math.gcd(table.heads, num_kv_heads)
    union = np.logical_or.reduce(needs.reshape(groups, -1, *needs.shape[1:]), axis=1)
    return union.sum(axis=(0, 2, 3)) * (table.block_size[1] * num_kv_heads // groups)
