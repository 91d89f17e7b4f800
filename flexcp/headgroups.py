"""Attention in groups of KV heads, so that the keys of the next group arrive while this one is computed.

Groups do not interact: nothing is merged and no number changes. Masks and scores keep seeing global head numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flexcp.blockmask import block_classes, local_block_mask
from flexcp.blocksource import BlockSource
from flexcp.heads import SomeHeads
from flexcp.kernel import Score
from flexcp.planner import Schedule, Stage


@dataclass(frozen=True)
class HeadGroup:
    """Some KV heads with their query heads.

    Attributes:
        queries, keys: the query and the KV heads.
        stages: the schedule's, for these heads alone.
        divided: there are other groups; False: these are all heads.
    """

    queries: slice
    keys: slice
    stages: tuple[Stage, ...]
    divided: bool = False

    def score(self, score: Score) -> Score:
        """The same score for tensors that hold only this group's heads."""
        return shifted_score(score, self.queries.start, self.stages[0].q_start.device) if self.divided else score


def shifted_score(score: Score, first: int, device: torch.device) -> Score:
    """The same score for tensors that hold the heads from `first` on only."""
    if score.function is None:
        return score
    function = score.function

    def shifted(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, *buffers: Any) -> Tensor:
        # The offset is a tensor, 0 too: as a number it would make every group a program of its own.
        return function(s, b, h + buffers[-1], q, kv, *buffers[:-1])

    shifted.code = "of some heads", score.identity  # one program for all groups and calls
    offset = torch.tensor(first, dtype=torch.int32, device=device)
    without = (False,) * (len(score.buffers) + 1 - len(score.needs_grad))
    return Score(shifted, (*score.buffers, offset), (*score.needs_grad, *without))


def head_groups(schedule: Schedule, num_heads: int, num_kv_heads: int) -> list[HeadGroup]:
    """The groups of a schedule whose keys all arrive at once; kept with it, since every layer asks."""
    groups = math.gcd(schedule.head_groups, num_kv_heads)
    if groups == 1:
        return [HeadGroup(slice(0, num_heads), slice(0, num_kv_heads), schedule.stages)]
    key = num_heads, num_kv_heads
    if key not in schedule.groups:
        schedule.groups[key] = _make(schedule, num_heads, num_kv_heads, groups)
    return schedule.groups[key]


def _make(schedule: Schedule, num_heads: int, num_kv_heads: int, groups: int) -> list[HeadGroup]:
    made = []
    for i in range(groups):
        queries, keys = (slice(i * n // groups, (i + 1) * n // groups) for n in (num_heads, num_kv_heads))
        stages = tuple(_stage_of(schedule.source, stage, queries) for stage in schedule.stages)
        made.append(HeadGroup(queries, keys, stages, divided=True))
    return made


def _stage_of(source: BlockSource, stage: Stage, queries: slice) -> Stage:
    if source.heads == 1 or stage.block_mask is None:
        return stage
    some = SomeHeads(source, queries.start, queries.stop)
    classes = block_classes(stage.block_mask)[:, queries]
    return replace(
        stage,
        block_mask=local_block_mask(classes, some.block_size, some.local_mask_mod(stage.q_start, stage.kv_start)),
        mask_mod=some.global_mask_mod(stage.q_start.device),
    )
