"""Which rows of keys and values each rank sends to which other, so that only needed blocks travel. No collectives.

What travels is a (KV head, block) pair: with a mask that differs between heads, each KV head sends the blocks that its
own query heads see. A rank's buffer holds its own blocks first and then every received block, one slot for all KV
heads; the slots of heads that do not need a block stay 0 and are not read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from flexcp.layout import Layout
from flexcp.table import Table, owned_blocks, rank_needs


@dataclass(frozen=True)
class Routes:
    """Rows to send and where received ones belong, for one number of KV heads. A row is one (KV head, block) pair.

    Attributes:
        send_rows: int64, numbers of local rows (head * blocks of a rank + block), destination after destination.
        send_counts: rows for each rank; 0 for this one.
        receive_rows: int64, numbers of buffer rows (head * slots + slot), source after source.
        receive_counts: rows from each rank; 0 for this one.
        sum_rows: int64, which rows of gradients to add up in the order of their ranks, local row after local row: first
            count those that come back for `send_rows`, then this rank's own.
        sum_offsets: int64 [local rows + 1], where each local row's begin, and the end.
    """

    send_rows: Tensor
    send_counts: tuple[int, ...]
    receive_rows: Tensor
    receive_counts: tuple[int, ...]
    sum_rows: Tensor
    sum_offsets: Tensor


@dataclass(frozen=True)
class Exchange:
    """One rank's share of an all-to-all of keys and values.

    Attributes:
        rank: this rank.
        block_size: keys in a block.
        needs: bool [heads, reader, owner, blocks of a rank]: the reader's queries see the owner's block.
        slots: blocks in the buffer: its own, the received ones, and padding; this is not sent.
    """

    rank: int
    block_size: int
    needs: np.ndarray
    slots: int
    _routes: dict[tuple[int, torch.device, int, int], Routes] = field(default_factory=dict, repr=False)

    @cached_property
    def used(self) -> int:
        """Slots from the first on of which none is empty: all that are used, unless heads differ."""
        blocks = self.needs.shape[3]
        return blocks + (int(received(self.needs, self.rank).sum()) if len(self.needs) == 1 else 0)

    @property
    def silent(self) -> bool:
        """True where no rank needs anything of another."""
        between = np.logical_or.reduce(self.needs, axis=(0, 3))
        return not np.any(between & ~np.eye(len(between), dtype=bool))

    def routes(self, groups: int, device: torch.device, some: slice) -> Routes:
        """The rows for some of `groups` KV heads, numbered from the first of them; kept, since every layer asks."""
        key = groups, device, some.start, some.stop
        if key not in self._routes:
            self._routes[key] = self._make(needs_of_groups(self.needs, groups)[some], device)
        return self._routes[key]

    def _make(self, needs: np.ndarray, device: torch.device) -> Routes:
        rank, blocks = self.rank, needs.shape[3]
        others = [other for other in range(needs.shape[1]) if other != rank]
        slot_of = np.cumsum(received(self.needs, rank).ravel()).reshape(-1, blocks) - 1 + blocks
        send, receive = [], []
        send_counts, receive_counts = [0] * needs.shape[1], [0] * needs.shape[1]
        for other in others:
            head, block = needs[:, other, rank].nonzero()
            send.append(head * blocks + block)
            send_counts[other] = len(head)
            head, block = needs[:, rank, other].nonzero()
            receive.append(head * self.slots + slot_of[other, block])
            receive_counts[other] = len(head)
        own = np.arange(needs.shape[0] * blocks)
        row = np.concatenate([*send, own])
        source = np.concatenate([np.repeat(np.arange(len(send_counts)), send_counts), np.full(len(own), rank)])
        order = np.lexsort((source, row))
        offsets = np.searchsorted(row[order], np.arange(len(own) + 1))
        tables = (
            torch.from_numpy(x).to(device) for x in (np.concatenate(send), np.concatenate(receive), order, offsets)
        )
        send_rows, receive_rows, sum_rows, sum_offsets = tables
        return Routes(send_rows, tuple(send_counts), receive_rows, tuple(receive_counts), sum_rows, sum_offsets)


def needs_of_groups(needs: np.ndarray, groups: int) -> np.ndarray:
    """What the query heads of each KV head see: bool [groups, ...] from bool [heads, ...].

    Query head h reads KV head h // (H / G); a mask that does not tell heads apart is the same for all.
    """
    heads = needs.shape[0]
    if heads == 1:
        return np.broadcast_to(needs, (groups, *needs.shape[1:]))
    if heads % groups:
        raise ValueError(f"the mask distinguishes {heads} query heads, which {groups} KV heads cannot share evenly")
    return np.logical_or.reduce(needs.reshape(groups, heads // groups, *needs.shape[1:]), axis=1)


def received(needs: np.ndarray, rank: int) -> np.ndarray:
    """The blocks that come from others, for any head: bool [owner, blocks of a rank]."""
    blocks = np.logical_or.reduce(needs[:, rank], axis=0)
    blocks[rank] = False
    return blocks


def needs_by_owner(table: Table, layout: Layout) -> np.ndarray:
    """Which blocks each rank's queries see: bool [heads, reader, owner, blocks of a rank]."""
    return rank_needs(table, layout)[:, :, owned_blocks(layout, table.block_size[1])]


def num_slots(needs: np.ndarray) -> int:
    """Blocks that a stage reads: a rank's own and what the neediest rank receives, rounded up to one of few sizes.

    The same for all ranks, and two sizes for each doubling, so that what the next documents need is likely to fit.
    """
    readers, owners, blocks = needs.shape[1:]
    seen = np.logical_or.reduce(needs, axis=0)
    others = seen.sum(axis=(1, 2)) - seen[np.arange(readers), np.arange(owners)].sum(axis=1)
    shards = -(-int(others.max()) // blocks)
    # 0, 1, 2, 3, 4, 6, 8, 12, 16, ... received shards, but no more than there are.
    step = max(1, 1 << max(0, shards - 1).bit_length() - 2) if shards > 2 else 1
    return blocks * (1 + min(owners - 1, -(-shards // step) * step))


def plan_exchange(table: Table, layout: Layout, rank: int, slots: int | None = None) -> tuple[Exchange, Tensor]:
    """This rank's exchange, and the global start of each block of its buffer: int64 [stages, slots].

    A buffer is read by one stage, but where `slots` are given and are too few, by as many as are needed: a stage's
    shapes then stay what they were, whatever the next documents need. Padding starts past the end of the sequence,
    where nothing is visible.
    """
    block_size = table.block_size[1]
    owned, needs = owned_blocks(layout, block_size), needs_by_owner(table, layout)
    arriving = owned[received(needs, rank)]
    blocks, slots = owned.shape[1], slots or num_slots(needs)
    stages = -(-(blocks + len(arriving)) // slots)
    starts = np.full(stages * slots, layout.padded_len, dtype=np.int64)
    starts[:blocks] = owned[rank] * block_size
    starts[blocks : blocks + len(arriving)] = arriving * block_size
    exchange = Exchange(rank, block_size, needs, stages * slots)
    return exchange, torch.from_numpy(starts).unflatten(0, (stages, slots))
