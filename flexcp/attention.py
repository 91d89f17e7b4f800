"""The executor: walks a schedule's stages, communicates for the next while it computes this one, and merges.

Keys and values of a rank travel in one buffer. Results accumulate in fp32 (fp64 for fp64 inputs), in the order of the
stages, so that a run repeats bit for bit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from flexcp import kernel
from flexcp.comm import Link, Pending
from flexcp.kernel import Score
from flexcp.merge import merge
from flexcp.planner import Schedule, Stage


def forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, score: Score, scale: float, link: Link
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the whole sequence.

    Args:
        q: [B, H, L, D]; k: [B, G, L, D]; v: [B, G, L, Dv], this rank's shards.
    Returns:
        out [B, H, L, Dv] and lse [B, H, L], natural logarithm, in the accumulation dtype.
    """
    out = lse = None
    for stage, k_stage, v_stage in _arrivals(schedule, k, v, link):
        if stage.block_mask is not None:
            partial = kernel.forward(q, k_stage, v_stage, stage, score, scale)
            out, lse = partial if out is None or lse is None else merge(out, lse, *partial)
        del k_stage, v_stage
    if out is None or lse is None:
        dtype = kernel.accumulation_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    schedule: Schedule,
    score: Score,
    scale: float,
    link: Link,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of this rank's shards, and this rank's part of the gradient of each captured tensor.

    Args:
        out, lse: what `forward` returned (out may have been cast); dout, dlse: gradients of them, dlse may be None.
    Returns:
        dq, dk, dv in the accumulation dtype, and per buffer a gradient or None.
    """
    dtype = kernel.accumulation_dtype(q.dtype)
    dq = torch.zeros_like(q, dtype=dtype)
    # A rank whose queries see nothing still has a gradient, 0: the ranks may be about to sum it.
    dbuffers = [
        torch.zeros_like(x, dtype=dtype) if needed else None for x, needed in zip(score.buffers, score.needs_grad)
    ]
    keys = _KeyGradients(schedule, k, v, dtype, link)
    for stage, k_stage, v_stage in _arrivals(schedule, k, v, link):
        dkv = None
        if stage.block_mask is not None:
            dq_stage, dk_stage, dv_stage, dbuffers_stage = kernel.backward(
                q, k_stage, v_stage, out, lse, dout, dlse, stage, score, scale
            )
            dq += dq_stage
            dbuffers = [_plus(total, part) for total, part in zip(dbuffers, dbuffers_stage)]
            dkv = dk_stage, dv_stage
        keys.send_home(stage, dkv)
        del k_stage, v_stage
    dk, dv = keys.collect()
    return dq, dk, dv, dbuffers


def _arrivals(schedule: Schedule, k: Tensor, v: Tensor, link: Link) -> Iterator[tuple[Stage, Tensor, Tensor]]:
    """Each stage with its keys and values; those of the next are on their way while the caller computes.

    The caller drops its references before it asks for the next stage, or three shards would be alive at once.
    """
    if link.size == 1:
        yield schedule.stages[0], k, v
    elif schedule.comm == "gather":
        shards = _unpack(link.all_gather(_pack(k, v)), k, v)
        yield schedule.stages[0], *(_side_by_side(x) for x in shards)
    elif schedule.comm == "exchange":
        (stage,) = schedule.stages
        yield stage, *_fetch(stage, k, v, link)
    else:
        own = _pack(k, v)

        def start(stage: Stage) -> Pending:
            return link.shift(own, stage.send_to, own, stage.receive_from)

        pending = start(schedule.stages[0])
        for stage, following in zip(schedule.stages, (*schedule.stages[1:], None)):
            received = pending.wait()
            if following is not None:
                pending = start(following)
            arrived = (k, v) if received is None else _unpack(received, k, v)
            yield stage, *arrived
            del received, arrived


class _KeyGradients:
    """Brings the gradient of keys and values home to the rank that owns them, and adds them up there."""

    def __init__(self, schedule: Schedule, k: Tensor, v: Tensor, dtype: torch.dtype, link: Link) -> None:
        self.comm = schedule.comm
        self.link = link
        self.dk, self.dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        self.pending: Pending | None = None

    def send_home(self, stage: Stage, dkv: tuple[Tensor, Tensor] | None) -> None:
        """Hands over one stage's gradients, by kernel layout of that stage; None where it computed nothing."""
        self._settle()
        if self.link.size == 1 or (self.comm == "ring" and stage.sources == (self.link.rank,)):
            if dkv is not None:
                self.dk += dkv[0]
                self.dv += dkv[1]
        elif self.comm == "exchange":
            assert dkv is not None
            self.dk, self.dv = _bring_home(stage, *dkv, self.dk, self.link)
        elif self.comm == "gather":
            assert dkv is not None
            shards = (_one_by_one(x, self.link.size) for x in dkv)
            mine = self.link.reduce_scatter(torch.stack([_pack(*pair) for pair in zip(*shards)]))
            self.dk, self.dv = _unpack(mine, self.dk, self.dv)
        else:
            # The reverse of the way the keys came: back to their owner, and this rank's own back from its reader.
            packed = None if dkv is None else _pack(*dkv)
            like = _pack(self.dk, self.dv) if packed is None else packed
            self.pending = self.link.shift(packed, stage.receive_from, like, stage.send_to)

    def collect(self) -> tuple[Tensor, Tensor]:
        self._settle()
        return self.dk, self.dv

    def _settle(self) -> None:
        received = self.pending.wait() if self.pending is not None else None
        self.pending = None
        if received is not None:
            dk, dv = _unpack(received, self.dk, self.dv)
            self.dk += dk
            self.dv += dv


def _fetch(stage: Stage, k: Tensor, v: Tensor, link: Link) -> tuple[Tensor, Tensor]:
    """Keys and values of the stage's blocks: this rank's own, and those that others send: [B, G, N, D]."""
    exchange = stage.exchange
    assert exchange is not None
    batch, groups, length, dim = k.shape
    routes = exchange.routes(groups, k.device)
    own = _rows(torch.cat([k, v], dim=-1), exchange.block_size)
    blocks = length // exchange.block_size
    buffer = own.new_zeros(groups, exchange.slots, own.shape[1])
    buffer[:, :blocks] = own.unflatten(0, (groups, blocks))
    if not exchange.silent:
        received = link.all_to_all(own[routes.send_rows], routes.send_counts, routes.receive_counts)
        buffer.flatten(0, 1)[routes.receive_rows] = received
    k_stage, v_stage = _unrows(buffer, batch, exchange.block_size).split([dim, v.shape[3]], dim=-1)
    return k_stage, v_stage


def _bring_home(stage: Stage, dk: Tensor, dv: Tensor, like: Tensor, link: Link) -> tuple[Tensor, Tensor]:
    """The adjoint of `_fetch`: every rank's gradients of this rank's rows, added in rank order."""
    exchange = stage.exchange
    assert exchange is not None
    batch, groups, length, dim = like.shape
    routes = exchange.routes(groups, dk.device)
    blocks = length // exchange.block_size
    rows = _rows(torch.cat([dk, dv], dim=-1), exchange.block_size)
    own = rows.unflatten(0, (groups, exchange.slots))[:, :blocks].flatten(0, 1)
    total = torch.zeros_like(own)
    parts, targets = (), ()
    if not exchange.silent:
        received = link.all_to_all(rows[routes.receive_rows], routes.receive_counts, routes.send_counts)
        parts, targets = received.split(routes.send_counts), routes.send_rows.split(routes.send_counts)
    for rank in range(link.size):
        if rank == link.rank:
            total += own
        elif parts and parts[rank].shape[0]:
            # A row occurs once in what one rank sends, so the order of additions is that of the ranks.
            total[targets[rank]] += parts[rank]
    dkv = _unrows(total.unflatten(0, (groups, blocks)), batch, exchange.block_size)
    return dkv[..., :dim].contiguous(), dkv[..., dim:].contiguous()


def _rows(x: Tensor, block_size: int) -> Tensor:
    """[B, G, L, D] -> [G * L / block_size, B * block_size * D], a row for each block of a head."""
    return x.unflatten(2, (-1, block_size)).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)


def _unrows(rows: Tensor, batch: int, block_size: int) -> Tensor:
    """The inverse of `_rows` on [G, L / block_size, B * block_size * D]."""
    return rows.unflatten(2, (batch, block_size, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)


def _pack(k: Tensor, v: Tensor) -> Tensor:
    """One flat buffer, keys first."""
    return torch.cat([k.flatten(), v.flatten()])


def _unpack(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `_pack` along the last dimension; any leading ones stay."""
    keys, values = kv.split([k.numel(), v.numel()], dim=-1)
    return keys.unflatten(-1, k.shape), values.unflatten(-1, v.shape)


def _side_by_side(shards: Tensor) -> Tensor:
    """[cp_size, B, G, L, D] -> [B, G, cp_size * L, D]."""
    return shards.movedim(0, 2).flatten(2, 3)


def _one_by_one(x: Tensor, cp_size: int) -> Tensor:
    """The inverse of `_side_by_side`."""
    return x.unflatten(2, (cp_size, -1)).movedim(2, 0)


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    return total if total is None or part is None else total + part
