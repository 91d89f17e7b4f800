"""A checkpoint on disk: a folder of safetensors files and `checkpoint.json`, which is written last.

    OUT/checkpoints/step-00000010/rank-00000.safetensors ...    what each rank has written
    OUT/checkpoints/step-00000010/checkpoint.json               the step, the run's state, every tensor's pieces

A folder without its manifest, or with a file that is missing or of another size, is no checkpoint. Names that begin
with a dot are saves and removals that were not finished.
"""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from flexcp.errors import UserError
from flexcp.shards import Box, Encoding

MANIFEST, FORMAT = "checkpoint.json", 1
_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.(tmp|old)")


@dataclass(frozen=True)
class Piece:
    """A box of a tensor in a file.

    Attributes:
        file: in the checkpoint's folder.
        box: where it lies in the whole tensor.
        encoding: what its parts are; None where the values themselves are stored.
        parts: names of the tensors that it consists of; stored as `key(name, part)`.
    """

    file: str
    box: Box
    encoding: Encoding | None
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """A whole tensor: dtype and shape as the run sees them, and the pieces that it is stored in."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        step: steps that the run had done.
        state: of the run: JSON, as the trainer left it.
        files: bytes of each file.
        tensors: by name.
    """

    step: int
    state: dict[str, Any]
    files: dict[str, int]
    tensors: dict[str, Entry]

    def to_json(self) -> str:
        tensors = {
            name: {"dtype": entry.dtype, "shape": entry.shape, "pieces": [_piece_to_json(p) for p in entry.pieces]}
            for name, entry in self.tensors.items()
        }
        fields = {"format": FORMAT, "step": self.step, "state": self.state, "files": self.files, "tensors": tensors}
        return json.dumps(fields, indent=1) + "\n"


def key(name: str, part: str) -> str:
    """The name of a tensor's part in a file."""
    return f"{name}/{part}" if part else name


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint after a step lies."""
    return root / f"step-{step:08}"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, whose files are there with the sizes that it says.

    Raises:
        UserError: it is not there, is damaged, is of another version, or a file is missing or of another size.
    """
    try:
        fields = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder} is no checkpoint: it has no {MANIFEST}, which is written last") from None
    except OSError as error:
        raise UserError(f"{folder / MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{folder / MANIFEST} is damaged ({' '.join(str(error).split())[:100]})") from None
    version = fields.get("format") if isinstance(fields, dict) else None
    if version != FORMAT:
        raise UserError(
            f"{folder / MANIFEST} has the format {version!r}, and this version of flexcp reads {FORMAT}: resume with "
            "the version that wrote it"
        )
    try:
        manifest = _from_json(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / MANIFEST} is damaged ({type(error).__name__}: {str(error)[:100]})") from None
    for file, size in manifest.files.items():
        try:
            found = (folder / file).stat().st_size
        except OSError:
            raise UserError(f"{folder} is not complete: {file} is missing") from None
        if found != size:
            raise UserError(f"{folder} is not complete: {file} has {found:,} bytes, and {size:,} were written")
    return manifest


def _from_json(fields: dict[str, Any]) -> Manifest:
    files = {str(file): int(size) for file, size in fields["files"].items()}
    for file in files:
        if PurePath(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{file!r} is no file of a checkpoint")
    tensors = {name: _entry(name, entry, files) for name, entry in fields["tensors"].items()}
    step, state = fields["step"], fields["state"]
    if type(step) is not int or step < 1 or not isinstance(state, dict):
        raise ValueError(f"step {step!r}")
    return Manifest(step, state, files, tensors)


def _entry(name: str, fields: dict[str, Any], files: dict[str, int]) -> Entry:
    shape = tuple(map(int, fields["shape"]))
    pieces = tuple(map(_piece, fields["pieces"]))
    if any(piece.file not in files or not piece.box.within(shape) for piece in pieces):
        raise ValueError(f"a piece of {name} lies outside of it")
    if sum(piece.box.numel for piece in pieces) != Box((0,) * len(shape), shape).numel:
        raise ValueError(f"the pieces of {name} are not the whole of it")
    return Entry(str(fields["dtype"]), shape, pieces)


def _piece(fields: dict[str, Any]) -> Piece:
    box = Box(tuple(map(int, fields["start"])), tuple(map(int, fields["shape"])))
    kind = fields.get("kind")
    encoding = None if kind is None else Encoding(str(kind), tuple(fields["attributes"]))
    return Piece(fields["file"], box, encoding, tuple(map(str, fields.get("parts", [""]))))


def _piece_to_json(piece: Piece) -> dict[str, Any]:
    fields: dict[str, Any] = {"file": piece.file, "start": piece.box.start, "shape": piece.box.shape}
    if piece.encoding is not None:
        fields |= {"kind": piece.encoding.kind, "attributes": piece.encoding.attributes, "parts": piece.parts}
    return fields


def steps_in(root: Path) -> list[int]:
    """The steps of the folders that look like checkpoints, the newest first; complete or not."""
    if not root.is_dir():
        return []
    found = (_STEP.fullmatch(path.name) for path in root.iterdir() if path.is_dir())
    return sorted((int(match[1]) for match in found if match), reverse=True)


def newest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint of a run, None where there is none, and why newer ones were passed over."""
    passed: list[str] = []
    for step in steps_in(root):
        try:
            read_manifest(folder_of(root, step))
        except UserError as error:
            passed.append(str(error))
        else:
            return folder_of(root, step), passed
    return None, passed


def remove_unfinished(root: Path) -> None:
    """Takes away what killed saves and removals have left."""
    if root.is_dir():
        for path in root.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
