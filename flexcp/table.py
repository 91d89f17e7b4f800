"""Which key blocks each query block sees, counted exactly: what every choice of the planner rests on.

A table holds one bit per (head, query block, key block), so that a million tokens in blocks of 128 are 8 MiB and the
needs of a rank are the bitwise "or" of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flexcp.blockmask import EMPTY, FULL, PARTIAL
from flexcp.blocksource import BlockSource, block_source
from flexcp.layout import Layout

# Blocks classed at once.
_BOXES_AT_ONCE = 1 << 22
# A closed-form mask is asked about squares of 8 x 8 blocks first, where the sequence has at least _LONG blocks.
_COARSE, _LONG = 8, 1024
_SQUARES_AT_ONCE = 8


@dataclass(frozen=True)
class Table:
    """What the query blocks of a sequence see.

    Attributes:
        block_size: (queries, keys), tokens.
        num_keys: key blocks of the unpadded sequence.
        counts: int64 [num_queries], non-empty blocks of each query block, summed over batch rows and heads.
        bits: uint8 [heads, num_queries, num_keys / 8], a bit per key block (numpy.packbits) that is seen in any batch
            row; 1 head where the mask is the same for all.
    """

    block_size: tuple[int, int]
    num_keys: int
    counts: np.ndarray
    bits: np.ndarray

    @property
    def heads(self) -> int:
        return self.bits.shape[0]

    @property
    def any_head(self) -> np.ndarray:
        """The bits of the union over heads: uint8 [num_queries, num_keys / 8]."""
        return self.bits[0] if self.heads == 1 else np.bitwise_or.reduce(self.bits, axis=0)

    def work(self) -> np.ndarray:
        """Pairs in the non-empty blocks of each query block; partial and full ones count alike: int64 [num_queries].

        The kernel computes both whole.
        """
        return self.counts * (self.block_size[0] * self.block_size[1])


def num_blocks(source: BlockSource) -> tuple[int, int]:
    """Query and key blocks of the unpadded sequence."""
    return -(-source.seq_len // source.block_size[0]), -(-source.seq_len // source.block_size[1])


def table_of(source: BlockSource, device: torch.device) -> Table:
    """The whole table, derived alone."""
    counts, bits = rows_of(source, 0, num_blocks(source)[0], device)
    return Table(source.block_size, num_blocks(source)[1], counts, bits)


def rows_of(source: BlockSource, first: int, last: int, device: torch.device) -> tuple[np.ndarray, np.ndarray]:
    """(counts, bits) of the query blocks first..last-1; see `Table`."""
    num_keys = num_blocks(source)[1]
    if first >= last:
        return np.zeros(0, np.int64), np.zeros((source.heads, 0, -(-num_keys // 8)), np.uint8)
    q_start = torch.arange(first, last, device=device) * source.block_size[0]
    kv_start = torch.arange(num_keys, device=device) * source.block_size[1]
    coarse = _coarse_source(source, device) if num_keys >= _LONG else None
    if coarse is not None:
        bits = _refined(source, coarse, q_start, kv_start)
    else:
        rows_at_once = max(1, _BOXES_AT_ONCE // (source.batch * source.heads * num_keys))
        parts = [_packed(source.inner_classes(rows, kv_start)) for rows in q_start.split(rows_at_once)]
        bits = np.concatenate(parts, axis=2)
    counts = popcount(bits).sum(axis=(0, 1))
    return counts, bits[0] if source.batch == 1 else np.bitwise_or.reduce(bits, axis=0)


def popcount(bits: np.ndarray) -> np.ndarray:
    """Bits set along the last axis: int64, one dimension less."""
    return _ONES[bits].sum(axis=-1, dtype=np.int64)


_ONES = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.uint8)


def _packed(classes: Tensor) -> np.ndarray:
    """Classes [..., columns] -> the bits of the non-empty ones, uint8 [..., columns / 8]."""
    return np.packbits((classes != EMPTY).cpu().numpy(), axis=-1)


def _coarse_source(source: BlockSource, device: torch.device) -> BlockSource | None:
    """The same closed-form mask in blocks _COARSE times as long along both axes; None where it has none."""
    closed_form = getattr(source, "closed_form", None)
    if closed_form is None or source.needs_pairs:
        return None
    size = source.block_size[0] * _COARSE, source.block_size[1] * _COARSE
    return block_source(closed_form, source.seq_len, size, source.batch, source.heads, device)


def _refined(source: BlockSource, coarse: BlockSource, q_start: Tensor, kv_start: Tensor) -> np.ndarray:
    """The bits of all blocks, [batch, heads, rows, columns / 8]; asks about blocks only where squares are undecided.

    A square is as wide as a byte has bits.
    """
    first, rows = int(q_start[0]) // source.block_size[0], q_start.numel()
    squares = torch.arange(first // _COARSE, (first + rows - 1) // _COARSE + 1, device=q_start.device)
    classes = coarse.inner_classes(squares * coarse.block_size[0], kv_start[::_COARSE])
    in_square = np.arange(first, first + rows) // _COARSE - first // _COARSE
    bits = np.where(classes.cpu().numpy() == FULL, 255, 0).astype(np.uint8)[:, :, in_square]
    bits[..., -1] &= (0xFF << -kv_start.numel() % 8) & 0xFF
    undecided = (classes == PARTIAL).flatten(0, 1).any(0).cpu().numpy()
    for square in range(0, len(squares), _SQUARES_AT_ONCE):
        columns = np.flatnonzero(np.logical_or.reduce(undecided[square : square + _SQUARES_AT_ONCE], axis=0))
        if not len(columns):
            continue
        begin, end = np.searchsorted(in_square, (square, square + _SQUARES_AT_ONCE))
        blocks = (columns[:, None] * _COARSE + np.arange(_COARSE)).ravel()
        real = torch.from_numpy(blocks[blocks < kv_start.numel()]).to(q_start.device)
        bits[:, :, begin:end, columns] = _packed(source.inner_classes(q_start[begin:end], kv_start[real]))
    return bits


def rank_needs(table: Table, layout: Layout) -> np.ndarray:
    """Which key blocks each rank's queries see: bool [heads, cp_size, key blocks of the padded sequence]."""
    bits = np.stack([np.bitwise_or.reduce(table.bits[:, rows], axis=1) for rows in rank_rows(table, layout)], axis=1)
    needs = np.zeros((table.heads, layout.cp_size, layout.padded_len // table.block_size[1]), dtype=bool)
    needs[..., : table.num_keys] = np.unpackbits(bits, axis=-1, count=table.num_keys)
    return needs


def rank_rows(table: Table, layout: Layout) -> list[np.ndarray]:
    """The query blocks of each rank that hold tokens."""
    return [mine[mine < len(table.counts)] for mine in owned_blocks(layout, table.block_size[0])]


def owned_blocks(layout: Layout, block_size: int) -> np.ndarray:
    """The blocks of each rank in local order, padding included: int64 [cp_size, blocks]."""
    per_chunk = layout.chunk_size // block_size
    chunks = np.array(layout.owned, dtype=np.int64)[:, :, None] * per_chunk
    return (chunks + np.arange(per_chunk)).reshape(layout.cp_size, -1)
