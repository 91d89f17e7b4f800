"""Attention one group of KV heads at a time, so that the queries, keys and values of one group only are alive.

Heads do not interact. So a group's q, k and v are made from the residual stream when their turn comes, and made again
in backward: a projection is cheap beside attention over a long sequence. What stays of all heads is the output and its
gradient, and the latter's place is taken over, group by group, by the gradient of the queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexcp import attention
from flexcp.comm import Link
from flexcp.headgroups import HeadGroup, _stage_of
from flexcp.kernel import Score
from flexcp.planner import Schedule

# Queries [B, H, L, D], keys and values [B, G, L, D] of some heads, by the slice of KV heads.
Project = Callable[[slice], tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class SerialAttention:
    """Attention of one mask in groups of KV heads.

    Attributes:
        schedule, link: of the plan.
        num_heads, num_kv_heads: H and G; query head h reads KV head h // (H / G).
        groups: into how many groups of KV heads the work is divided; a divisor of G.
        scale: factor on q @ k.
    Raises:
        ValueError: groups does not divide G, or the heads of the mask cannot be told apart in groups.
    """

    schedule: Schedule
    link: Link
    num_heads: int
    num_kv_heads: int
    groups: int
    scale: float

    def __post_init__(self) -> None:
        if self.groups < 1 or self.num_kv_heads % self.groups:
            raise ValueError(
                f"{self.num_kv_heads} KV heads cannot be divided into {self.groups} equal groups: choose a divisor"
            )
        kind = self.schedule.comm if self.schedule.ulysses == 1 else "ulysses"
        if self.groups > 1 and kind not in ("gather", "ring") and self.schedule.source.heads > 1:
            raise ValueError(
                f"a mask that tells heads apart cannot go head group by head group over {kind!r}: choose gather or "
                "ring, or one head group"
            )

    def forward(self, project: Project) -> tuple[Tensor, Tensor]:
        """out [B, L, H * D] in the dtype of q, and lse [B, H, L], natural logarithm, in the accumulation dtype."""
        out = lse = None
        for group, schedule in self._groups():
            q, k, v = project(group.keys)
            out_group, lse_group = attention.forward(q, k, v, schedule, Score(None), self.scale, self.link)
            if out is None or lse is None:
                out = q.new_empty(q.shape[0], q.shape[2], self.num_heads, v.shape[3])
                lse = lse_group.new_empty(q.shape[0], self.num_heads, q.shape[2])
            del q, k, v
            out[:, :, group.queries] = out_group.transpose(1, 2)
            lse[:, group.queries] = lse_group
        assert out is not None
        assert lse is not None
        return out.flatten(2), lse

    def backward(self, project: Project, out: Tensor, lse: Tensor, dout: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v of all heads, each in the layout and dtype in which `project` gives them.

        Args:
            out, lse: what `forward` returned.
            dout: gradient of out, [B, L, H * D]; it is overwritten, and its memory returned as the gradient of q where
                keys are as wide as values.
        """
        outs, douts = (_by_head(x, self.num_heads) for x in (out, dout))
        dq: Tensor | None = None
        dks, dvs = [], []
        for group, schedule in self._groups():
            q, k, v = project(group.keys)
            if dq is None:
                dq = douts if q.shape[3] == douts.shape[3] else q.new_empty(*q.shape[:1], self.num_heads, *q.shape[2:])
            heads = group.queries
            dq_group, dk, dv, _ = attention.backward(
                q,
                k,
                v,
                outs[:, heads].contiguous(),
                lse[:, heads].contiguous(),
                douts[:, heads].contiguous(),
                None,
                schedule,
                Score(None),
                self.scale,
                self.link,
            )
            del q
            dq[:, heads] = dq_group.to(dq.dtype)
            del dq_group
            dks.append(dk.to(k.dtype))
            dvs.append(dv.to(v.dtype))
            del k, v, dk, dv
        assert dq is not None
        return dq, _joined(dks), _joined(dvs)

    def _groups(self) -> list[tuple[HeadGroup, Schedule]]:
        found = []
        for i in range(self.groups):
            queries, keys = (
                slice(i * n // self.groups, (i + 1) * n // self.groups) for n in (self.num_heads, self.num_kv_heads)
            )
            schedule = self.schedule
            if self.groups > 1:
                stages = tuple(_stage_of(schedule.source, stage, queries) for stage in schedule.stages)
                schedule = replace(schedule, stages=stages, head_groups=1, groups={})
            found.append((HeadGroup(queries, keys, schedule.stages, self.groups > 1), schedule))
        return found


def _by_head(x: Tensor, num_heads: int) -> Tensor:
    """[B, L, H * D] -> [B, H, L, D], a view."""
    return x.unflatten(2, (num_heads, -1)).transpose(1, 2)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
