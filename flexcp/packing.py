"""Documents to rows of equal length: in which order, how they are cut and packed, and where a run has got to.

The state of a reader is a few numbers: the global index of the next document, counted over epochs, the token
in it to go on with, and the pieces that wait for a row. It knows nothing of ranks, since every rank builds the
whole batch and takes its own part of it; so a run goes on under any other number of them.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from flexcp.batch import IGNORE, Batch
from flexcp.errors import UserError

PACKINGS = ("concat", "first_fit")
POSITIONS = ("reset", "continuous")
LONG_DOCUMENTS = ("split", "truncate", "refuse")
_ROUNDS = 6
# first_fit: so many pieces that fit no row may wait, for each row of a batch.
_WAITING = 16


class TokenDocuments(Protocol):
    """Documents as tokens; `blocks` as in `flexcp.sources.Source`."""

    blocks: list[int]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens, int64, and which of them are learned, bool; None for all."""
        ...

    def where(self, index: int) -> str: ...


class Shuffle:
    """A permutation of 0 .. size - 1 that is computed where it is asked for and never held in memory.

    A Feistel network over the next power of 4, walked until it falls inside (Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002). Unlike a library's shuffle it is the same in every version of everything.

    >>> sorted(Shuffle(5, "key")[place] for place in range(5))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, key: str) -> None:
        self.size, self._key = size, key.encode()
        self._half = max(1, ((max(1, size - 1)).bit_length() + 1) // 2)

    def __getitem__(self, place: int) -> int:
        if not 0 <= place < self.size:
            raise IndexError(place)
        while True:
            place = self._turn(place)
            if place < self.size:
                return place

    def _turn(self, value: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(b"%d/%d/" % (number, right) + self._key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        return left << self._half | right


class Order:
    """The documents of an epoch in their order: blocks shuffled, and the documents within each."""

    def __init__(self, blocks: list[int], seed: int, epoch: int) -> None:
        self._key = f"{seed}/{epoch}"
        shuffle = Shuffle(len(blocks), self._key + "/blocks")
        self._order = [shuffle[place] for place in range(len(blocks))]
        self._firsts = np.cumsum([0, *blocks])
        self._ends = np.cumsum([blocks[block] for block in self._order])
        self._blocks = blocks

    def __getitem__(self, place: int) -> int:
        at = int(np.searchsorted(self._ends, place, side="right"))
        block = self._order[at]
        within = place - (int(self._ends[at]) - self._blocks[block])
        return int(self._firsts[block]) + Shuffle(self._blocks[block], f"{self._key}/{block}")[within]


@dataclass(frozen=True)
class Piece:
    """Tokens start .. stop - 1 of a document."""

    document: int  # global index: epoch * number of documents + place in the epoch's order
    start: int
    stop: int


class Reader:
    """Endless batches of packed rows.

    "concat" lays the documents end to end and cuts rows of `seq_len` tokens: nothing is padded; what does not
    fit goes on in the next row, as a document of its own. "first_fit" keeps documents whole, puts each into the
    first row of the batch that has room, and pads what is left over; one that fits none waits for the next
    batch. In both, each document is a mask's document, and the last token of a piece that goes on has its label
    still: the token with which the next piece begins.

    Args:
        documents: at least one.
        seq_len: S, tokens in a row.
        batch: B, rows in a step.
        seed: of the order.
        packing: "concat" or "first_fit".
        positions: "reset": from 0 in each piece; "continuous": from 0 in each row.
        long_documents: of more than seq_len tokens: "split" into pieces, "truncate" (the rest is not read, but
            counted), or "refuse".
        state: of another reader of the same documents and settings, to go on from there.

    Attributes:
        counts: what has been read so far, by name; nothing is dropped that is not in here.

    Raises:
        UserError: no document has any token; a long one is refused; a state of other settings.
    """

    def __init__(
        self,
        documents: TokenDocuments,
        seq_len: int,
        batch: int,
        seed: int,
        packing: str = "concat",
        positions: str = "reset",
        long_documents: str = "split",
        state: dict[str, Any] | None = None,
    ) -> None:
        self.documents, self.seq_len, self.num_rows, self.seed = documents, seq_len, batch, seed
        self.packing, self.positions, self.long_documents = packing, positions, long_documents
        self.num_documents = sum(documents.blocks)
        if self.num_documents == 0:
            raise UserError("the data has no document")
        self._next, self._offset, self._waiting = 0, 0, []
        self._order: tuple[int, Order] | None = None
        self._cache: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        self._empty_run = 0
        names = ("documents", "tokens", "padding", "split documents", "cut documents", "cut tokens", "empty documents")
        self.counts = dict.fromkeys(names, 0)
        if state is not None:
            self._restore(state)

    def _settings(self) -> dict[str, Any]:
        names = ("num_documents", "seq_len", "seed", "packing", "positions", "long_documents")
        return {name: getattr(self, name) for name in names}

    @property
    def state(self) -> dict[str, Any]:
        """Where the next batch begins, as plain numbers for JSON."""
        waiting = [[piece.document, piece.start, piece.stop] for piece in self._waiting]
        return {
            "settings": self._settings(),
            "document": self._next,
            "token": self._offset,
            "waiting": waiting,
            "counts": dict(self.counts),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        mine, other = self._settings(), state.get("settings", {})
        for name, value in mine.items():
            if other.get(name) != value:
                raise UserError(
                    f"the data's state was saved with {name}={other.get(name)!r}, and this run has {value!r}: the two "
                    "must be equal to go on"
                )
        self._next, self._offset = state["document"], state["token"]
        self._waiting = [Piece(*numbers) for numbers in state["waiting"]]
        self.counts = dict(state["counts"])

    def next(self) -> Batch:
        """The next batch."""
        rows = self._concat_rows() if self.packing == "concat" else self._first_fit_rows()
        columns = list(zip(*(self._row(row) for row in rows)))
        still = {self._next, *(piece.document for piece in self._waiting)}
        self._cache = {document: tokens for document, tokens in self._cache.items() if document in still}
        return Batch(*(torch.from_numpy(np.stack(column)) for column in columns))

    def summary(self) -> str:
        """The counts in a line: what was read, and what was padded, cut or left out."""
        return ", ".join(f"{count:,} {name}" for name, count in self.counts.items() if count or name == "tokens")

    def _concat_rows(self) -> list[list[Piece]]:
        rows = []
        for _ in range(self.num_rows):
            row, room = [], self.seq_len
            while room:
                length = self._length()
                piece = Piece(self._next, self._offset, min(length, self._offset + room))
                self._take(piece, length)
                row.append(piece)
                room -= piece.stop - piece.start
            rows.append(row)
        return rows

    def _first_fit_rows(self) -> list[list[Piece]]:
        rows: list[list[Piece]] = [[] for _ in range(self.num_rows)]
        rooms = [self.seq_len] * self.num_rows

        def place(piece: Piece) -> bool:
            size = piece.stop - piece.start
            row = next((row for row, room in enumerate(rooms) if room >= size), None)
            if row is not None:
                rows[row].append(piece)
                rooms[row] -= size
            return row is not None

        self._waiting = [piece for piece in self._waiting if not place(piece)]
        while any(rooms) and len(self._waiting) < _WAITING * self.num_rows:
            length = self._length()
            piece = Piece(self._next, self._offset, min(length, self._offset + self.seq_len))
            self._take(piece, length)
            if not place(piece):
                self._waiting.append(piece)
        self.counts["padding"] += sum(rooms)
        return rows

    def _take(self, piece: Piece, length: int) -> None:
        """Moves on behind a piece of the next document, which has `length` tokens to be read."""
        if piece.start == 0:
            self.counts["documents"] += 1
            self.counts["split documents"] += piece.stop < length
        self.counts["tokens"] += piece.stop - piece.start
        self._next, self._offset = (self._next, piece.stop) if piece.stop < length else (self._next + 1, 0)

    def _length(self) -> int:
        """Tokens to be read of the next document that has any."""
        while True:
            size = len(self._tokens(self._next)[0])
            if size == 0:
                self.counts["empty documents"] += 1
                self._empty_run += 1
                if self._empty_run >= 2 * self.num_documents:  # a whole epoch, at least
                    raise UserError(f"none of the {self.num_documents:,} documents of the data has any token")
                self._next += 1
                continue
            self._empty_run = 0
            if size <= self.seq_len or self.long_documents == "split":
                return size
            if self.long_documents == "refuse":
                raise UserError(
                    f"{self.documents.where(self._index(self._next))} has {size:,} tokens, more than a row's "
                    f"{self.seq_len:,}: raise --seq-len, or let --long-documents be split or truncate"
                )
            if self._offset == 0:
                self.counts["cut documents"] += 1
                self.counts["cut tokens"] += size - self.seq_len
            return self.seq_len

    def _index(self, document: int) -> int:
        """The document's index in the source."""
        epoch, place = divmod(document, self.num_documents)
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, Order(self.documents.blocks, self.seed, epoch)
        return self._order[1][place]

    def _tokens(self, document: int) -> tuple[np.ndarray, np.ndarray | None]:
        if document not in self._cache:
            self._cache[document] = self.documents[self._index(document)]
        return self._cache[document]

    def _row(self, pieces: list[Piece]) -> Iterator[np.ndarray]:
        """tokens, labels, positions, doc_ids of a row: [S] int64 each."""
        tokens, labels, positions, doc_ids = (np.zeros(self.seq_len, np.int64) for _ in range(4))
        labels[:] = IGNORE
        at = 0
        for number, piece in enumerate(pieces):
            content, learned = self._tokens(piece.document)
            if self.long_documents == "truncate":
                content = content[: self.seq_len]
            stop = at + piece.stop - piece.start
            tokens[at:stop] = content[piece.start : piece.stop]
            follow = content[piece.start + 1 : piece.stop + 1]
            labels[at : at + len(follow)] = follow
            if learned is not None:
                view = labels[at : at + len(follow)]
                view[~learned[piece.start + 1 : piece.start + 1 + len(follow)]] = IGNORE
            positions[at:stop] = np.arange(stop - at)
            doc_ids[at:stop] = number
            at = stop
        # Padding is a document of its own, whose tokens see nothing else and are seen by nothing else.
        positions[at:] = np.arange(self.seq_len - at)
        doc_ids[at:] = len(pieces)
        if self.positions == "continuous":
            positions = np.arange(self.seq_len)
        return iter((tokens, labels, positions, doc_ids))
