"""Files of many documents: JSON lines, Parquet, pre-tokenised .bin, datasets on disk.

A source knows how many documents it has and reads any one of them when asked; only an index is in memory. It
says in `blocks` which documents lie together, so that an order can visit one block after another where reading
a block is dear.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flexcp.errors import UserError


class Source(Protocol):
    """Documents in a fixed order. A document is a text, a conversation, or an array of tokens."""

    name: str
    blocks: list[int]  # documents in each block, in order

    def __getitem__(self, index: int) -> Any: ...

    def where(self, index: int) -> str:
        """The place of a document, for a sentence."""
        ...


class JsonLines:
    """One JSON object a line; a document is the value of `field`. Blank lines are no documents.

    Raises:
        UserError: a file that cannot be read, or holds no line.
    """

    def __init__(self, files: Sequence[Path], field: str) -> None:
        self.files, self.field, self.name = list(files), field, f"field {field!r} of JSON lines"
        starts, numbers, owners = [], [], []
        self.blank = 0
        for owner, path in enumerate(self.files):
            at = 0
            with open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        starts.append(at)
                        numbers.append(number)
                        owners.append(owner)
                    else:
                        self.blank += 1
                    at += len(line)
        self._starts, self._numbers = np.array(starts, np.int64), np.array(numbers, np.int64)
        self._owners = np.array(owners, np.int32)
        self.blocks = [len(starts)]

    def __getitem__(self, index: int) -> Any:
        with open(self.files[self._owners[index]], "rb") as file:
            file.seek(int(self._starts[index]))
            line = file.readline()
        try:
            fields = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise UserError(f"{self.where(index)} is not JSON ({' '.join(str(error).split())[:100]})") from None
        return field_of(fields, self.field, self.where(index))

    def where(self, index: int) -> str:
        return f"{self.files[self._owners[index]]} line {self._numbers[index]}"


class Parquet:
    """A column of Parquet files. A row group is read whole, and kept until another one is.

    Raises:
        UserError: pyarrow is not installed, a file is no Parquet, or has no such column.
    """

    def __init__(self, files: Sequence[Path], field: str) -> None:
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise UserError(f"--data {files[0]} needs the package pyarrow: pip install pyarrow") from None
        self.field, self.name = field, f"column {field!r} of Parquet"
        self._groups: list[tuple[Path, int]] = []
        self.blocks = []
        for path in files:
            try:
                with parquet.ParquetFile(path) as file:
                    if field not in file.schema_arrow.names:
                        names = ", ".join(file.schema_arrow.names)
                        raise UserError(f"--data {path} has no column {field!r}: name one of {names} by --data-field")
                    for group in range(file.metadata.num_row_groups):
                        if rows := file.metadata.row_group(group).num_rows:
                            self._groups.append((path, group))
                            self.blocks.append(rows)
            except (OSError, ValueError) as error:
                if isinstance(error, UserError):
                    raise
                raise UserError(f"--data {path} is no Parquet file ({' '.join(str(error).split())[:200]})") from None
        self._ends = list(accumulate(self.blocks))
        self._read = parquet.ParquetFile
        self._cached: tuple[int, list[Any]] = (-1, [])

    def __getitem__(self, index: int) -> Any:
        group = int(np.searchsorted(self._ends, index, side="right"))
        if self._cached[0] != group:
            path, number = self._groups[group]
            try:
                with self._read(path) as file:
                    column = file.read_row_group(number, columns=[self.field]).column(0).to_pylist()
            except (OSError, ValueError) as error:
                reason = " ".join(str(error).split())[:200]
                raise UserError(f"--data {path}: row group {number} cannot be read ({reason})") from None
            self._cached = (group, column)
        value = self._cached[1][index - (self._ends[group] - self.blocks[group])]
        return field_of({self.field: value}, self.field, self.where(index))

    def where(self, index: int) -> str:
        group = int(np.searchsorted(self._ends, index, side="right"))
        row = index - (self._ends[group] - self.blocks[group])
        return f"{self._groups[group][0]} row group {self._groups[group][1]} row {row}"


class Tokens:
    """A .bin file of raw little-endian tokens, described by the JSON file of its name with .json behind it.

    That file has "dtype" ("uint16" or "uint32") and "separator": the token that ends each document, or null
    where the whole file is one. `write_bin` writes both.

    Raises:
        UserError: a description that is missing or wrong, or a size that is no whole number of tokens.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, "tokens"
        sidecar = path.with_name(path.name + ".json")
        wanted = 'write {"dtype": "uint16" or "uint32", "separator": token or null} there'
        try:
            fields = json.loads(sidecar.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            raise UserError(f"--data {path} needs {sidecar.name} beside it, as JSON: {wanted}") from None
        if not isinstance(fields, dict) or set(fields) != {"dtype", "separator"}:
            raise UserError(f"{sidecar} must have dtype and separator and nothing else: {wanted}")
        dtype, separator = fields["dtype"], fields["separator"]
        is_token = isinstance(separator, int) and not isinstance(separator, bool) and 0 <= separator < 1 << 32
        if dtype not in ("uint16", "uint32") or not (separator is None or is_token):
            raise UserError(f"{sidecar} has dtype {dtype!r} and separator {separator!r}: {wanted}")
        size = path.stat().st_size
        stored = np.dtype(dtype).newbyteorder("<")
        if size == 0 or size % stored.itemsize:
            raise UserError(f"--data {path} has {size} bytes, which is no whole number of {dtype} tokens, at least one")
        self._tokens = np.memmap(path, dtype=stored, mode="r")
        ends: list[np.ndarray] = []
        step = 1 << 24
        for at in range(0, len(self._tokens), step) if separator is not None else ():
            ends.append(np.flatnonzero(self._tokens[at : at + step] == separator) + at + 1)
        self._ends = np.concatenate(ends) if ends else np.zeros(0, np.int64)
        if len(self._ends) == 0 or self._ends[-1] != len(self._tokens):
            self._ends = np.append(self._ends, len(self._tokens))
        self.blocks = [len(self._ends)]

    def __getitem__(self, index: int) -> np.ndarray:
        start = 0 if index == 0 else int(self._ends[index - 1])
        return np.array(self._tokens[start : int(self._ends[index])], dtype=np.int64)

    def where(self, index: int) -> str:
        return f"{self.path} document {index}"


class OnDisk:
    """A data set that Hugging Face `datasets` has saved by save_to_disk.

    Raises:
        UserError: datasets is not installed, the folder has several splits, or no such column.
    """

    def __init__(self, folder: Path, field: str) -> None:
        try:
            import datasets
        except ImportError:
            raise UserError(f"--data {folder} needs the package datasets: pip install datasets") from None
        try:
            self._rows = datasets.load_from_disk(str(folder))
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"--data {folder} cannot be read as a saved data set ({reason})") from None
        if isinstance(self._rows, dict):
            raise UserError(f"--data {folder} has the splits {', '.join(self._rows)}: name the folder of one of them")
        if field not in self._rows.column_names:
            names = ", ".join(self._rows.column_names)
            raise UserError(f"--data {folder} has no column {field!r}: name one of {names} by --data-field")
        self.folder, self.field, self.name = folder, field, f"column {field!r} of a data set"
        self.blocks = [len(self._rows)]

    def __getitem__(self, index: int) -> Any:
        return field_of(self._rows[index], self.field, self.where(index))

    def where(self, index: int) -> str:
        return f"{self.folder} row {index}"


def field_of(fields: Any, field: str, where: str) -> Any:
    """A text or a conversation out of a row.

    Raises:
        UserError: no such field, or another kind of value in it.
    """
    if not isinstance(fields, dict):
        raise UserError(f"{where} holds a {type(fields).__name__} and no object with {field!r}")
    if field not in fields:
        names = " ".join((", ".join(map(str, list(fields)[:8])) or "none").split())
        raise UserError(f"{where} has no {field!r} (it has {names[:200]}): name the field by --data-field")
    value = fields[field]
    if not isinstance(value, str | list):
        raise UserError(f"{where}: {field!r} is of type {type(value).__name__}, and must be a text or a conversation")
    return value


def write_bin(path: str | Path, documents: Iterable[Sequence[int]], separator: int, dtype: str = "uint32") -> int:
    """Writes documents of tokens as a .bin file that --data reads, and the .json file beside it.

    Args:
        path: of the .bin file.
        documents: tokens of each, without the separator.
        separator: written after each document.
        dtype: uint16 or uint32.

    Returns:
        Tokens written, separators included.

    Raises:
        ValueError: a token that does not fit the dtype, or a document that has the separator in it.
    """
    if dtype not in ("uint16", "uint32"):
        raise ValueError(f"dtype is {dtype!r}, and must be uint16 or uint32")
    path, most, total = Path(path), np.iinfo(dtype).max, 0
    with open(path, "wb") as file:
        for number, document in enumerate(documents):
            tokens = np.asarray([*document, separator], dtype=np.int64)
            if tokens.min() < 0 or tokens.max() > most:
                raise ValueError(f"document {number} has a token outside 0..{most}, and so outside {dtype}")
            if (tokens[:-1] == separator).any():
                raise ValueError(f"document {number} has the separator {separator} in it")
            file.write(tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes())
            total += len(tokens)
    path.with_name(path.name + ".json").write_text(json.dumps({"dtype": dtype, "separator": separator}))
    return total
