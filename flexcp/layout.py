"""Which rank owns which chunk of the sequence. Pure index arithmetic: no collectives, no processes.

A layout cuts the padded sequence into equal chunks and gives every rank the same number of them. A rank's *local*
rows are its chunks one after the other; the *permuted* sequence is rank 0's rows, then rank 1's, and so on, which is
also the order in which an all-gather delivers them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Owners of the chunks of a sequence.

    Args:
        name: "contiguous", "head_tail", ...
        seq_len: S, the number of real tokens.
        chunk_size: tokens in a chunk; a multiple of both block sizes, so that a block never crosses a chunk.
        owned: `owned[r]` lists the chunks of rank r in local order; every chunk has one owner, all ranks own equally
            many.
    """

    name: str
    seq_len: int
    chunk_size: int
    owned: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        counts = {len(chunks) for chunks in self.owned}
        every = sorted(chunk for chunks in self.owned for chunk in chunks)
        if len(counts) != 1 or every != list(range(len(every))):
            raise ValueError(
                f"layout {self.name!r}: every chunk needs one owner and every rank equally many, got {self.owned}"
            )
        if not 0 < self.seq_len <= self.padded_len:
            raise ValueError(f"layout {self.name!r}: {self.padded_len} rows cannot hold {self.seq_len} tokens")

    @property
    def cp_size(self) -> int:
        return len(self.owned)

    @property
    def local_len(self) -> int:
        """L, the rows of one rank, padding included."""
        return len(self.owned[0]) * self.chunk_size

    @property
    def padded_len(self) -> int:
        """The length of the whole sequence with its padded tail: cp_size * local_len."""
        return self.cp_size * self.local_len

    def positions(self, rank: int) -> Tensor:
        """Global index of each local row of `rank`: [L] int64. Rows at or past seq_len are padding."""
        return self.starts(rank, self.chunk_size)[:, None].add(torch.arange(self.chunk_size)).flatten()

    def starts(self, rank: int, block_size: int) -> Tensor:
        """Global index of the first row of each local block: [L / block_size] int64.

        `block_size` must divide the chunk size.
        """
        if self.chunk_size % block_size:
            raise ValueError(f"a block of {block_size} does not divide a chunk of {self.chunk_size}")
        chunks = torch.tensor(self.owned[rank], dtype=torch.int64) * self.chunk_size
        return chunks[:, None].add(torch.arange(0, self.chunk_size, block_size)).flatten()

    def divided(self, parts: int) -> "Layout":
        """The layout of cp_size * parts ranks in which each rank's local rows are cut into `parts` equal runs.

        Ranks r * parts ... r * parts + parts - 1 own, one after the other, what rank r owns here. `parts` must divide
        the chunk size.
        """
        if self.chunk_size % parts:
            raise ValueError(f"{parts} parts do not divide a chunk of {self.chunk_size}")
        pieces = [[chunk * parts + i for chunk in mine for i in range(parts)] for mine in self.owned]
        each = len(self.owned[0])
        owned = tuple(tuple(mine[i * each : (i + 1) * each]) for mine in pieces for i in range(parts))
        return Layout(self.name, self.seq_len, self.chunk_size // parts, owned)

    def permutation(self) -> Tensor:
        """Global index of each row of the permuted sequence: [padded_len] int64."""
        return torch.cat([self.positions(rank) for rank in range(self.cp_size)])

    def restoration(self) -> Tensor:
        """The inverse of `permutation`: where each global index stands in the permuted sequence, [padded_len] int64."""
        permutation = self.permutation()
        inverse = torch.empty_like(permutation)
        inverse[permutation] = torch.arange(permutation.numel())
        return inverse


def contiguous(seq_len: int, cp_size: int, align: int) -> Layout:
    """Rank r owns the r-th run of the sequence. `align`: tokens, a multiple of both block sizes."""
    return Layout("contiguous", seq_len, _chunk_size(seq_len, cp_size, align), tuple((r,) for r in range(cp_size)))


def head_tail(seq_len: int, cp_size: int, align: int) -> Layout:
    """Rank r owns the r-th chunk from the head and the r-th from the tail, which balances a causal mask.

    Also known as zigzag; used for instance by Llama 3 (arXiv 2407.21783, section 3.3.2).
    """
    num_chunks = 2 * cp_size
    owned = tuple((r, num_chunks - 1 - r) for r in range(cp_size))
    return Layout("head_tail", seq_len, _chunk_size(seq_len, num_chunks, align), owned)


LAYOUTS = {"contiguous": contiguous, "head_tail": head_tail}


def _chunk_size(seq_len: int, num_chunks: int, align: int) -> int:
    """The least multiple of `align` such that num_chunks chunks hold the sequence."""
    return -(-seq_len // (num_chunks * align)) * align
