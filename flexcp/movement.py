"""How keys and values of one stage reach a rank, and how their gradients come home: started now, awaited later.

What waits holds what is on its way and nothing else: of the tensors that were packed it knows the shapes. Gradients are
handed over in a list that is emptied once they are packed, so that their memory is free when others' arrive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.comm import Link, Pending
from flexcp.exchange import Exchange, Routes
from flexcp.headgroups import HeadGroup
from flexcp.kernel import accumulation_dtype
from flexcp.rowsum import sum_rows


class Gathering:
    """Everybody's keys and values of one head group on their way to everybody."""

    def __init__(self, group: HeadGroup, k: Tensor, v: Tensor, link: Link) -> None:
        keys, values = k[:, group.keys], v[:, group.keys]
        self.shapes = keys.shape, values.shape
        self.pending = link.start_all_gather(_by_row(keys, values))

    def wait(self) -> list[tuple[Tensor, Tensor]]:
        """Views [B, G, cp_size * L, D] of what came, in rank order, for the one stage that there is."""
        received = self.pending.wait()
        assert received is not None
        return [_of_rows(received.flatten(0, 1), *self.shapes)]


class GatheredGradients:
    """The adjoint of `Gathering`: every rank's part of this rank's gradients, added in rank order."""

    def __init__(self, dkv: list[Tensor], link: Link) -> None:
        self.k_shape, self.v_shape = (x.shape for x in dkv)
        parts = _by_row(*dkv).view(link.size, -1)
        dkv.clear()
        self.pending = link.start_all_to_all(parts, [1] * link.size, [1] * link.size)

    def wait(self) -> tuple[Tensor, Tensor]:
        parts = self.pending.wait()
        assert parts is not None
        total = parts.sum(0, dtype=accumulation_dtype(parts.dtype))
        batch, groups, _, dim = self.k_shape
        width = groups * (dim + self.v_shape[3])
        return _of_rows(total.view(-1, batch, width), self.k_shape, self.v_shape)


class Exchanging:
    """The needed blocks of one head group on their way."""

    def __init__(self, group: HeadGroup, k: Tensor, v: Tensor, link: Link) -> None:
        self.exchange, self.routes = _routes(group, k.shape[1], k.device)
        self.stages = len(group.stages)
        k_group, v_group = k[:, group.keys], v[:, group.keys]
        self.batch, self.groups, length, self.dim = k_group.shape
        self.blocks = length // self.exchange.block_size
        own = _rows(torch.cat([k_group, v_group], dim=-1), self.exchange.block_size)
        sent = _picked(own, self.routes.send_rows)
        self.own: Tensor | None = own
        self.pending = _send(link, self.exchange, sent, self.routes, forward=True)

    def wait(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of this rank's own blocks and then of the received ones, [B, G, rows, D] for each stage."""
        # First, since what was sent is as large as the buffer where everybody needs it, and is free now.
        received = None if self.pending is None else self.pending.wait()
        own, self.own = self.own, None
        assert own is not None
        buffer = own.new_empty(self.groups, self.exchange.slots, own.shape[1])
        buffer[:, : self.blocks] = own.unflatten(0, (self.groups, self.blocks))
        buffer[:, self.exchange.used :] = 0  # slots that stay empty are multiplied with, too
        if received is not None:
            words, received_words = _words(buffer.flatten(0, 1), received)
            words[self.routes.receive_rows] = received_words
        parts = [_unrows(part, self.batch, self.exchange.block_size) for part in buffer.chunk(self.stages, dim=1)]
        return [(kv[..., : self.dim], kv[..., self.dim :]) for kv in parts]


class ExchangedGradients:
    """The adjoint of `Exchanging`: every rank's gradients of this rank's rows, added in rank order."""

    def __init__(self, group: HeadGroup, dkv: list[Tensor], k_shape: torch.Size, link: Link) -> None:
        self.exchange, self.routes = _routes(group, k_shape[1], dkv[0].device)
        self.batch, self.groups, _, self.dim = dkv[0].shape
        self.blocks = k_shape[2] // self.exchange.block_size
        rows = _rows(torch.cat(dkv, dim=-1), self.exchange.block_size)
        dkv.clear()
        sent = _picked(rows, self.routes.receive_rows)
        own = rows.unflatten(0, (self.groups, self.exchange.slots))[:, : self.blocks]
        # Copied, since a view would keep the rows of all slots alive.
        self.own = own.clone(memory_format=torch.contiguous_format).flatten(0, 1)
        del rows, own
        self.pending = _send(link, self.exchange, sent, self.routes, forward=False)

    def wait(self) -> tuple[Tensor, Tensor]:
        total = self.own
        if self.pending is not None:
            received = self.pending.wait()
            assert received is not None
            total = sum_rows(received, self.own, self.routes.sum_rows, self.routes.sum_offsets)
        dkv = _unrows(total.unflatten(0, (self.groups, self.blocks)), self.batch, self.exchange.block_size)
        return dkv[..., : self.dim], dkv[..., self.dim :]


def _routes(group: HeadGroup, num_kv_heads: int, device: torch.device) -> tuple[Exchange, Routes]:
    exchange = group.stages[0].exchange
    assert exchange is not None
    return exchange, exchange.routes(num_kv_heads, device, group.keys)


def _picked(rows: Tensor, which: Tensor) -> Tensor:
    (words,) = _words(rows)
    return words[which].view(rows.dtype)


def _send(link: Link, exchange: Exchange, rows: Tensor, routes: Routes, forward: bool) -> Pending | None:
    if exchange.silent:
        return None
    counts = routes.send_counts, routes.receive_counts
    return link.start_all_to_all(rows, *(counts if forward else counts[::-1]))


def pack(k: Tensor, v: Tensor) -> Tensor:
    """One flat buffer, keys first."""
    return torch.cat([k.flatten(), v.flatten()])


def unpack(kv: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The inverse of `pack`, as views."""
    keys, values = kv.split([k_shape.numel(), v_shape.numel()])
    return keys.view(k_shape), values.view(v_shape)


def _by_row(k: Tensor, v: Tensor) -> Tensor:
    """[L, B, G * (D + Dv)]: a position's keys beside its values, so that shards one after another are one sequence."""
    batch, groups, length, dim = k.shape
    rows = k.new_empty(length, batch, groups * (dim + v.shape[3]))
    for here, x in zip(_of_rows(rows, k.shape, v.shape), (k, v)):
        here_words, words = _words(here, x)
        here_words.copy_(words)
    return rows


def _of_rows(rows: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> tuple[Tensor, Tensor]:
    """The inverse of `_by_row`, as views: [B, G, L, D] and [B, G, L, Dv], of the heads and dims of these shapes."""
    heads = [(shape[1], shape[3]) for shape in (k_shape, v_shape)]
    parts = rows.split([groups * dim for groups, dim in heads], dim=-1)
    keys, values = (part.unflatten(-1, each).permute(1, 2, 0, 3) for part, each in zip(parts, heads))
    return keys, values


def _words(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same memory as words of 8 bytes, where all allow it.

    A GPU copies strided or indexed elements one by one, and those of 2 bytes at a third of its bandwidth.
    """
    whole = all(
        x.stride(-1) == 1
        and all(number * x.element_size() % 8 == 0 for number in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        for x in tensors
    )
    return tuple(x.view(torch.int64) for x in tensors) if whole else tensors


def _rows(x: Tensor, block_size: int) -> Tensor:
    """[B, G, L, D] -> [G * L / block_size, B * block_size * D], a row for each block of a head."""
    return x.unflatten(2, (-1, block_size)).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


def _unrows(rows: Tensor, batch: int, block_size: int) -> Tensor:
    """The inverse of `_rows` on [G, L / block_size, B * block_size * D]."""
    return rows.unflatten(2, (batch, block_size, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)
