"""--data: text files, or files of many documents, as tokens.

All ranks read the same and build the same batch (`packing`). Sharding comes later (`plan.shard`), after the
labels have been shifted: shifting a shard would lose the label at each seam.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flexcp.batch import IGNORE, Batch
from flexcp.errors import UserError
from flexcp.sources import JsonLines, OnDisk, Parquet, Source, Tokens
from flexcp.tokenizer import ByteTokenizer, Tokenizer, encode_chat

__all__ = ["IGNORE", "Batch", "Corpus", "Documents", "open_documents", "read_corpus"]

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


class Documents:
    """The documents of a source as tokens of one vocabulary.

    Args:
        source: texts, conversations or tokens.
        tokenizer: for texts and conversations; tokens are taken as they are.
        vocab_size: of the model; a larger token is refused where it is met.
        digest: 63 bits that differ where the sources of two ranks differ.
        described: the source in words.
    """

    def __init__(self, source: Source, tokenizer: Tokenizer, vocab_size: int, digest: int, described: str) -> None:
        self.source, self.tokenizer, self.vocab_size = source, tokenizer, vocab_size
        self.blocks, self.digest, self._described = source.blocks, digest, described

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens, int64, and which of them are to be learned, bool; None for all.

        Raises:
            UserError: a document that cannot be read, or a token outside the vocabulary; with its place.
        """
        document, learned = self.source[index], None
        if isinstance(document, list):
            try:
                tokens, learned = encode_chat(self.tokenizer, document)
            except UserError as error:
                raise UserError(f"{self.where(index)}: {error}") from None
        else:
            tokens = self.tokenizer.encode(document) if isinstance(document, str) else document
        if len(tokens) and tokens.max() >= self.vocab_size:
            raise UserError(
                f"{self.where(index)} has the token {tokens.max()}, and the model's vocabulary ends at "
                f"{self.vocab_size - 1}: train a model with more tokens, or name the tokenizer that belongs to it"
            )
        return tokens, learned

    def where(self, index: int) -> str:
        return self.source.where(index)

    def __str__(self) -> str:
        return f"{self._described}; tokens: {self.tokenizer.name}"


def open_documents(
    path: str | None, field: str = "text", tokenizer: Tokenizer | None = None, vocab_size: int = 256
) -> Documents:
    """What --data names, by its kind: a folder that `datasets` saved, .jsonl, .parquet, .bin, else text.

    A folder with nothing but .jsonl or nothing but .parquet files is all of them; any other folder is its text
    files (`read_corpus`).

    Args:
        path: a file or folder; None: this checkout's own text.
        field: with the text or the conversation, where documents have fields.
        tokenizer: None: bytes.
        vocab_size: of the model.

    Raises:
        UserError: data that is not there, cannot be read, or has no document.
    """
    tokenizer = tokenizer or ByteTokenizer()
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer ({tokenizer.name}) has {tokenizer.vocab_size:,} tokens, and the model a vocabulary of "
            f"{vocab_size:,}: the model's must not be smaller"
        )
    root = default_folder() if path is None else Path(path).expanduser()
    try:
        source, files = _open_source(root, field)
        if source is None:
            corpus = read_corpus(path)
            return Documents(Texts(corpus, root), tokenizer, vocab_size, corpus.digest(), str(corpus))
        count = sum(source.blocks)
        if count == 0:
            raise UserError(f"--data {root} has no document in it: name data with something in it")
        digest = _digest_of(files)
    except OSError as error:
        raise UserError(f"--data {root} cannot be read ({error.strerror}): name a readable file or folder") from None
    blank = f"; left out: {source.blank} blank lines" if isinstance(source, JsonLines) and source.blank else ""
    documents = Documents(
        source, tokenizer, vocab_size, digest, f"{count:,} documents, {source.name} in {len(files)} files{blank}"
    )
    documents[0]  # a wrong field shows before ranks are started
    return documents


def _open_source(root: Path, field: str) -> tuple[Source | None, list[Path]]:
    """The source of a path and its files; None for text."""
    if root.is_dir():
        if ((root / "state.json").is_file() and (root / "dataset_info.json").is_file()) or (
            root / "dataset_dict.json"
        ).is_file():
            return OnDisk(root, field), sorted(root.glob("*.arrow")) or [root / "dataset_dict.json"]
        files = sorted(path for path in root.iterdir() if path.is_file() and not path.name.startswith("."))
        kinds = {path.suffix.lower() for path in files}
        if len(kinds) != 1 or any(path.is_dir() for path in root.iterdir()):
            return None, []
        kind = kinds.pop()
    else:
        kind, files = root.suffix.lower(), [root]
        if not root.is_file():
            return None, []
    if kind == ".jsonl":
        return JsonLines(files, field), files
    if kind == ".parquet":
        return Parquet(files, field), files
    if kind == ".bin" and root.is_file() and root.with_name(root.name + ".json").is_file():
        return Tokens(root), files
    return None, []


class Texts:
    """The documents of a corpus as a source."""

    def __init__(self, corpus: Corpus, root: Path) -> None:
        self.corpus, self.root, self.name = corpus, root, "text"
        self.blocks = [len(corpus.documents)]

    def __getitem__(self, index: int) -> str:
        return self.corpus.documents[index].decode("utf-8")

    def where(self, index: int) -> str:
        return f"{self.root} document {index}"


def _digest_of(files: list[Path]) -> int:
    """63 bits of the sizes of files and of their first and last 64 KiB, without reading all of them."""
    sha, most = hashlib.sha256(), 1 << 16
    for path in files:
        size = path.stat().st_size
        sha.update(f"{path.name}/{size}/".encode())
        with open(path, "rb") as file:
            sha.update(file.read(most))
            file.seek(max(0, size - most))
            sha.update(file.read(most))
    return int.from_bytes(sha.digest()[:8], "big") >> 1
