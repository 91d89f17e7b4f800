"""natten: neighborhood attention on a line, an image or a video."""

from __future__ import annotations

import torch

from flexcp.masks.checks import axes, divides, per_axis_flags
from flexcp.masks.core import Mask
from flexcp.masks.grid import GridMask, raster, tiled
from flexcp.masks.tables import scalar


class Natten(GridMask):
    def __init__(self, shape, kernel, causal, tile):
        super().__init__(shape, raster(shape) if tile is None else tiled(shape, tile))
        self.kernel, self.causal, self.tile = kernel, causal, tile
        self._before = tuple(scalar(size - 1 if c else size // 2) for size, c in zip(kernel, causal))
        self._kernel = tuple(scalar(size) for size in kernel)
        self._latest = tuple(scalar(count - size) for count, size in zip(shape, kernel))

    def axis_visible(self, axis, q, kv):
        start = (q - self._before[axis]).clamp(min=0)
        if self.causal[axis]:
            return (kv >= start) & (kv <= q)
        start = torch.minimum(start, self._latest[axis])
        return (kv >= start) & (kv < start + self._kernel[axis])

    def window(self, axis, q):
        size = self.kernel[axis]
        if self.causal[axis]:
            return (q - size + 1).clamp(min=0), q + 1
        start = (q - size // 2).clamp(0, self.shape[axis] - size)
        return start, start + size

    def __repr__(self) -> str:
        causal = f", causal={self.causal}" if any(self.causal) else ""
        tile = f", tile={self.tile}" if self.tile else ""
        return f"natten({self.shape}, {self.kernel}{causal}{tile})"


def natten(
    shape: int | tuple[int, ...],
    kernel: int | tuple[int, ...],
    *,
    causal: bool | tuple[bool, ...] = False,
    tile: tuple[int, ...] | None = None,
) -> Mask:
    """Each query sees the `kernel` nearest keys along each axis; at the borders the window moves inwards, not
    out.

        shape (1, 5), kernel (1, 3)
        kv 0 1 2 3 4
      q 0  # # #
        1  # # #
        2    # # #
        3      # # #
        4      # # #

    Args:
        shape: the grid, slowest axis first: length, (height, width) or (time, height, width), in tokens. A 16
            x 4 grid has 16 rows of 4 tokens.
        kernel: window along each axis, in tokens, at most the grid's. Of an even kernel the larger half lies
            before.
        causal: along all axes or for each: the window ends at the query and is cut at the border.
        tile: tokens are in tiles of this size, one tile after the other; None: row by row.

    Returns:
        A Mask for sequences of exactly prod(shape) tokens. Its classes are exact.

    Raises:
        ValueError: shape has more than 3 axes, the numbers of axes differ, a kernel exceeds the grid, or a
            tile does not divide it.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.natten((16, 4), (3, 3))(0, 0, torch.tensor(0), torch.arange(12)).int().tolist()
        [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0]

    Source: Hassani et al. 2023, "Neighborhood Attention Transformer", 3.1; Hassani et al. 2025, "Generalized
    Neighborhood Attention", for even kernels and causal axes.
    """
    shape = axes("natten", "shape", shape)
    kernel = axes("natten", "kernel", kernel, len(shape))
    if any(size > count for size, count in zip(kernel, shape)):
        raise ValueError(f"natten: kernel {kernel} exceeds the grid {shape} along an axis; make it at most as large.")
    tile = None if tile is None else divides("natten", "tile", tile, "shape", shape)
    return Natten(shape, kernel, per_axis_flags("natten", "causal", causal, len(shape)), tile)
