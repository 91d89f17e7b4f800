"""safetensors files of a folder: what is in them, checked before anything is read, and any block of any tensor.

The header of each file is parsed and checked here, against the file's true size, so that a broken file ends
with a sentence that names the tensor. Bytes are then read through `safe_open(...).get_slice`, in pieces, so
that no more than a piece is in memory beside the destination. Nothing is ever unpickled.

Format: https://huggingface.co/docs/safetensors: 8 bytes little-endian N, N bytes of JSON, the data.
"""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flexcp.models.errors import CheckpointError
from flexcp.models.hf_config import read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Those of the format that no weight of ours has; files with such tensors are whole, and refused by tensor.
_OTHER_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64}
_OTHER_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64}
_MOST_HEADER = 100_000_000  # bytes; safetensors itself allows no more
_PIECE_BYTES = 32 << 20
# A mapped page stays in memory until the file is closed, so a file is opened anew after so many bytes.
_REOPEN_BYTES = 256 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor: where it lies and what it is."""

    file: Path
    dtype: str  # as the format names it
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file by name.

    Raises:
        CheckpointError: the file is empty, cut short, longer than its tensors, or its header is damaged.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} has {size} bytes, and is no safetensors file: copy it again")
            length = int.from_bytes(prefix, "little")
            if length > min(size - 8, _MOST_HEADER):
                raise CheckpointError(
                    f"{path} has {size:,} bytes and announces a header of {length:,}: it is cut short or no "
                    "safetensors file"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_twice)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a damaged header ({' '.join(str(error).split())[:200]})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} has a damaged header (a {type(header).__name__} and no object)")
    header.pop("__metadata__", None)
    entries, spans = {}, []
    for name, fields in header.items():
        entries[name], span = _entry(path, name, fields)
        spans.append((*span, name))
    at = 0
    for start, stop, name in sorted(spans):
        if start != at:
            raise CheckpointError(f"{path}: tensor {name!r} begins at byte {start:,} of the data, not at {at:,}")
        at = stop
        if 8 + length + stop > size:
            raise CheckpointError(
                f"{path} is cut short: tensor {name!r} {list(entries[name].shape)} ends at byte {8 + length + stop:,}, "
                f"and the file has {size:,}"
            )
    if 8 + length + at != size:
        raise CheckpointError(f"{path} has {size:,} bytes, but its tensors end at {8 + length + at:,}")
    return entries


def _no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name stands in it twice")
    return fields


def _entry(path: Path, name: str, fields: Any) -> tuple[Entry, tuple[int, int]]:
    def is_count(value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62

    broken = f"{path} has a damaged header: tensor {name!r}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{broken} has no dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(shape, list) or not all(map(is_count, shape)):
        raise CheckpointError(f"{broken} has the shape {str(shape)[:80]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_count, offsets)):
        raise CheckpointError(f"{broken} has the data_offsets {str(offsets)[:80]}")
    bits = _OTHER_BITS.get(dtype) if isinstance(dtype, str) else None
    if isinstance(dtype, str) and dtype in DTYPES:
        bits = 8 * DTYPES[dtype].itemsize
    if bits is None:
        raise CheckpointError(f"{broken} has the dtype {str(dtype)[:80]!r}")
    start, stop = offsets
    if 8 * (stop - start) != math.prod(shape) * bits:
        raise CheckpointError(f"{broken} {shape} of {dtype} lies in {stop - start:,} bytes, which do not fit it")
    return Entry(path, dtype, tuple(shape)), (start, stop)


class Checkpoint:
    """The tensors of a folder, by their names there; from the headers alone.

    The index decides where there is one: files that it does not name, such as a consolidated copy, are not
    opened. Without an index the folder's `model.safetensors` is read.

    Args:
        folder: with model.safetensors, or with model.safetensors.index.json and the files that it names.

    Raises:
        CheckpointError: no such files, or files or an index that are damaged or do not fit each other.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.tensors: dict[str, Entry] = {}
        if (self.folder / INDEX).exists():
            self._read_index()
        elif (self.folder / SINGLE).exists():
            self.tensors = read_header(self.folder / SINGLE)
        else:
            raise CheckpointError(f"{self.folder} has neither {SINGLE} nor {INDEX}{_hint(self.folder)}")
        self._open: tuple[Path, Any] | None = None
        self._since_open = 0

    def _read_index(self) -> None:
        path = self.folder / INDEX
        weight_map = read_json(path, "safetensors index").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path} has no weight_map from tensors to files")
        by_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            plain = isinstance(file, str) and PurePath(file).name == file and "\\" not in file and "\0" not in file
            if not plain or file in ("", ".", ".."):
                raise CheckpointError(f"{path}: tensor {name!r} is said to lie in {file!r}, which is no file name")
            by_file.setdefault(file, []).append(name)
        for file, names in by_file.items():
            if not (self.folder / file).is_file():
                raise CheckpointError(
                    f"{path}: tensor {names[0]!r} is said to lie in {file}, and there is no such file in the folder"
                )
            entries = read_header(self.folder / file)
            for name in names:
                if name not in entries:
                    raise CheckpointError(f"{path}: tensor {name!r} is said to lie in {file}, and is not there")
                self.tensors[name] = entries[name]
            strange = next((name for name in entries if name not in weight_map), None)
            if strange is not None:
                raise CheckpointError(f"{self.folder / file} holds tensor {strange!r}, which {INDEX} does not name")

    def read(self, name: str, out: Tensor, start: tuple[int, ...] | None = None) -> None:
        """Fills `out` with a block of a tensor, converted to the dtype of `out`, on its device.

        Args:
            name: of the tensor in the files.
            out: the block's shape; any floating-point dtype, any device. May be a rank's shard.
            start: where the block begins in the tensor; its beginning where left out.

        Raises:
            CheckpointError: the tensor is not there, is no floating-point tensor, or does not hold the block.
        """
        entry = self.entry(name)
        start = start or (0,) * out.ndim
        if len(entry.shape) != out.ndim or any(a + n > size for a, n, size in zip(start, out.shape, entry.shape)):
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} is {list(entry.shape)}, which has no block of {list(out.shape)} at "
                f"{list(start)}"
            )
        for piece, place in _pieces(out, start, DTYPES[entry.dtype].itemsize):
            piece.copy_(self._slice(entry, name, place, piece.nbytes))

    def entry(self, name: str) -> Entry:
        """A floating-point tensor's place and shape.

        Raises:
            CheckpointError: there is none of that name, or it is of another kind.
        """
        if name not in self.tensors:
            raise CheckpointError(f"tensor {name!r} is missing in {self.folder}")
        entry = self.tensors[name]
        if entry.dtype not in DTYPES:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} {list(entry.shape)} is {entry.dtype}, and weights must be one of "
                f"{', '.join(DTYPES)}"
            )
        return entry

    def _slice(self, entry: Entry, name: str, place: tuple[slice, ...], num_bytes: int) -> Tensor:
        if self._open is None or self._open[0] != entry.file or self._since_open > _REOPEN_BYTES:
            self.close()
            try:
                self._open, self._since_open = (entry.file, safe_open(entry.file, framework="pt")), 0
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{entry.file} cannot be read ({error})") from None
        self._since_open += num_bytes
        try:
            return self._open[1].get_slice(name)[place]
        except (SafetensorError, OSError, IndexError) as error:
            raise CheckpointError(f"{entry.file}: tensor {name!r} cannot be read ({error})") from None

    def close(self) -> None:
        """Lets go of the file that is open."""
        if self._open is not None:
            with contextlib.suppress(AttributeError):
                self._open[1].__exit__(None, None, None)
        self._open = None

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *args: object) -> None:
        self.close()


def _pieces(out: Tensor, start: tuple[int, ...], itemsize: int) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """`out` in groups of rows of at most _PIECE_BYTES in the file, each with its place in the tensor."""
    if out.numel() == 0:
        return
    rows = max(1, _PIECE_BYTES // max(1, itemsize * out[0].numel()))
    rest = tuple(slice(a, a + n) for a, n in zip(start[1:], out.shape[1:]))
    for row in range(0, len(out), rows):
        piece = out[row : row + rows]
        yield piece, (slice(start[0] + row, start[0] + row + len(piece)), *rest)


def _hint(folder: Path) -> str:
    if not folder.exists():
        return ": there is no such folder; nothing is downloaded"
    if not folder.is_dir():
        return ": it is no folder"
    try:
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    except OSError as error:
        return f" ({error.strerror})"
    if pickles:
        return f": {pickles[0]} may be a pickle, which is never opened; save the model as safetensors"
    return ""
