"""sliding_tile: neighborhood attention between tiles, so that no block of the kernel is cut."""

from __future__ import annotations

import torch

from flexcp.masks.checks import axes, divides, flag
from flexcp.masks.core import Mask
from flexcp.masks.grid import GridMask, raster, tiled
from flexcp.masks.tables import scalar


class SlidingTile(GridMask):
    def __init__(self, shape, kernel, tile, in_tiles):
        super().__init__(shape, tiled(shape, tile) if in_tiles else raster(shape))
        self.kernel, self.tile, self.in_tiles = kernel, tile, in_tiles
        self._tile = tuple(scalar(size) for size in tile)
        self._reach = tuple(scalar(size // each) for size, each in zip(kernel, tile))  # in tiles
        self._before = tuple(scalar(size // each // 2) for size, each in zip(kernel, tile))
        self._latest = tuple(scalar((n - size) // each) for n, size, each in zip(shape, kernel, tile))

    def axis_visible(self, axis, q, kv):
        start = (q // self._tile[axis] - self._before[axis]).clamp(min=0)
        start = torch.minimum(start, self._latest[axis])
        tile = kv // self._tile[axis]
        return (tile >= start) & (tile < start + self._reach[axis])

    def window(self, axis, q):
        tile, size = self.tile[axis], self.kernel[axis]
        start = (q // tile - size // tile // 2).clamp(0, (self.shape[axis] - size) // tile) * tile
        return start, start + size

    def __repr__(self) -> str:
        order = "" if self.in_tiles else ", in_tiles=False"
        return f"sliding_tile({self.shape}, {self.kernel}, {self.tile}{order})"


def sliding_tile(
    shape: tuple[int, ...], kernel: tuple[int, ...], tile: tuple[int, ...], *, in_tiles: bool = True
) -> Mask:
    """All queries of a tile see the same window of whole tiles around it; at the borders the window moves
    inwards.

        shape (1, 8), kernel (1, 4), tile (1, 2)
        kv 0 1 2 3 4 5 6 7
      q 0  # # # #
        1  # # # #
        2  # # # #
        3  # # # #
        4      # # # #
        5      # # # #
        6          # # # #
        7          # # # #

    Args:
        shape: the grid, slowest axis first: (height, width) or (time, height, width), in tokens.
        kernel: window along each axis, in tokens, a multiple of the tile and at most the grid's.
        tile: in tokens, divides the grid. A tile whose size is a multiple of the attention block leaves no
            partial block.
        in_tiles: tokens are in tile order, one tile after the other, as the paper wants them; False: row by
            row.

    Returns:
        A Mask for sequences of exactly prod(shape) tokens. Its classes are exact.

    Raises:
        ValueError: the numbers of axes differ, the tile does not divide grid and kernel, or the kernel
        exceeds the grid.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.sliding_tile((1, 8), (1, 4), (1, 2))(0, 0, torch.tensor(7), torch.arange(8)).int().tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]

    Source: Zhang et al. 2025, "Fast Video Generation with Sliding Tile Attention", 3.
    """
    shape = axes("sliding_tile", "shape", shape)
    kernel = axes("sliding_tile", "kernel", kernel, len(shape))
    divides("sliding_tile", "tile", tile, "shape", shape)
    tile = divides("sliding_tile", "tile", tile, "kernel", kernel)
    if any(size > count for size, count in zip(kernel, shape)):
        raise ValueError(
            f"sliding_tile: kernel {kernel} exceeds the grid {shape} along an axis; make it at most as large."
        )
    return SlidingTile(shape, kernel, tile, flag("sliding_tile", "in_tiles", in_tiles))
