"""Every kind of --data gives its documents, and a sentence for what is no such file."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.data import open_documents
from flexcp.errors import UserError
from flexcp.packing import Reader
from flexcp.sources import JsonLines, field_of, write_bin

TEXTS = ["first", "second é", "", "x" * 50]


def texts_of(path: Path, field: str = "text") -> list[str]:
    documents = open_documents(str(path), field)
    return [bytes(documents[index][0].tolist()).decode() for index in range(sum(documents.blocks))]


def lines(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(lines([{"text": text, "n": 1} for text in TEXTS[:2]]) + "\n  \n")
    (tmp_path / "b.jsonl").write_text(lines([{"text": text} for text in TEXTS[2:]]).rstrip("\n"))
    assert texts_of(tmp_path / "a.jsonl") == TEXTS[:2]
    assert texts_of(tmp_path) == TEXTS
    described = str(open_documents(str(tmp_path)))
    assert described == "4 documents, field 'text' of JSON lines in 2 files; left out: 2 blank lines; tokens: bytes"
    digest = open_documents(str(tmp_path)).digest
    (tmp_path / "b.jsonl").write_text(lines([{"text": "other"}]))
    assert open_documents(str(tmp_path)).digest != digest


def test_parquet(tmp_path: Path) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"body": TEXTS, "n": [1, 2, 3, 4]}), tmp_path / "a.parquet", row_group_size=3)
    parquet.write_table(pa.table({"body": ["last"], "n": [5]}), tmp_path / "b.parquet")
    assert texts_of(tmp_path, "body") == [*TEXTS, "last"]
    documents = open_documents(str(tmp_path), "body")
    assert documents.blocks == [3, 1, 1]
    assert documents.where(3) == f"{tmp_path}/a.parquet row group 1 row 0"
    with pytest.raises(UserError, match="has no column 'text': name one of body, n by --data-field"):
        open_documents(str(tmp_path))
    with pytest.raises(UserError, match="'n' is of type int, and must be a text"):
        open_documents(str(tmp_path), "n")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UserError, match="is no Parquet file"):
        open_documents(str(tmp_path), "body")


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": TEXTS})
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows}).save_to_disk(tmp_path / "many")
    assert texts_of(tmp_path / "one") == TEXTS
    assert texts_of(tmp_path / "many" / "train") == TEXTS
    with pytest.raises(UserError, match="has the splits train"):
        open_documents(str(tmp_path / "many"))
    with pytest.raises(UserError, match="has no column 'body'"):
        open_documents(str(tmp_path / "one"), "body")


def test_tokens(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    assert write_bin(path, [[1, 2], [], [70_000]], separator=0) == 6
    documents = open_documents(str(path), vocab_size=70_001)
    assert [documents[index][0].tolist() for index in range(sum(documents.blocks))] == [[1, 2, 0], [0], [70_000, 0]]
    small = open_documents(str(path))
    with pytest.raises(UserError, match=r"x\.bin document 2 has the token 70000, and the model's .* ends at 255"):
        small[2]
    for change, words in (
        ('{"dtype": "uint8", "separator": 0}', "has dtype 'uint8'"),
        ('{"dtype": "uint16"}', "must have dtype and separator"),
        ("{", "needs x.bin.json beside it"),
    ):
        (tmp_path / "x.bin.json").write_text(change)
        with pytest.raises(UserError, match=words):
            open_documents(str(path))
    (tmp_path / "x.bin.json").write_text('{"dtype": "uint32", "separator": null}')
    assert open_documents(str(path), vocab_size=70_001).blocks == [1]
    path.write_bytes(bytes(5))
    with pytest.raises(UserError, match="has 5 bytes, which is no whole number of uint32 tokens"):
        open_documents(str(path))
    with pytest.raises(ValueError, match=r"outside 0\.\.65535"):
        write_bin(path, [[70_000]], 0, "uint16")
    with pytest.raises(ValueError, match="has the separator 0 in it"):
        write_bin(path, [[1, 0]], 0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]", "holds a list and no object"),
        ('{"body": "x"}', "line 1 has no 'text' (it has body): name the field by --data-field"),
        ('{"text": 3}', "'text' is of type int, and must be a text or a conversation"),
        ('{"text": []}', "line 1: a conversation must be a list of messages"),
        ('{"text": [{"role": "user"}]}', 'a message must be an object with the texts "role" and "content"'),
        ("\n", "has no document in it"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "x.jsonl").write_text(line + "\n")
    with pytest.raises(UserError) as caught:
        open_documents(str(tmp_path / "x.jsonl"))
    assert words in str(caught.value)


CHAT = [
    {"role": "user", "content": "2+2? <|eot_id|>"},
    {"role": "assistant", "content": "4"},
]


def test_of_a_conversation_the_answers_are_learned(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(lines([{"messages": CHAT}]))
    documents = open_documents(str(tmp_path / "x.jsonl"), "messages")
    tokens, learned = documents[0]
    assert learned is not None
    text = bytes(tokens.tolist())
    assert text.startswith(b"<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n2+2?")
    assert bytes(tokens[learned].tolist()) == b"4<|eot_id|>"
    batch = Reader(documents, len(tokens), 1, 0).next()
    labels = batch.labels[0][batch.labels[0] >= 0]
    assert bytes(labels.tolist()) == b"4<|eot_id|>"


def tokenizer_file(path: Path, special: list[str]) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator(["the cat sat on the mat"] * 5, trainer)
    made.save(str(path))
    return path


SPECIAL = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def test_a_tokenizer_of_a_file(tmp_path: Path) -> None:
    from flexcp.tokenizer import find_tokenizer, load_tokenizer

    path = tokenizer_file(tmp_path / "tokenizer.json", SPECIAL)
    assert find_tokenizer(None, str(tmp_path)) == find_tokenizer(str(tmp_path)) == path
    assert find_tokenizer("bytes", str(tmp_path)) is None
    with pytest.raises(UserError, match="there is no file"):
        find_tokenizer(str(tmp_path / "x"))
    tokenizer = load_tokenizer(path)
    tokens = tokenizer.encode("the cat é")
    assert len(tokens) < len("the cat é")
    assert tokenizer.decode(tokens.tolist()) == "the cat é"
    (tmp_path / "x.txt").write_text("the cat sat")
    documents = open_documents(str(tmp_path / "x.txt"), "text", tokenizer, 400)
    assert documents[0][0].tolist() == tokenizer.encode("the cat sat").tolist()
    assert str(documents).endswith(f"tokens: {path}")
    with pytest.raises(UserError, match=r"has \d+ tokens, and the model a vocabulary of 256"):
        open_documents(str(tmp_path / "x.txt"), "text", tokenizer, 256)
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(UserError, match=r"bad\.json is no tokenizer\.json"):
        load_tokenizer(tmp_path / "bad.json")


def test_special_tokens_in_a_content_are_text(tmp_path: Path) -> None:
    """A user who writes an end of turn ends no turn."""
    from flexcp.tokenizer import encode_chat, load_tokenizer

    tokenizer = load_tokenizer(tokenizer_file(tmp_path / "t.json", SPECIAL))
    begin, start, stop, end = (tokenizer.encode(text).tolist()[0] for text in SPECIAL)
    tokens, learned = encode_chat(tokenizer, CHAT)
    assert (tokens == end).sum() == 2
    assert (tokens == start).sum() == (tokens == stop).sum() == 2
    assert tokens[0] == begin
    assert tokens[learned].tolist() == [*tokenizer.encode("4"), end]
    plain = load_tokenizer(tokenizer_file(tmp_path / "plain.json", []))
    with pytest.raises(UserError, match=r"has no <\|start_header_id\|>, which conversations need"):
        encode_chat(plain, CHAT)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
messages = st.lists(st.fixed_dictionaries({"role": st.text(max_size=5), "content": st.text(max_size=5)}), max_size=3)
rows = st.fixed_dictionaries({"text": json_values | messages}).map(lambda row: json.dumps(row).encode())


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.jsonl"


@settings(max_examples=600, deadline=None)
@given(st.lists(rows | json_values.map(lambda v: json.dumps(v).encode()) | st.binary(max_size=30), max_size=4))
def test_fuzz_json_lines(scratch: Path, content: list[bytes]) -> None:
    """Whatever the bytes are: documents, or the one exception with a sentence."""
    scratch.write_bytes(b"\n".join(content))
    words = ""
    try:
        documents = open_documents(str(scratch))
        for index in range(sum(documents.blocks)):
            tokens, learned = documents[index]
            assert tokens.dtype == np.int64
            assert learned is None or learned.shape == tokens.shape
        Reader(documents, 8, 1, 0).next()
    except UserError as error:
        words = str(error)
    assert "\n" not in words


def test_where_a_line_lies(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"text": "a"}\n\n{"text": 1}\n')
    source = JsonLines([path], "text")
    assert source[0] == "a"
    with pytest.raises(UserError, match=r"x\.jsonl line 4"):
        source[1]
    with pytest.raises(UserError, match="it has none"):
        field_of({}, "text", "here")
