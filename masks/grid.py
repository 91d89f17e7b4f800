"""Grids: what a range of a flattened image or video covers, and masks that are a product over its axes.

A range of flat indices is no rectangle: it begins and ends within a row. It is a disjoint union of a few
rectangles, though (2-d: the rest of a first row, whole rows, the beginning of a last row), and for a mask
that is a product over axes, "any" and "all" of a pair of rectangles are the products of the axes' own. So
boxes of it have exact classes.

A layout lists its levels, the slowest first: each has an axis and how many steps of `stride` it counts along
it. Rows one after the other ("raster") are levels (axis 0, H, 1), (axis 1, W, 1); tiles one after the other
are levels (0, H / th, th), (1, W / tw, tw), (0, th, 1), (1, tw, 1).
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from flexcp.masks.core import Mask
from flexcp.masks.tables import scalar


class Level(NamedTuple):
    axis: int
    count: int
    stride: int


class Rectangles(NamedTuple):
    """Of each range one (maybe empty) rectangle: present [n], lo and hi [axes, n], half-open along each axis."""

    present: Tensor
    lo: Tensor
    hi: Tensor


def raster(shape: tuple[int, ...]) -> tuple[Level, ...]:
    """Rows one after the other."""
    return tuple(Level(axis, count, 1) for axis, count in enumerate(shape))


def tiled(shape: tuple[int, ...], tile: tuple[int, ...]) -> tuple[Level, ...]:
    """Tiles one after the other, each in raster order."""
    outer = tuple(Level(axis, count // size, size) for axis, (count, size) in enumerate(zip(shape, tile)))
    return outer + raster(tile)


def rectangles(levels: tuple[Level, ...], lo: Tensor, hi: Tensor) -> list[Rectangles]:
    """The rectangles that the flat ranges [lo, hi) consist of: int64 [n], within the grid."""
    num_axes = 1 + max(level.axis for level in levels)
    origin = lo.new_zeros(num_axes, lo.numel())
    found: list[Rectangles] = []
    _split(levels, lo, hi, torch.ones_like(lo, dtype=torch.bool), origin, found)
    merged: list[Rectangles] = []
    for part in found:  # rectangles that no range has both of share a place: fewer pairs to look at
        for place, other in enumerate(merged):
            if not bool((part.present & other.present).any()):
                lo_hi = (torch.where(part.present, part[i], other[i]) for i in (1, 2))
                merged[place] = Rectangles(part.present | other.present, *lo_hi)
                break
        else:
            merged.append(part)
    return merged


def _split(levels, lo, hi, present, origin, found) -> None:
    """Splits ranges of the grid below `levels`, whose corner lies at `origin`, into first, whole and last steps."""
    level, inner = levels[0], levels[1:]
    size = prod(each.count for each in inner)
    first, last = lo // size, (hi - 1) // size
    starts_whole, ends_whole = lo == first * size, hi == (last + 1) * size
    whole_lo = torch.where(starts_whole, first, first + 1)
    whole_hi = torch.where(ends_whole, last + 1, last)
    corner, opposite = origin.clone(), origin.clone()
    corner[level.axis] += whole_lo * level.stride
    opposite[level.axis] += whole_hi * level.stride
    for axis in range(origin.shape[0]):  # below a whole step, the other axes are covered in full
        spans = [each.count * each.stride for each in inner if each.axis == axis]
        if axis != level.axis:
            opposite[axis] += max(spans, default=1)
    whole = present & (whole_lo < whole_hi)
    if bool(whole.any()):
        found.append(Rectangles(whole, corner, opposite))
    if not inner:
        return
    for step, mine in (
        (first, present & ~starts_whole),
        (last, present & ~ends_whole & ((last > first) | starts_whole)),
    ):
        if bool(mine.any()):
            at = origin.clone()
            at[level.axis] += step * level.stride
            inside_lo = (lo - step * size).clamp(0, size - 1)
            inside_hi = torch.maximum((hi - step * size).clamp(max=size), inside_lo + 1)
            _split(inner, inside_lo, inside_hi, mine, at, found)


class GridMask(Mask):
    """A mask on a grid, visible where it is visible along each axis.

    A subclass says what one axis shows: `axis_visible` of coordinates, and `window`: the first and one past
    the last key that a query at a coordinate sees. The window must move forward with the query and never jump
    over a key.
    """

    def __init__(self, shape: tuple[int, ...], levels: tuple[Level, ...]):
        self.shape, self.levels = shape, levels
        self.seq_len = prod(shape)
        sizes = [prod(each.count for each in levels[i + 1 :]) for i in range(len(levels))]
        self._sizes = tuple(scalar(size) for size in sizes)
        self._counts = tuple(scalar(level.count) for level in levels)
        self._strides = tuple(scalar(level.stride) for level in levels)
        self._axes = tuple(level.axis for level in levels)

    def coordinates(self, index: Tensor) -> list[Tensor]:
        """The coordinate along each axis of a flat index."""
        result: list = [None] * len(self.shape)
        for axis, size, count, stride in zip(self._axes, self._sizes, self._counts, self._strides):
            step = (index // size) % count * stride
            result[axis] = step if result[axis] is None else result[axis] + step
        return result

    def axis_visible(self, axis: int, q: Tensor, kv: Tensor) -> Tensor:
        raise NotImplementedError

    def window(self, axis: int, q: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def __call__(self, b, h, q_idx, kv_idx):
        q, kv = self.coordinates(q_idx), self.coordinates(kv_idx)
        visible = self.axis_visible(0, q[0], kv[0])
        for axis in range(1, len(self.shape)):
            visible = visible & self.axis_visible(axis, q[axis], kv[axis])
        return visible

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        q_parts = rectangles(self.levels, q_lo, q_hi.clamp(max=self.seq_len))
        kv_parts = rectangles(self.levels, kv_lo, kv_hi.clamp(max=self.seq_len))
        some = torch.zeros(q_lo.numel(), kv_lo.numel(), dtype=torch.bool, device=q_lo.device)
        every = ~some
        for part in q_parts:
            # Along an axis, queries [lo, hi) see together the keys from the first's window to the last's, and
            # all of them see those from the last's window to the first's.
            windows = [(*self.window(a, part.lo[a]), *self.window(a, part.hi[a] - 1)) for a in range(len(self.shape))]
            for keys in kv_parts:
                both = part.present[:, None] & keys.present
                reached, covered = both.clone(), both.clone()
                for axis, (first_lo, first_hi, last_lo, last_hi) in enumerate(windows):
                    lo, hi = keys.lo[axis], keys.hi[axis]
                    reached &= (first_lo[:, None] < hi) & (last_hi[:, None] > lo)
                    covered &= (last_lo[:, None] <= lo) & (first_hi[:, None] >= hi)
                some |= reached
                every &= covered | ~both
        return some, every
