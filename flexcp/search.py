"""Makes a layout better by swapping chunks between ranks, one swap at a time.

All swaps of one rank's chunks with many others are judged at once: what either rank would have to receive afterwards
is two products of matrices of 0 and 1. They are exact in any precision (sums of fewer than 2^24 ones, in fp32), so that
every rank of a group finds the same swaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from flexcp.layout import Layout
from flexcp.placement import Chunks


class Swaps:
    """Owners of the chunks, and what each rank computes and receives, kept up to date while chunks are swapped.

    Attributes:
        owner: int64 [n], the rank of each chunk.
        load: int64 [cp_size], blocks that a rank's queries see.
        received: int64 [cp_size], (mask, chunk) pairs whose keys a rank receives.
    """

    def __init__(self, chunks: Chunks, owners: Sequence[Sequence[int]]) -> None:
        self.work, self.cp = chunks.work, chunks.cp_size
        self.n, self.masks = len(chunks.work), chunks.needs.shape[1]
        needs = chunks.needs.copy()
        needs[np.arange(self.n), :, np.arange(self.n)] = False
        self.needs = needs.reshape(self.n, -1)
        self.needs_f = self.needs.astype(np.float32)
        self.owner = np.empty(self.n, dtype=np.int64)
        self.mine = [np.array(sorted(mine)) for mine in owners]
        for rank, mine in enumerate(self.mine):
            self.owner[mine] = rank
        columns = self.masks * self.n
        self.counts = np.zeros((self.cp, columns), dtype=np.int32)
        self.load = np.zeros(self.cp, dtype=np.int64)
        self.received = np.zeros(self.cp, dtype=np.int64)
        # For each chunk: what its rank would still have to receive without it; what it would lack; how much it has.
        self.without = np.zeros((self.n, columns), dtype=bool)
        self.lack = np.zeros((self.n, columns), dtype=np.float32)
        self.base = np.zeros(self.n, dtype=np.int64)
        for rank in range(self.cp):
            self._count(rank)

    def _count(self, rank: int) -> None:
        mine = self.mine[rank]
        needs = self.needs[mine]
        counts = needs.sum(axis=0, dtype=np.int32)
        foreign = np.tile(self.owner != rank, self.masks)
        self.load[rank] = self.work[mine].sum()
        self.received[rank] = int(((counts > 0) & foreign).sum())
        without = counts > needs
        self.without[mine] = without
        self.lack[mine] = ~without & foreign
        self.base[mine] = (without & foreign).sum(axis=1)

    def after(self, rank: int, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What this rank, and the other one, would receive after each swap with one of `some` chunks of others.

        Returns:
            int64 [chunks of rank, chunks of some] each.
        """
        mine = self.mine[rank]
        mine_columns, some_columns = self._columns(mine), self._columns(some)
        mine_rows, some_rows = mine[:, None, None], some[:, None, None]
        # A chunk that leaves may have to be received from then on, and one that comes no longer has to.
        own = _product(self.lack[mine], self.needs_f[some]) + self.base[mine, None]
        own += (self._own_columns(mine)[:, None] | self.needs[some_rows, mine_columns].swapaxes(0, 1)).sum(axis=2)
        own -= self.without[mine_rows, some_columns].sum(axis=2)
        other = _product(self.needs_f[mine], self.lack[some]) + self.base[some]
        other += (self._own_columns(some) | self.needs[mine_rows, some_columns]).sum(axis=2)
        other -= self.without[some_rows, mine_columns].sum(axis=2).T
        return own.astype(np.int64), other.astype(np.int64)

    def _columns(self, chunks: np.ndarray) -> np.ndarray:
        """The (mask, chunk) pairs of chunks: [chunks, masks]."""
        return chunks[:, None] + self.n * np.arange(self.masks)

    def _own_columns(self, chunks: np.ndarray) -> np.ndarray:
        """Whether a chunk's rank sees the chunk's keys without it: bool [chunks, masks]."""
        return self.without[chunks[:, None], self._columns(chunks)]

    def swap(self, a: int, b: int) -> None:
        r, s = int(self.owner[a]), int(self.owner[b])
        self.owner[a], self.owner[b] = s, r
        for rank, gone, come in ((r, a, b), (s, b, a)):
            mine = self.mine[rank]
            mine[np.searchsorted(mine, gone)] = come
            mine.sort()
        self._count(r)
        self._count(s)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b.T, by torch, whose threads the user rules; numpy's are as many as there are cores, and spin."""
    return (torch.from_numpy(a) @ torch.from_numpy(b).T).numpy()


# Swaps in one search, and the ranks with the least time that a rank may swap with.
_MOST_SWAPS, _PARTNERS = 320, 32
# A search for time ends this close to the mean of the work, below which no rank's maximum can come.
_CLOSE = 1.003


def least_time(chunks: Chunks, layout: Layout, work_s: float, chunk_s: float) -> Layout:
    """The slowest rank swaps with one of the fastest, as long as the slower of the two becomes faster by it.

    Args:
        layout: to begin with; its chunks are whole numbers of those of `chunks`.
        work_s: seconds that a unit of work takes; chunk_s: seconds to receive a chunk's keys for one mask.
    """
    state = Swaps(chunks, _in_chunks(layout, chunks))
    bound = chunks.work.sum() / chunks.cp_size * work_s * _CLOSE
    for _ in range(_MOST_SWAPS):
        times = np.maximum(state.load * work_s, state.received * chunk_s)
        rank = int(times.argmax())
        if times[rank] <= bound:
            break
        partners = np.argsort(times, kind="stable")[:_PARTNERS]
        mine, some = state.mine[rank], np.concatenate([state.mine[other] for other in partners if other != rank])
        own, other = state.after(rank, some)
        owner, moved = state.owner[some], state.work[some] - state.work[mine][:, None]
        slower = np.maximum((state.load[rank] + moved) * work_s, own * chunk_s)
        np.maximum(slower, (state.load[owner] - moved) * work_s, out=slower)
        np.maximum(slower, other * chunk_s, out=slower)
        best = int(slower.argmin())
        if slower.flat[best] >= times[rank]:
            break
        state.swap(int(mine[best // len(some)]), int(some[best % len(some)]))
    return chunks.layout("swapped", [mine.tolist() for mine in state.mine])


def least_traffic(chunks: Chunks, layout: Layout, most: int) -> Layout:
    """The rank that receives the most swaps with whom it saves the two of them the most, until no swap saves anything.

    Args:
        most: work that a rank may have, in the units of `chunks`.
    """
    state = Swaps(chunks, _in_chunks(layout, chunks))
    done = np.zeros(state.cp, dtype=bool)
    every = np.arange(state.n)
    for _ in range(_MOST_SWAPS):
        rank = int(np.where(done, -1, state.received).argmax())
        if done[rank]:
            break
        mine, owner = state.mine[rank], state.owner
        own, other = state.after(rank, every)
        moved = state.work - state.work[mine][:, None]
        saved = state.received[rank] + state.received[owner] - own - other
        saved[(state.load[rank] + moved > most) | (state.load[owner] - moved > most) | (owner == rank)] = 0
        best = int(saved.argmax())
        partner = int(owner[best % state.n])
        if saved.flat[best] <= 0:
            done[rank] = True
        else:
            state.swap(int(mine[best // state.n]), best % state.n)
            done[[rank, partner]] = False
    return chunks.layout(layout.name, [mine.tolist() for mine in state.mine])


def _in_chunks(layout: Layout, chunks: Chunks) -> list[list[int]]:
    """The layout's owners, of chunks as small as these."""
    parts = layout.chunk_size // chunks.size
    return [[chunk * parts + i for chunk in mine for i in range(parts)] for mine in layout.owned]
