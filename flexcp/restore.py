"""Fills tensors from a checkpoint's files: each rank reads the slices that overlap with what it holds.

Where a rank holds just the piece that was written, the bits come back. Where the sharding has changed, plain tensors
come back bit for bit too; 8-bit states whose blocks were cut differently are decoded and encoded anew.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flexcp.errors import UserError
from flexcp.manifest import Manifest, Piece, key
from flexcp.models.errors import CheckpointError
from flexcp.models.safetensors_in import read_header
from flexcp.shards import WHOLE, Box, Encoding, box_of, local_of, parts_of


@dataclass(frozen=True)
class _Target:
    """A tensor to be filled: this rank's part of it, and which part that is."""

    name: str
    local: Tensor
    box: Box
    encoding: Encoding | None


@torch.no_grad()
def fill(folder: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    """Overwrites tensors, in place, with those of a checkpoint.

    Args:
        tensors: by the names under which they were saved; plain, DTensors of any mesh and placement, or subclasses.

    Raises:
        UserError: names, shapes or dtypes that are not the checkpoint's, or a file that is damaged.
    """
    _require_same(folder, manifest, tensors)
    todo: dict[str, list[tuple[_Target, Piece, Tensor | None]]] = {}
    floats: list[tuple[_Target, Tensor]] = []
    for name, tensor in tensors.items():
        local = local_of(tensor)
        target = _Target(name, local, box_of(tensor), Encoding.of(local))
        if target.box.numel == 0:
            continue
        pieces = [piece for piece in manifest.tensors[name].pieces if piece.box.meet(target.box) is not None]
        exact = next((p for p in pieces if p.box == target.box and p.encoding == target.encoding), None)
        if exact is not None:
            todo.setdefault(exact.file, []).append((target, exact, None))
            continue
        values = local
        if target.encoding is not None:
            values = torch.empty(target.box.shape, dtype=torch.float32, device=local.device)
            floats.append((target, values))
        if sum(p.box.meet(target.box).numel for p in pieces) != target.box.numel:
            raise UserError(f"{folder}: the pieces of {name} do not cover {target.box}: the manifest is damaged")
        for piece in pieces:
            todo.setdefault(piece.file, []).append((target, piece, values))
    for file, jobs in todo.items():
        _read_file(folder / file, jobs)
    for target, values in floats:
        target.local.copy_(values)


def _require_same(folder: Path, manifest: Manifest, tensors: dict[str, Tensor]) -> None:
    for name in (*tensors, *manifest.tensors):
        if name not in manifest.tensors:
            raise UserError(f"{folder} has no tensor {name!r}, which this run needs: resume with the run's settings")
        if name not in tensors:
            raise UserError(f"{folder} has a tensor {name!r}, and this run has none: resume with the run's settings")
        entry, tensor = manifest.tensors[name], tensors[name]
        mine, its = (str(tensor.dtype), tuple(tensor.shape)), (entry.dtype, entry.shape)
        # Encoded, a tensor's dtype is what it pretends to be; whether it is encoded depends on how it is divided.
        encoded = any(piece.encoding for piece in entry.pieces) or Encoding.of(local_of(tensor)) is not None
        if mine[1] != its[1] or (mine[0] != its[0] and not encoded):
            raise UserError(
                f"{folder}: tensor {name!r} is {its[0].removeprefix('torch.')} {list(its[1])}, and this run's is "
                f"{mine[0].removeprefix('torch.')} {list(mine[1])}: resume with the run's settings"
            )


def _read_file(path: Path, jobs: list[tuple[_Target, Piece, Tensor | None]]) -> None:
    try:
        known = read_header(path)
        with safe_open(path, framework="pt") as file:

            def read(name: str, shape: tuple[int, ...] | None = None, place: tuple[slice, ...] = ()) -> Tensor:
                if name not in known or (shape is not None and known[name].shape != shape):
                    raise UserError(f"{path} does not hold tensor {name!r} {list(shape or ())}: it is damaged")
                return file.get_slice(name)[place] if place else file.get_tensor(name)

            for target, piece, values in jobs:
                if values is None:
                    for part, tensor in parts_of(target.local):
                        tensor.copy_(read(key(target.name, part), tuple(tensor.shape)))
                    continue
                both = piece.box.meet(target.box)
                assert both is not None
                if piece.encoding is None:
                    found = read(key(target.name, WHOLE), piece.box.shape, both.slices(piece.box))
                else:
                    parts = {part: read(key(target.name, part)) for part in piece.parts}
                    found = piece.encoding.decode(parts)[both.slices(piece.box)]
                values[both.slices(target.box)].copy_(found)
    except (CheckpointError, SafetensorError, OSError) as error:
        text = str(error)
        raise UserError(text if str(path) in text else f"{path} cannot be read ({text})") from None


def read_tensor(path: Path, name: str) -> Tensor | None:
    """A tensor of a file that belongs to a rank alone; None where there is none.

    Raises:
        UserError: the file is damaged.
    """
    try:
        if name not in read_header(path):
            return None
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (CheckpointError, SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read ({error})") from None
