"""Files to documents, documents to rows: what goes in comes out, once, with the right label."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexcp
from flexcp.data import IGNORE, PackedRows, default_folder, read_corpus
from flexcp.errors import UserError

documents = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=6)


def expected_stream(rows: PackedRows, length: int) -> tuple[list[int], list[int]]:
    """Tokens and labels of the endless stream, walked document by document."""
    tokens, labels, epoch = [], [], 0
    while len(tokens) < length:
        order, _ = rows._epoch(epoch)
        for index in order:
            document = list(rows.documents[index])
            tokens += document
            labels += [*document[1:], IGNORE]
        epoch += 1
    return tokens[:length], labels[:length]


@settings(max_examples=200, deadline=None)
@given(documents, st.integers(1, 30), st.integers(1, 3), st.integers(0, 5))
def test_rows_are_the_stream(texts: list[bytes], seq_len: int, batch: int, seed: int) -> None:
    """No token and no label is lost or repeated at a seam: of rows, steps, documents or epochs."""
    rows = PackedRows(texts, seq_len, batch, seed)
    batches = [rows.batch(step) for step in range(4)]
    tokens, labels = expected_stream(rows, 4 * batch * seq_len)
    assert torch.cat([b.tokens for b in batches]).flatten().tolist() == tokens
    assert torch.cat([b.labels for b in batches]).flatten().tolist() == labels
    for got in batches:
        assert got.tokens.shape == got.labels.shape == got.positions.shape == got.doc_ids.shape == (batch, seq_len)
        for ids, positions in zip(got.doc_ids.tolist(), got.positions.tolist()):
            assert ids[0] == positions[0] == 0
            for left, right, before, after in zip(ids, ids[1:], positions, positions[1:]):
                assert (right, after) in ((left, before + 1), (left + 1, 0))


@settings(max_examples=50, deadline=None)
@given(documents, st.integers(0, 5))
def test_an_epoch_has_every_document_once(texts: list[bytes], seed: int) -> None:
    rows = PackedRows(texts, seq_len=sum(map(len, texts)), batch=1, seed=seed)
    for epoch in range(3):
        assert sorted(rows._epoch(epoch)[0]) == list(range(len(texts)))
        assert sorted(rows.batch(epoch).tokens[0].tolist()) == sorted(b"".join(texts))


def test_a_step_does_not_depend_on_those_before() -> None:
    texts = [bytes([n] * (n + 1)) for n in range(30)]
    rows, late = PackedRows(texts, 64, 2, 3), PackedRows(texts, 64, 2, 3)
    for step in range(40):
        batch = rows.batch(step)
    assert torch.equal(batch.tokens, late.batch(39).tokens)
    assert not torch.equal(PackedRows(texts, 64, 2, 4).batch(0).tokens, rows.batch(0).tokens)
    assert rows._epoch(0)[0] != rows._epoch(1)[0]


def test_the_order_is_written_in_stone() -> None:
    """Sorting by hash must give the same order on every machine and in every version."""
    order, starts = PackedRows([b"a", b"bc", b"def", b"g", b"hi"], 3, 1, seed=7)._epoch(0)
    assert order == [1, 2, 3, 0, 4]
    assert starts == [0, 2, 5, 6, 7]


def test_labels_1_to_8_over_two_ranks_lose_none() -> None:
    """Shifting a shard would lose the label at the seam: they are shifted before (reported elsewhere: label 5 lost)."""
    batch = PackedRows([bytes(range(9))], seq_len=8, batch=1, seed=0).batch(0)
    assert batch.labels.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    for balance in ("contiguous", "head_tail"):
        got = []
        for rank in range(2):
            plan = flexcp.plan(lambda b, h, q, kv: q >= kv, 8, 2, rank=rank, block_size=2, balance=balance)
            labels, tokens = plan.shard(batch.labels, pad=IGNORE), plan.shard(batch.tokens, pad=0)
            assert torch.equal(labels[plan.valid], tokens[plan.valid] + 1)
            got += labels[plan.valid].tolist()
        assert sorted(got) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_length_7_document_keeps_its_last_token() -> None:
    batch = PackedRows([b"1234567"], seq_len=7, batch=1, seed=0).batch(0)
    assert bytes(batch.tokens[0].tolist()) == b"1234567"
    rows = []
    for rank in range(2):
        plan = flexcp.plan(lambda b, h, q, kv: q >= kv, 7, 2, rank=rank, block_size=2)
        rows += plan.shard(batch.tokens, pad=0)[plan.valid].tolist()
    assert sorted(rows) == sorted(b"1234567")


def test_a_document_longer_than_twice_the_row_is_not_lost() -> None:
    text = bytes(range(100))
    rows = PackedRows([text], seq_len=40, batch=1, seed=0)
    assert b"".join(bytes(rows.batch(step).tokens[0].tolist()) for step in range(5)) == text * 2


def test_no_documents_is_refused() -> None:
    for texts in ([], [b"a", b""]):
        with pytest.raises(ValueError, match="at least one document"):
            PackedRows(texts, 4, 1, 0)


def test_a_folder_gives_its_text_files_sorted(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, content in {
        "b.txt": b"bee",
        "a.py": "é".encode(),
        "sub/c.md": b"sea",
        "zeros.bin": b"a\0b",
        "latin.txt": b"\xff\xfe",
        "empty": b"",
        "picture.svg": b"<svg/>",
        ".git/config": b"x",
        ".hidden/x": b"x",
        "__pycache__/x.pyc": b"x",
        "node_modules/x.js": b"x",
        "a.egg-info/PKG-INFO": b"x",
        "old-run/metrics.jsonl": b"{}",
        "old-run/config.yaml": b"steps: 1",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    corpus = read_corpus(str(tmp_path))
    assert corpus.documents == ("é".encode(), b"bee", b"sea")
    assert corpus.skipped == {"empty": 1, "binary": 2, "drawing": 1}
    assert str(corpus) == "3 documents, 8 bytes; left out: 1 empty, 2 binary, 1 drawing"
    assert corpus.digest() == read_corpus(str(tmp_path)).digest()
    (tmp_path / "b.txt").write_bytes(b"be")
    assert corpus.digest() != read_corpus(str(tmp_path)).digest()


def test_a_file_is_one_document(tmp_path: Path) -> None:
    file = tmp_path / "x.txt"
    file.write_text("hello")
    assert read_corpus(str(file)).documents == (b"hello",)


def test_the_default_is_the_checkout() -> None:
    folder = default_folder()
    assert (folder / "flexcp" / "data.py").is_file()
    assert (folder / "flexcp" / "data.py").read_bytes() in read_corpus().documents


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "does not exist"),
        ("empty.txt", "is empty"),
        ("zeros.bin", r"is not UTF-8 text \(byte 0x00 at offset 1\)"),
        ("latin.txt", r"is not UTF-8 text \(byte 0xff at offset 0\)"),
        ("folder", r"has no text file \(1 binary found\)"),
        ("hollow", r"has no text file \(nothing found\)"),
        ("/dev/null", "neither a file nor a folder"),
    ],
)
def test_data_that_cannot_be_used(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "zeros.bin").write_bytes(b"a\0b")
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "folder" / "zeros.bin").write_bytes(b"a\0b")
    with pytest.raises(UserError, match=words) as caught:
        read_corpus(str(tmp_path / name))
    assert "\n" not in str(caught.value)
