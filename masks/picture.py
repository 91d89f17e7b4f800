"""Pictures without a picture library: SVG paths and PNG bytes."""

from __future__ import annotations

import colorsys
import struct
import zlib

from torch import Tensor


def paths(grid: list[list[int]], value: int, cell: int, left: int, top: int) -> str:
    """An SVG path over the cells that hold `value`, one rectangle for each horizontal run."""
    parts = []
    for row, cells in enumerate(grid):
        start = None
        for column, here in enumerate([*cells, None]):
            if here == value and start is None:
                start = column
            elif here != value and start is not None:
                width = (column - start) * cell
                parts.append(f"M{left + start * cell} {top + row * cell}h{width}v{cell}h-{width}z")
                start = None
    return "".join(parts)


def rank_color(rank: int) -> str:
    """A color for each rank, told apart by steps of the golden ratio around the color wheel."""
    red, green, blue = colorsys.hsv_to_rgb((0.05 + rank * 0.618034) % 1, 0.75, 0.85)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def png(image: Tensor) -> bytes:
    """A PNG file's bytes of an image, uint8 [height, width, 3]."""
    height, width = image.shape[:2]
    lines = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in image)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
