"""Heads in place of rows: before attention, ranks that share the heads swap them for rows of one another; after, back.

A rank comes with its rows of all heads, computes with all rows of its heads, and leaves with its rows of all heads.
Nothing of the mask decides what travels. Where there are fewer KV heads than ranks, several ranks get the same one, and
its gradients are added in rank order where it came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from flexcp.comm import Link, Pending
from flexcp.headgroups import shifted_score
from flexcp.heads import check_heads
from flexcp.kernel import Score, accumulation_dtype
from flexcp.planner import Schedule


@dataclass(frozen=True)
class Shares:
    """Who computes which heads. Query head h reads KV head h // (H / G).

    Attributes:
        queries, keys: each rank's query heads, and the KV heads that they read.
        key_of_query: by rank, the KV head that each of its query heads reads, counted from the first of them; None
            where the ranks' heads are grouped as evenly as all heads are.
    """

    queries: tuple[slice, ...]
    keys: tuple[slice, ...]
    key_of_query: tuple[tuple[int, ...], ...] | None


@lru_cache(maxsize=64)
def shares(num_heads: int, num_kv_heads: int, ranks: int) -> Shares:
    """Equal runs of query heads for each rank.

    Raises:
        ValueError: the ranks cannot share the heads evenly.

    >>> shares(6, 2, 3).keys
    (slice(0, 1, None), slice(0, 2, None), slice(1, 2, None))
    """
    check_heads(num_heads, ranks)
    each, per_key = num_heads // ranks, num_heads // num_kv_heads
    queries = tuple(slice(i * each, (i + 1) * each) for i in range(ranks))
    keys = tuple(slice(mine.start // per_key, (mine.stop - 1) // per_key + 1) for mine in queries)
    if num_kv_heads % ranks == 0 or ranks % num_kv_heads == 0:
        return Shares(queries, keys, None)
    of_query = tuple(
        tuple(h // per_key - some.start for h in range(mine.start, mine.stop)) for mine, some in zip(queries, keys)
    )
    return Shares(queries, keys, of_query)


class Switch:
    """Swaps rows for heads and back, among the ranks that share the heads; without such ranks everything stays.

    Attributes:
        link: the connection to the ranks over which the stages of the schedule run.
    """

    def __init__(self, schedule: Schedule, q: Tensor, k: Tensor, link: Link) -> None:
        self.ranks = schedule.ulysses
        self.link = link
        if self.ranks > 1:
            self.sharing, self.link = link.divided(self.ranks)
            self.me = self.sharing.rank
            self.shares = shares(q.shape[1], k.shape[1], self.ranks)
            self.dtype, self.device = q.dtype, q.device

    def score(self, score: Score) -> Score:
        """The same score for tensors that hold only this rank's heads."""
        return score if self.ranks == 1 else shifted_score(score, self.shares.queries[self.me].start, self.device)

    def to_heads(self, like_queries: Sequence[Tensor | None], keys: Sequence[Tensor]) -> list[Tensor | None]:
        """All rows of this rank's heads, from every rank's rows of all heads.

        Args:
            like_queries: [B, H, L, ...] each, or None, which stays; keys: [B, G, L, ...] each.
        Returns:
            [B, H / ranks, ranks * L, ...] for each, then the same for keys and values.
        """
        if self.ranks == 1:
            return [*like_queries, *keys]
        given = [x for x in like_queries if x is not None]
        moved = iter(self._swap_in(given, keys))
        swapped: list[Tensor | None] = [None if x is None else next(moved) for x in like_queries]
        for x in moved:
            swapped.append(x if self._own_keys is None else x[:, self._own_keys])
        return swapped

    def to_rows(self, *like_queries: Tensor) -> tuple[Tensor, ...]:
        """The inverse of `to_heads` on results such as out and lse; what was rounded to travel comes back as wide."""
        if self.ranks == 1:
            return like_queries
        narrow = [x if x.dim() == 3 else x.to(self.dtype) for x in like_queries]
        moved = self._swap_out(narrow, [self.shares.queries] * len(narrow))
        return tuple(x.to(wide.dtype) for x, wide in zip(moved, like_queries))

    def to_row_gradients(self, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, ...]:
        """The adjoint of `to_heads` for q, k and v, in the accumulation dtype."""
        if self.ranks == 1:
            return dq, dk, dv
        dkv = [dk, dv]
        if self._own_keys is not None:
            dkv = [self._summed_by_key(x) for x in dkv]
        # Parts that are added to others travel unrounded.
        shared = any(a.stop > b.start for a, b in zip(self.shares.keys, self.shares.keys[1:]))
        narrow = [dq.to(self.dtype), *(x if shared else x.to(self.dtype) for x in dkv)]
        return tuple(self._swap_out(narrow, [self.shares.queries, self.shares.keys, self.shares.keys]))

    def _summed_by_key(self, x: Tensor) -> Tensor:
        """The adjoint of x[:, self._own_keys]; in order, where `index_add_` on a GPU keeps none."""
        assert self.shares.key_of_query is not None
        keys = self.shares.keys[self.me]
        shape = x.shape[0], keys.stop - keys.start, *x.shape[2:]
        total = x.new_zeros(shape, dtype=accumulation_dtype(x.dtype))
        for query, key in enumerate(self.shares.key_of_query[self.me]):
            total[:, key] += x[:, query]
        return total

    @property
    def _own_keys(self) -> Tensor | None:
        of_query = self.shares.key_of_query
        return None if of_query is None else torch.tensor(of_query[self.me], device=self.device)

    def _swap_in(self, like_queries: Sequence[Tensor], keys: Sequence[Tensor]) -> list[Tensor]:
        tensors = [*like_queries, *keys]
        heads = [self.shares.queries] * len(like_queries) + [self.shares.keys] * len(keys)
        pieces = [[x[:, mine[rank]] for rank in range(self.ranks)] for x, mine in zip(tensors, heads)]
        like = [[x[:, mine[self.me]] for _ in range(self.ranks)] for x, mine in zip(tensors, heads)]
        return [torch.cat(parts, dim=2) for parts in self._exchange(pieces, like)]

    def _swap_out(self, tensors: Sequence[Tensor], heads: Sequence[tuple[slice, ...]]) -> list[Tensor]:
        pieces = [x.chunk(self.ranks, dim=2) for x in tensors]
        shapes = []
        for x, mine in zip(tensors, heads):
            rows = x.shape[2] // self.ranks
            counts = [some.stop - some.start for some in mine]
            shapes.append([x.new_empty(x.shape[0], count, rows, *x.shape[3:], device="meta") for count in counts])
        results = []
        for mine, parts in zip(heads, self._exchange(pieces, shapes)):
            first, dtype = parts[0], accumulation_dtype(parts[0].dtype)
            total = first.new_zeros(first.shape[0], mine[-1].stop, *first.shape[2:], dtype=dtype)
            for some, part in zip(mine, parts):
                total[:, some] += part
            results.append(total)
        return results

    def _exchange(self, pieces: Sequence[Sequence[Tensor]], like: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Piece p of each tensor to rank p; from rank p, for each tensor, a piece that looks like its like[p].

        Tensors of one dtype travel in one message.
        """
        pending: list[tuple[list[int], Pending]] = []
        for dtype in dict.fromkeys(parts[0].dtype for parts in pieces):
            which = [i for i, parts in enumerate(pieces) if parts[0].dtype == dtype]
            leaving, arriving = (
                [sum(x[i][rank].numel() for i in which) for rank in range(self.ranks)] for x in (pieces, like)
            )
            packed = _packed([pieces[i][rank] for rank in range(self.ranks) for i in which])
            pending.append((which, self.sharing.start_all_to_all(packed[:, None], leaving, arriving)))
            del packed
        received: list[list[Tensor]] = [[] for _ in pieces]
        for which, message in pending:
            flat = message.wait()
            assert flat is not None
            sizes = [like[i][rank].numel() for rank in range(self.ranks) for i in which]
            shapes = [like[i][rank].shape for rank in range(self.ranks) for i in which]
            for at, (part, shape) in enumerate(zip(flat[:, 0].split(sizes), shapes)):
                received[which[at % len(which)]].append(part.view(shape))
        return received


def _packed(pieces: Sequence[Tensor]) -> Tensor:
    """One after the other in one buffer; each is copied once, and nothing is kept beside it."""
    packed = pieces[0].new_empty(sum(x.numel() for x in pieces))
    for target, piece in zip(packed.split([x.numel() for x in pieces]), pieces):
        target.view(piece.shape).copy_(piece)
    return packed
