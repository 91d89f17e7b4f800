"""draw: a mask as a picture of its block classes, for a terminal (text) and for a page (SVG, PNG)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexcp.masks.checks import quantity
from flexcp.masks.core import Mask, MaskMod, lift
from flexcp.masks.picture import paths, png, rank_color
from flexcp.masks.refine import classify

EMPTY, PARTIAL, FULL = 0, 1, 2
_LETTERS = ".+#"
_COLORS = ("#eeeeee", "#8fb8de", "#1f4e79")
_NAMES = ("empty", "partial", "full")
_MOST_CELLS = 64  # along an axis, unless block_size says otherwise
_REFINE_UP_TO = 8192  # tokens: below, undecided cells cost little to evaluate pair by pair


@dataclass(frozen=True)
class Drawing:
    """Block classes, ready to print. `str()` is the text; `svg()`, `png()` and `save()` are pictures.

    Attributes:
        title: the mask's expression.
        classes: uint8 [nQ, nK]: 0 empty, 1 partial, 2 full.
        block_size: tokens in a cell, along both axes.
        seq_len: S, in tokens.
        owners: with a plan, the rank that owns each row of cells: int64 [nQ].
        received: with a plan, bool [cp, nK]: does the rank need these keys without owning them.
    """

    title: str
    classes: Tensor
    block_size: int
    seq_len: int
    owners: Tensor | None = None
    received: Tensor | None = None

    def __str__(self) -> str:
        margin = [""] * len(self.classes)
        if self.owners is not None:
            margin = [f"rank {rank:<3} " for rank in self.owners.tolist()]
        head = f"{self.title}: {self.seq_len} tokens in blocks of {self.block_size}"
        body = [side + "".join(_LETTERS[cell] for cell in row) for side, row in zip(margin, self.classes.tolist())]
        lines = [head, *body, self.legend()]
        if self.received is not None:
            lines.append("keys that each rank owns (o), receives (r), does not need (.)")
            for rank, row in enumerate(self._keys()):
                share = self.received[rank].float().mean().item()
                lines.append(f"rank {rank:<3} {''.join('.or'[state] for state in row)} receives {share:.0%}")
        return "\n".join(lines)

    def legend(self) -> str:
        """What the letters mean, with how many blocks there are of each."""
        counts = torch.bincount(self.classes.flatten().long(), minlength=3).tolist()
        return ", ".join(f"{_LETTERS[c]} {_NAMES[c]} {counts[c]}" for c in (FULL, PARTIAL, EMPTY))

    def svg(self, cell: int = 6) -> str:
        """The picture as SVG text.

        Args:
            cell: side of a block, in pixels.
        """
        num_q, num_k = self.classes.shape
        left = 10 if self.owners is not None else 0
        ranks = 0 if self.received is None else len(self.received)
        width, height = left + num_k * cell, num_q * cell + (ranks * (cell + 2) + 6 if ranks else 0)
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" shape-rendering="crispEdges">',
            f"<title>{_escape(self.title)}</title>",
        ]
        grid = self.classes.tolist()
        parts += [f'<path fill="{_COLORS[c]}" d="{paths(grid, c, cell, left, 0)}"/>' for c in (EMPTY, PARTIAL, FULL)]
        if self.owners is not None:
            for row, rank in enumerate(self.owners.tolist()):
                parts.append(f'<rect x="0" y="{row * cell}" width="8" height="{cell}" fill="{rank_color(rank)}"/>')
        for rank, row in enumerate(self._keys()):
            top = num_q * cell + 6 + rank * (cell + 2)
            for state, opacity in ((0, 0.12), (2, 0.5), (1, 1.0)):
                path = paths([row], state, cell, left, top)
                parts.append(f'<path fill="{rank_color(rank)}" fill-opacity="{opacity}" d="{path}"/>')
        return "\n".join([*parts, "</svg>"]) + "\n"

    def png(self, cell: int = 6) -> bytes:
        """The block classes as a PNG file's bytes, with the owners' colors at the left."""
        colors = torch.tensor([_rgb(color) for color in _COLORS], dtype=torch.uint8)
        image = colors[self.classes.long()].repeat_interleave(cell, 0).repeat_interleave(cell, 1)
        if self.owners is not None:
            strip = torch.tensor([_rgb(rank_color(rank)) for rank in self.owners.tolist()], dtype=torch.uint8)
            image = torch.cat([strip[:, None].expand(-1, 8, -1).repeat_interleave(cell, 0), image], 1)
        return png(image)

    def save(self, path: str | Path, cell: int = 6) -> None:
        """Writes the picture; the ending says how: .svg, .png or .txt.

        Raises:
            ValueError: another ending.
        """
        path = Path(path)
        if path.suffix == ".svg":
            path.write_text(self.svg(cell))
        elif path.suffix == ".png":
            path.write_bytes(self.png(cell))
        elif path.suffix == ".txt":
            path.write_text(str(self) + "\n")
        else:
            raise ValueError(f"A drawing is saved as .svg, .png or .txt, got {path.name!r}.")

    def _keys(self) -> list[list[int]]:
        """For each rank and column: 0 not needed, 1 owned, 2 received."""
        if self.received is None or self.owners is None:
            return []
        owned = self.owners == torch.arange(len(self.received))[:, None]
        return torch.where(owned, 1, self.received * 2).tolist()


def draw(
    mask: Mask | MaskMod,
    seq_len: int,
    plan: Any = None,
    *,
    block_size: int | None = None,
    batch: int = 0,
    head: int = 0,
) -> Drawing:
    """A picture of which blocks are full, partial and empty.

    Args:
        mask: a mask or plain function.
        seq_len: S, in tokens.
        plan: a flexcp Plan for the same sequence, or its layout: also the owner of each row, and for each rank the keys
            that the mask makes it receive.
        block_size: tokens in a cell; None: the smallest that leaves at most 64 cells along an axis.
        batch, head: which row of the batch and which head, where the mask distinguishes them.

    Returns:
        A Drawing: print it, or take its .svg(), .png() or .save(path).

    Raises:
        ValueError: seq_len or block_size is not a positive int, the plan has another length, or the mask has fewer
            batch rows or heads.

    Example:
        >>> from flexcp import masks
        >>> print(masks.draw(masks.sliding_window(3), 16, block_size=4))
        sliding_window(3): 16 tokens in blocks of 4
        +...
        ++..
        .++.
        ..++
        # full 0, + partial 7, . empty 9

    Source: none.
    """
    mask = lift(mask)
    quantity("draw", "seq_len", seq_len)
    for what, index, size in (("batch", batch, mask.batch), ("head", head, mask.heads)):
        if not 0 <= index < (size or index + 1):
            raise ValueError(f"draw: {what}={index} is out of range, {mask!r} distinguishes {size}.")
    layout = getattr(plan, "layout", plan)
    if layout is not None and layout.seq_len != seq_len:
        raise ValueError(f"draw: the plan is for {layout.seq_len} tokens, not {seq_len}; pass the plan's own length.")
    if block_size is None:
        block_size = _cell(seq_len, None if layout is None else layout.chunk_size)
    quantity("draw", "block_size", block_size)
    lo = torch.arange(0, seq_len, block_size)
    hi = (lo + block_size).clamp(max=seq_len)
    some, every = classify(mask.to("cpu"), lo, hi, lo, hi, refine=seq_len <= _REFINE_UP_TO)
    some, every = (answer[batch if mask.batch else 0, head if mask.heads else 0] for answer in (some, every))
    classes = some.to(torch.uint8) + every.to(torch.uint8)
    if layout is None:
        return Drawing(repr(mask), classes, block_size, seq_len)
    if layout.chunk_size % block_size:
        raise ValueError(f"draw: block_size {block_size} must divide the plan's chunks of {layout.chunk_size} tokens.")
    owners = _owners(layout)[lo]
    mine = owners == torch.arange(layout.cp_size)[:, None]  # [cp, n]
    needed = (mine[:, :, None] & some).any(1)
    return Drawing(repr(mask), classes, block_size, seq_len, owners, needed & ~mine)


def _owners(layout: Any) -> Tensor:
    """The rank that owns each token of the padded sequence."""
    owners = torch.empty(layout.padded_len, dtype=torch.int64)
    for rank in range(layout.cp_size):
        owners[layout.positions(rank).cpu()] = rank
    return owners


def _cell(seq_len: int, chunk_size: int | None) -> int:
    """The smallest cell with at most 64 along an axis, within chunks where there are any."""
    least = -(-seq_len // _MOST_CELLS)
    if chunk_size is None:
        return least
    return next((size for size in range(least, chunk_size) if chunk_size % size == 0), chunk_size)


def _rgb(color: str) -> list[int]:
    return [int(color[at : at + 2], 16) for at in (1, 3, 5)]


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
