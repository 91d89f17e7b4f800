"""Layouts made from a mask: per-document head_tail, round robin by time, min-heap, and affinity.

They deal equal chunks of the sequence to ranks, every rank equally many, from two facts about each chunk: its work, and
which chunks' keys its queries see.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from flexcp.layout import Layout
from flexcp.table import Table

# Chunks of a rank: enough to balance, few enough that a thousand ranks' chunks are placed in a fraction of a second.
_CHUNKS_PER_RANK, _CHUNKS = 16, 128


@dataclass(frozen=True)
class Chunks:
    """What the chunks of a sequence cost.

    Attributes:
        seq_len: S, tokens.
        size: tokens in a chunk.
        cp_size: ranks; it divides the number of chunks, of which the last may hold padding only.
        work: int64 [n], see `work_of`.
        needs: bool [n, masks, n]: the chunk's queries see some key of the other chunk.
    """

    seq_len: int
    size: int
    cp_size: int
    work: np.ndarray
    needs: np.ndarray

    @property
    def per_rank(self) -> int:
        return len(self.work) // self.cp_size

    def layout(self, name: str, owners: Sequence[Sequence[int]]) -> Layout:
        """The layout of these owners, each with its chunks in ascending order."""
        return Layout(name, self.seq_len, self.size, tuple(tuple(sorted(int(c) for c in mine)) for mine in owners))


def fine_chunk(seq_len: int, cp_size: int, align: int) -> int:
    """Tokens in a chunk, for layouts that deal many chunks to a rank: a multiple of `align`.

    Where possible it divides the least local length, so that no layout pads more than another and a new mask does not
    change the shapes.
    """
    blocks = -(-seq_len // (cp_size * align))
    wanted = -(-blocks // max(_CHUNKS_PER_RANK, _CHUNKS // cp_size))
    return align * next((size for size in range(wanted, 2 * wanted + 1) if blocks % size == 0), wanted)


def chunks_of(
    tables: Sequence[Table], seq_len: int, cp_size: int, size: int, weights: Sequence[int] | None = None
) -> Chunks:
    """Sums and unites the tables' blocks over chunks of `size` tokens."""
    n = -(-seq_len // (cp_size * size)) * cp_size
    needs = []
    for table in tables:
        q_blocks, kv_blocks = (size // block for block in table.block_size)
        bits = table.any_head
        rows = np.zeros((n * q_blocks, bits.shape[1]), dtype=np.uint8)
        rows[: len(bits)] = bits
        rows = np.bitwise_or.reduce(rows.reshape(n, q_blocks, -1), axis=1)
        seen = np.zeros((n, n * kv_blocks), dtype=bool)
        seen[:, : table.num_keys] = np.unpackbits(rows, axis=-1, count=table.num_keys)
        needs.append(np.logical_or.reduce(seen.reshape(n, n, kv_blocks), axis=2))
    return Chunks(seq_len, size, cp_size, work_of(tables, n, size, weights), np.stack(needs, axis=1))


def work_of(tables: Sequence[Table], num_chunks: int, size: int, weights: Sequence[int] | None = None) -> np.ndarray:
    """Blocks that each chunk's queries see, over all masks, each counted `weights` times: int64 [num_chunks]."""
    work = np.zeros(num_chunks, dtype=np.int64)
    for table, weight in zip(tables, weights or [1] * len(tables)):
        counts = np.zeros(num_chunks * (size // table.block_size[0]), dtype=np.int64)
        counts[: len(table.counts)] = table.counts
        work += weight * counts.reshape(num_chunks, -1).sum(axis=1)
    return work


def document_starts(chunks: Chunks) -> list[int]:
    """Chunks at which a document begins: nothing after sees anything before, nor the reverse.

    A chunk that holds the end of one document and the beginning of the next counts to the next.
    """
    n = len(chunks.work)
    seen = np.logical_or.reduce(chunks.needs, axis=1)
    some = np.logical_or.reduce(seen, axis=1)
    low = np.where(some, seen.argmax(axis=1), n)
    high = np.where(some, n - 1 - seen[:, ::-1].argmax(axis=1), -1)
    # The lowest key seen from chunk c on, and the highest seen before it.
    lowest = np.append(np.minimum.accumulate(low[::-1])[::-1], n)
    highest = np.append(-1, np.maximum.accumulate(high))
    at = np.arange(n)
    before = (lowest[:n] >= at) & (highest[:n] < at)
    within = (lowest[1:] >= at) & (highest[:n] <= at)
    starts = before | (within & ~np.append(before[1:], True))
    starts[0] = True
    return starts.nonzero()[0].tolist()


def per_document(chunks: Chunks) -> Layout:
    """head_tail within every document: rank r owns the r-th piece from its head and the r-th from its tail.

    What does not divide into 2 * cp_size pieces (the middle of a document, and short ones) goes to the rank with the
    least work.
    """
    cp = chunks.cp_size
    owners: list[list[int]] = [[] for _ in range(cp)]
    starts = document_starts(chunks)
    rest: list[int] = []
    for first, last in zip(starts, (*starts[1:], len(chunks.work))):
        piece = (last - first) // (2 * cp)
        for rank in range(cp if piece else 0):  # there may be as many documents as chunks, and ranks by the thousand
            head, tail = first + rank * piece, last - (rank + 1) * piece
            owners[rank] += [*range(head, head + piece), *range(tail, tail + piece)]
        rest += range(first + cp * piece, last - cp * piece)
    return chunks.layout("per_document", _heaped(chunks, rest, owners))


def ptrr(
    tables: Sequence[Table], seq_len: int, cp_size: int, size: int, weights: Sequence[int] | None = None
) -> Layout:
    """Round robin by processing time: chunks of `size` tokens, sorted by work, dealt forth and back."""
    n = -(-seq_len // (cp_size * size)) * cp_size
    order = np.argsort(-work_of(tables, n, size, weights), kind="stable").reshape(-1, cp_size)
    order[1::2] = order[1::2, ::-1]
    owned = tuple(tuple(mine) for mine in np.sort(order, axis=0).T.tolist())
    return Layout("ptrr", seq_len, size, owned)


def min_heap(chunks: Chunks) -> Layout:
    """The heaviest chunk left goes to the rank with the least work that still has room."""
    return chunks.layout("min_heap", _heaped(chunks, range(len(chunks.work)), [[] for _ in range(chunks.cp_size)]))


def _heaped(chunks: Chunks, some: Sequence[int], owners: list[list[int]]) -> list[list[int]]:
    heap = [(int(chunks.work[mine].sum()), rank) for rank, mine in enumerate(owners) if len(mine) < chunks.per_rank]
    heapq.heapify(heap)
    for chunk in sorted(some, key=lambda c: (-chunks.work[c], c)):
        work, rank = heapq.heappop(heap)
        owners[rank].append(chunk)
        if len(owners[rank]) < chunks.per_rank:
            heapq.heappush(heap, (work + int(chunks.work[chunk]), rank))
    return owners


def affinity(chunks: Chunks, slack: float) -> Layout:
    """Gives a rank the chunks that see the same keys, as far as balance allows.

    Ranks are filled one after the other. Each begins with the chunk left that sees the most, and then takes the one
    that adds the fewest keys to what it has to receive (the heaviest of equal ones), among those with which it can
    still stay within its share of the work and leave the others theirs.

    Args:
        slack: by how much a rank's work may exceed the mean: 0.1 is 10%.
    """
    n, cp = len(chunks.work), chunks.cp_size
    work, needs = chunks.work, chunks.needs.copy()
    masks, own = needs.shape[1], np.arange(n)
    needs[own, :, own] = False
    needs = needs.reshape(n, -1)
    seen_by = np.ascontiguousarray(needs.T)
    degree = needs.sum(axis=1, dtype=np.int32)
    total = int(work.sum())
    most = int(total / cp * (1 + slack) + 1e-6)
    left = np.argsort(work, kind="stable")  # the chunks without an owner, lightest first
    owners: list[list[int]] = []
    for rank in range(cp):
        # `have`: keys owned or to be received; `adds`: by how much a chunk would lengthen what is to be received.
        have, adds = np.zeros(masks * n, dtype=bool), degree.copy()
        mine, load = [], 0
        least = total - most * (cp - rank - 1)
        for room in range(chunks.per_rank - 1, -1, -1):
            at = len(left) - 1
            if not mine:
                at -= int(degree[left][::-1].argmax())
            else:
                each = work[left]
                lightest, heaviest = _others(each, room)
                fits = (each <= most - load - lightest) & (each >= least - load - heaviest)
                if fits.any():
                    key = np.where(fits, adds[left], n * masks)
                    at -= int(key[::-1].argmin())
                else:
                    # The nearest to the share, had all slots equal parts of what is missing.
                    at = int(np.abs(each - (most - load) / (room + 1)).argmin())
            chunk = int(left[at])
            left[at:-1] = left[at + 1 :]
            left = left[:-1]
            mine.append(chunk)
            load += int(work[chunk])
            known = have.copy()
            have |= needs[chunk]
            have[chunk::n] = True
            new = (have & ~known).nonzero()[0]
            adds -= np.add.reduce(seen_by[new], axis=0, dtype=np.int32)
            # Owning a chunk whose keys were to be received saves them.
            adds -= np.bincount(new % n, minlength=n).astype(np.int32)
        total -= load
        owners.append(mine)
    return chunks.layout(f"affinity({slack:.0%})", sorted(owners, key=min))


def _others(left: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of the chunks left, in ascending order of work: what the `room` lightest and heaviest others weigh."""
    if room == 0:
        zero = np.zeros(len(left), dtype=np.int64)
        return zero, zero
    lightest = np.full(len(left), left[:room].sum())
    lightest[:room] = left[: room + 1].sum() - left[:room]
    heaviest = np.full(len(left), left[len(left) - room :].sum())
    heaviest[len(left) - room :] = left[len(left) - room - 1 :].sum() - left[len(left) - room :]
    return lightest, heaviest
