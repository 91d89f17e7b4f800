"""How keys and values of one stage reach a rank, and how their gradients come home: started now, awaited later."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.comm import Link, Pending
from flexcp.exchange import Exchange, Routes
from flexcp.headgroups import HeadGroup
from flexcp.kernel import accumulation_dtype


class Gathering:
    """Everybody's keys and values of one head group on their way to everybody."""

    def __init__(self, group: HeadGroup, k: Tensor, v: Tensor, link: Link) -> None:
        self.like = k[:, group.keys], v[:, group.keys]
        self.pending = link.start_all_gather(pack(*self.like))

    def wait(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values side by side in rank order, [B, G, cp_size * L, D], for the one stage that there is."""
        received = self.pending.wait()
        assert received is not None
        keys, values = unpack(received, *self.like)
        return [(_side_by_side(keys), _side_by_side(values))]


class GatheredGradients:
    """The adjoint of `Gathering`: every rank's part of this rank's gradients, added in rank order."""

    def __init__(self, group: HeadGroup, dk: Tensor, dv: Tensor, link: Link) -> None:
        self.like = dk[:, :, : dk.shape[2] // link.size], dv[:, :, : dv.shape[2] // link.size]
        pieces = [x.flatten() for pair in zip(_one_by_one(dk, link.size), _one_by_one(dv, link.size)) for x in pair]
        parts = torch.cat(pieces).view(link.size, -1)
        self.pending = link.start_all_to_all(parts, [1] * link.size, [1] * link.size)

    def wait(self) -> tuple[Tensor, Tensor]:
        parts = self.pending.wait()
        assert parts is not None
        return unpack(parts.sum(0, dtype=accumulation_dtype(parts.dtype)), *self.like)


class Exchanging:
    """The needed blocks of one head group on their way."""

    def __init__(self, group: HeadGroup, k: Tensor, v: Tensor, link: Link) -> None:
        self.exchange, self.routes = _routes(group, k)
        self.stages = len(group.stages)
        k_group, v_group = k[:, group.keys], v[:, group.keys]
        self.batch, self.groups, length, self.dim = k_group.shape
        self.blocks = length // self.exchange.block_size
        self.own = _rows(torch.cat([k_group, v_group], dim=-1), self.exchange.block_size)
        self.pending = _send(link, self.exchange, self.own, self.routes.send_rows, self.routes, forward=True)

    def wait(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of this rank's own blocks and then of the received ones, [B, G, rows, D] for each stage."""
        buffer = self.own.new_zeros(self.groups, self.exchange.slots, self.own.shape[1])
        buffer[:, : self.blocks] = self.own.unflatten(0, (self.groups, self.blocks))
        if self.pending is not None:
            buffer.flatten(0, 1)[self.routes.receive_rows] = self.pending.wait()
        parts = [_unrows(part, self.batch, self.exchange.block_size) for part in buffer.chunk(self.stages, dim=1)]
        return [(kv[..., : self.dim], kv[..., self.dim :]) for kv in parts]


class ExchangedGradients:
    """The adjoint of `Exchanging`: every rank's gradients of this rank's rows, added in rank order."""

    def __init__(self, group: HeadGroup, dk: Tensor, dv: Tensor, like: Tensor, link: Link) -> None:
        self.exchange, self.routes = _routes(group, like)
        self.rank = link.rank
        self.batch, self.groups, _, self.dim = dk.shape
        self.blocks = like.shape[2] // self.exchange.block_size
        rows = _rows(torch.cat([dk, dv], dim=-1), self.exchange.block_size)
        self.own = rows.unflatten(0, (self.groups, self.exchange.slots))[:, : self.blocks].flatten(0, 1)
        self.pending = _send(link, self.exchange, rows, self.routes.receive_rows, self.routes, forward=False)

    def wait(self) -> tuple[Tensor, Tensor]:
        total = torch.zeros_like(self.own, dtype=accumulation_dtype(self.own.dtype))
        counts = self.routes.send_counts
        received = None if self.pending is None else self.pending.wait()
        parts = [None] * len(counts) if received is None else received.split(counts)
        for rank, (rows, part) in enumerate(zip(self.routes.send_rows.split(counts), parts)):
            if rank == self.rank:
                total += self.own
            elif part is not None and part.shape[0]:
                # A row occurs once in what one rank sends, so the order of additions is that of the ranks.
                total[rows] += part
        dkv = _unrows(total.unflatten(0, (self.groups, self.blocks)), self.batch, self.exchange.block_size)
        return dkv[..., : self.dim], dkv[..., self.dim :]


def _routes(group: HeadGroup, like: Tensor) -> tuple[Exchange, Routes]:
    exchange = group.stages[0].exchange
    assert exchange is not None
    return exchange, exchange.routes(like.shape[1], like.device, group.keys)


def _send(link: Link, exchange: Exchange, rows: Tensor, which: Tensor, routes: Routes, forward: bool) -> Pending | None:
    if exchange.silent:
        return None
    counts = routes.send_counts, routes.receive_counts
    return link.start_all_to_all(rows[which], *(counts if forward else counts[::-1]))


def pack(k: Tensor, v: Tensor) -> Tensor:
    """One flat buffer, keys first."""
    return torch.cat([k.flatten(), v.flatten()])


def unpack(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack` along the last dimension; any leading ones stay."""
    keys, values = kv.split([k.numel(), v.numel()], dim=-1)
    return keys.unflatten(-1, k.shape), values.unflatten(-1, v.shape)


def _side_by_side(shards: Tensor) -> Tensor:
    """[cp_size, B, G, L, D] -> [B, G, cp_size * L, D]."""
    return torch.cat(shards.unbind(0), dim=2)  # twice as fast as one strided copy, on an H200


def _one_by_one(x: Tensor, cp_size: int) -> tuple[Tensor, ...]:
    """The inverse of `_side_by_side`, as one tensor for each rank."""
    return x.chunk(cp_size, dim=2)


def _rows(x: Tensor, block_size: int) -> Tensor:
    """[B, G, L, D] -> [G * L / block_size, B * block_size * D], a row for each block of a head."""
    return x.unflatten(2, (-1, block_size)).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


def _unrows(rows: Tensor, batch: int, block_size: int) -> Tensor:
    """The inverse of `_rows` on [G, L / block_size, B * block_size * D]."""
    return rows.unflatten(2, (batch, block_size, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)
