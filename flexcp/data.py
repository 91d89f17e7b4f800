"""Text files as packed rows of byte tokens with document ids.

Every row is a pure function of (files, seed, step): there is no reader state to save, all ranks of any group
size build the same batch, and a step can be built without the ones before it. Sharding comes later
(`plan.shard`), after the labels have been shifted here: shifting a shard would lose the label at each seam.
"""

import bisect
import hashlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flexcp.errors import UserError

IGNORE = -100  # the label that does not count, as in torch.nn.functional.cross_entropy
# UTF-8, but coordinates: a few rows of them among prose are all that the loss of a short run shows.
_DRAWINGS = {".svg", ".eps", ".ps"}
# Folders inside a data folder that hold no text of its own: caches, environments, build products.
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv", "runs"}


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    Attributes:
        documents: the bytes of each, none empty.
        skipped: files of a folder that were left out, by reason.
    """

    documents: tuple[bytes, ...]
    skipped: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.documents))

    def digest(self) -> int:
        """63 bits that differ where the corpora of two ranks differ."""
        sha = hashlib.sha256()
        for document in self.documents:
            sha.update(len(document).to_bytes(8, "big"))
            sha.update(document)
        return int.from_bytes(sha.digest()[:8], "big") >> 1

    def __str__(self) -> str:
        skipped = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
        return f"{len(self.documents)} documents, {self.num_bytes:,} bytes" + (f"; left out: {skipped}" * bool(skipped))


def default_folder() -> Path:
    """The checkout that flexcp runs from, or the installed package where there is no checkout."""
    package = Path(__file__).resolve().parent
    return package.parent if (package.parent / "pyproject.toml").is_file() else package


def read_corpus(path: str | None = None) -> Corpus:
    """The text files of a folder, or one text file; each file is a document.

    In a folder, files that are binary, empty, unreadable or drawings are left out and counted; hidden folders,
    environments, caches and the folders of earlier runs (they hold a metrics.jsonl) are not entered. A file
    that is named itself must be UTF-8 text.

    Args:
        path: a file or folder; `default_folder()` where None.

    Raises:
        UserError: a path that is missing, is neither file nor folder, cannot be read, is not text, or has
        none.
    """
    root = default_folder() if path is None else Path(path).expanduser()
    try:
        if root.is_dir():
            return _read_folder(root)
        if root.is_file():
            return Corpus((_read_text(root),), {})
    except OSError as error:
        raise UserError(f"--data {root} cannot be read ({error.strerror}): name a readable file or folder") from None
    if root.exists():
        raise UserError(f"--data {root} is neither a file nor a folder: name a text file or a folder of them")
    raise UserError(f"--data {root} does not exist: name a text file or a folder of them")


def _read_folder(root: Path) -> Corpus:
    documents: list[bytes] = []
    skipped: dict[str, int] = {}
    for path in _files(root):
        try:
            content = path.read_bytes()
        except OSError:
            reason = "unreadable"
        else:
            reason = _unusable(path, content)
        if reason is None:
            documents.append(content)
        else:
            skipped[reason] = skipped.get(reason, 0) + 1
    if not documents:
        found = ", ".join(f"{count} {reason}" for reason, count in skipped.items()) or "nothing"
        raise UserError(f"--data {root} has no text file ({found} found): name a folder with UTF-8 text in it")
    return Corpus(tuple(documents), skipped)


def _unusable(path: Path, content: bytes) -> str | None:
    """Why a file of a folder is no document, in a word; None where it is one."""
    if not content:
        return "empty"
    if path.suffix.lower() in _DRAWINGS:
        return "drawing"
    return None if _not_text(content) is None else "binary"


def _files(root: Path) -> Iterator[Path]:
    """Regular files below root, sorted, so that every machine sees them in one order."""
    for folder, names, files in os.walk(root):
        names[:] = sorted(
            name
            for name in names
            if not name.startswith(".")
            and name not in _SKIPPED_FOLDERS
            and not name.endswith(".egg-info")
            and not (Path(folder, name) / "metrics.jsonl").exists()
        )
        yield from (path for name in sorted(files) if (path := Path(folder, name)).is_file())


def _read_text(path: Path) -> bytes:
    content = path.read_bytes()
    if not content:
        raise UserError(f"--data {path} is empty: name a text file with something in it")
    if (where := _not_text(content)) is not None:
        raise UserError(
            f"--data {path} is not UTF-8 text (byte 0x{content[where]:02x} at offset {where}): "
            "name a text file, or a folder, where binary files are left out"
        )
    return content


def _not_text(content: bytes) -> int | None:
    """Offset of the first byte that is no UTF-8 text, or None."""
    if (nul := content.find(0)) >= 0:
        return nul
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start
    return None


@dataclass(frozen=True)
class Batch:
    """One step's rows, whole: [B, S] int64 each, not sharded.

    Attributes:
        tokens: bytes, 0..255.
        labels: the token that follows in the same document; IGNORE at the last token of a document.
        positions: the place of each token in its piece of a document, from 0.
        doc_ids: the piece each token belongs to, from 0 in each row.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    doc_ids: Tensor


class PackedRows:
    """Endless rows of `seq_len` tokens, cut out of the shuffled documents laid end to end.

    Nothing is dropped and nothing is padded: a document that does not fit goes on in the next row, where it
    counts as a document of its own (its tokens cannot see the row before). Its last token in a row still has
    its label, the token with which the next row begins. Each epoch is shuffled anew.

    >>> rows = PackedRows([b"abc", b"de"], seq_len=5, batch=1, seed=0)
    >>> batch = rows.batch(0)
    >>> sorted(batch.tokens[0].tolist()) == sorted(b"abcde")
    True

    Args:
        documents: bytes of each document, none empty.
        seq_len: S, tokens in a row.
        batch: B, rows in a step.
        seed: of the order of the documents.
    """

    def __init__(self, documents: tuple[bytes, ...] | list[bytes], seq_len: int, batch: int, seed: int) -> None:
        self.documents, self.seq_len, self.num_rows, self.seed = list(documents), seq_len, batch, seed
        self.epoch_len = sum(map(len, self.documents))
        if not self.documents or not all(self.documents):
            raise ValueError("PackedRows needs at least one document, and none of them empty")
        self._epochs: dict[int, tuple[list[int], list[int]]] = {}

    def batch(self, step: int) -> Batch:
        """The rows of a step, counted from 0."""
        rows = [self._row(step * self.num_rows + row) for row in range(self.num_rows)]
        return Batch(*(torch.tensor(column, dtype=torch.int64) for column in zip(*rows)))

    def _row(self, row: int) -> tuple[list[int], list[int], list[int], list[int]]:
        tokens, labels, positions, doc_ids = [], [], [], []
        for doc_id, (document, start) in enumerate(self._pieces(row * self.seq_len)):
            stop = min(len(document), start + self.seq_len - len(tokens))
            tokens += document[start:stop]
            labels += document[start + 1 : stop + 1]
            labels += [IGNORE] * (len(tokens) - len(labels))  # one, where the document ends here
            positions += range(stop - start)
            doc_ids += [doc_id] * (stop - start)
            if len(tokens) == self.seq_len:
                break
        return tokens, labels, positions, doc_ids

    def _pieces(self, offset: int) -> Iterator[tuple[bytes, int]]:
        """Documents from a place in the endless stream on, each with the offset in it at which to begin."""
        first, within = divmod(offset, self.epoch_len)
        for epoch in itertools.count(first):
            order, starts = self._epoch(epoch)
            place = bisect.bisect_right(starts, within) - 1
            for index, start in zip(order[place:], starts[place:]):
                yield self.documents[index], max(0, within - start)
            within = 0

    def _epoch(self, epoch: int) -> tuple[list[int], list[int]]:
        """The order of the documents in an epoch, and where each begins in it."""
        if epoch not in self._epochs:
            # Sorting by a hash, unlike a library's shuffle, is the same in every version of every library.
            order = sorted(
                range(len(self.documents)),
                key=lambda index: hashlib.sha256(f"{self.seed}/{epoch}/{index}".encode()).digest(),
            )
            starts = [0, *itertools.accumulate(len(self.documents[index]) for index in order)][:-1]
            if len(self._epochs) > 1:
                self._epochs.pop(min(self._epochs))
            self._epochs[epoch] = order, starts
        return self._epochs[epoch]
