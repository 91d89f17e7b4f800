"""The executor: walks a schedule's stages, communicates for the next while it computes this one, and merges.

Keys and values of a rank travel in one buffer. Results accumulate in fp32 (fp64 for fp64 inputs), in the order of the
stages, so that a run repeats bit for bit.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flexcp import kernel
from flexcp.comm import Link, Pending
from flexcp.headgroups import HeadGroup, head_groups
from flexcp.kernel import Score
from flexcp.merge import merge
from flexcp.movement import ExchangedGradients, Exchanging, GatheredGradients, Gathering, pack, unpack
from flexcp.planner import Schedule, Stage
from flexcp.ulysses import Switch


def forward(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, score: Score, scale: float, link: Link
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the whole sequence.

    Args:
        q: [B, H, L, D]; k: [B, G, L, D]; v: [B, G, L, Dv], this rank's shards.
    Returns:
        out [B, H, L, Dv] and lse [B, H, L], natural logarithm, in the accumulation dtype.
    """
    switch = Switch(schedule, q, k, link)
    return switch.to_rows(*_walk(*switch.to_heads([q], [k, v]), schedule, switch.score(score), scale, switch.link))


def _walk(
    q: Tensor, k: Tensor, v: Tensor, schedule: Schedule, score: Score, scale: float, link: Link
) -> tuple[Tensor, Tensor]:
    """`forward`, with the heads and rows that this rank computes with."""
    done: dict[int, tuple[Tensor, Tensor]] = {}  # by the first query head of the group
    for group, stage, k_stage, v_stage in _arrivals(schedule, q, k, v, link):
        first = group.queries.start
        if stage.block_mask is not None:
            partial = kernel.forward(q[:, group.queries], k_stage, v_stage, stage, group.score(score), scale)
            done[first] = merge(*done[first], *partial) if first in done else partial
            del partial  # or it would stay until the next one
        del k_stage, v_stage
    if not done:
        dtype = kernel.accumulation_dtype(q.dtype)
        out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
        return out, q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
    outs, lses = zip(*done.values())
    return _joined(outs, dim=1), _joined(lses, dim=1)


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
        dq, dk, dv in the accumulation dtype, or as the kernel rounded them where nothing was added, and per buffer a
        gradient or None.
    """
    dtype = kernel.accumulation_dtype(q.dtype)
    switch = Switch(schedule, q, k, link)
    q, out, lse, dout, dlse, k, v = switch.to_heads([q, out, lse, dout, dlse], [k, v])
    score_here = switch.score(score)
    dq: dict[int, Tensor] = {}  # by the first query head of the group
    # A rank whose queries see nothing still has a gradient, 0: the ranks may be about to sum it.
    dbuffers = [
        torch.zeros_like(x, dtype=dtype) if needed else None for x, needed in zip(score.buffers, score.needs_grad)
    ]
    keys = _KeyGradients(schedule, k, v, dtype, switch.link)
    for group, stage, k_stage, v_stage in _arrivals(schedule, q, k, v, switch.link):
        dkv: list[Tensor] = []
        if stage.block_mask is not None:
            heads = group.queries
            dlse_group = None if dlse is None else dlse[:, heads]
            dq_stage, *dkv, dbuffers_stage = kernel.backward(
                q[:, heads],
                k_stage,
                v_stage,
                out[:, heads],
                lse[:, heads],
                dout[:, heads],
                dlse_group,
                stage,
                group.score(score_here),
                scale,
            )
            first = heads.start
            dq[first] = dq[first].to(dtype).add_(dq_stage) if first in dq else dq_stage
            dbuffers = [_plus(total, part) for total, part in zip(dbuffers, dbuffers_stage)]
            del dq_stage, dbuffers_stage
        del k_stage, v_stage  # before gradients are packed
        keys.send_home(group, stage, dkv)
    dq_whole = _joined(list(dq.values()), dim=1) if dq else torch.zeros_like(q)
    del q, k, v, out, lse, dout, dlse, dq
    return *switch.to_row_gradients(dq_whole, *keys.collect()), dbuffers


def _arrivals(
    schedule: Schedule, q: Tensor, k: Tensor, v: Tensor, link: Link
) -> Iterator[tuple[HeadGroup, Stage, Tensor, Tensor]]:
    """Each stage with its keys and values; those of the next are on their way while the caller computes.

    The caller drops its references before it asks for the next stage, or three shards would be alive at once.
    """
    if link.size == 1:
        yield _whole(schedule.stages[0], q, k), schedule.stages[0], k, v
    elif schedule.comm == "ring":
        own = pack(k, v)

        def start(stage: Stage) -> Pending:
            return link.shift(own, stage.send_to, own, stage.receive_from)

        pending = start(schedule.stages[0])
        for stage, following in zip(schedule.stages, (*schedule.stages[1:], None)):
            received = pending.wait()
            if following is not None:
                pending = start(following)
            arrived = (k, v) if received is None else unpack(received, k.shape, v.shape)
            yield _whole(stage, q, k), stage, *arrived
            del received, arrived
    else:
        kind = Gathering if schedule.comm == "gather" else Exchanging
        groups = head_groups(schedule, q.shape[1], k.shape[1])
        moving = kind(groups[0], k, v, link)
        for group, following in zip(groups, (*groups[1:], None)):
            arrived = moving.wait()
            if following is not None:
                moving = kind(following, k, v, link)
            for stage in group.stages:
                yield group, stage, *arrived.pop(0)


def _whole(stage: Stage, q: Tensor, k: Tensor) -> HeadGroup:
    return HeadGroup(slice(0, q.shape[1]), slice(0, k.shape[1]), (stage,))


class _KeyGradients:
    """Brings the gradient of keys and values home to the rank that owns them, and adds them up there."""

    def __init__(self, schedule: Schedule, k: Tensor, v: Tensor, dtype: torch.dtype, link: Link) -> None:
        self.comm, self.dtype, self.link = schedule.comm, dtype, link
        self.k_shape, self.v_shape, self.device = k.shape, v.shape, k.device
        self.moved_dtype = kernel.gradient_dtype(k)
        self.total: tuple[Tensor, Tensor] | None = None
        self.parts: list[list[Tensor]] = []  # of the group's stages so far
        self.pending: Pending | None = None
        self.moving: tuple[HeadGroup, GatheredGradients | ExchangedGradients] | None = None

    def send_home(self, group: HeadGroup, stage: Stage, dkv: list[Tensor]) -> None:
        """Hands over one stage's dk and dv, by kernel layout of that stage; none where it computed nothing.

        The list is emptied: the caller's references would keep them alive beside what is packed and what arrives.
        """
        self._settle()
        if self.link.size == 1 or (self.comm == "ring" and stage.sources == (self.link.rank,)):
            if dkv:
                self._add(group.keys, *dkv)
                dkv.clear()
        elif self.comm == "ring":
            # The reverse of the way the keys came: back to their owner, and this rank's own back from its reader.
            packed = pack(*dkv) if dkv else None
            dkv.clear()
            one = torch.empty(1, dtype=self.moved_dtype, device=self.device)
            like = one.expand(self.k_shape.numel() + self.v_shape.numel())  # says how large, and takes no memory
            self.pending = self.link.shift(packed, stage.receive_from, like, stage.send_to)
        else:
            self.parts.append(dkv.copy())
            dkv.clear()
            if stage is not group.stages[-1]:
                return
            whole = [_joined(parts, dim=2) for parts in zip(*self.parts)]
            self.parts = []
            if self.comm == "exchange":
                self.moving = group, ExchangedGradients(group, whole, self.k_shape, self.link)
            else:
                self.moving = group, GatheredGradients(whole, self.link)

    def collect(self) -> tuple[Tensor, Tensor]:
        self._settle()
        return self._zeros() if self.total is None else self.total

    def _settle(self) -> None:
        received = self.pending.wait() if self.pending is not None else None
        self.pending = None
        if received is not None:
            self.total = self.total or self._zeros()  # or the buffer that the part came in would stay alive
            self._add(slice(0, self.k_shape[1]), *unpack(received, self.k_shape, self.v_shape))
        if self.moving is not None:
            group, moving = self.moving
            self.moving = None
            self._add(group.keys, *moving.wait())

    def _add(self, heads: slice, dk: Tensor, dv: Tensor) -> None:
        if self.total is None and dk.shape[1] == self.k_shape[1]:
            self.total = dk, dv  # what nothing is added to stays as it came, and costs no launch
            return
        dk_total, dv_total = (x.to(self.dtype) for x in self.total or self._zeros())
        dk_total[:, heads] += dk
        dv_total[:, heads] += dv
        self.total = dk_total, dv_total

    def _zeros(self) -> tuple[Tensor, Tensor]:
        dk, dv = (torch.zeros(x, dtype=self.dtype, device=self.device) for x in (self.k_shape, self.v_shape))
        return dk, dv


def _joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(tuple(parts), dim) if len(parts) > 1 else parts[0]


def _plus(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    return total if total is None or part is None else total + part
