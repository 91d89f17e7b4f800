"""Files that are damaged, cut short or do not fit: a sentence with names and sizes, for whatever bytes they hold."""

import functools
import json
import struct
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flexcp.models import (
    Checkpoint,
    CheckpointError,
    Llama3Config,
    build,
    check_names,
    from_pretrained,
    save_pretrained,
)
from flexcp.models.safetensors_in import read_header

TINY = Llama3Config(vocab_size=9, dim=8, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=8, head_dim=4)
HEAD, NORM = "lm_head.weight", "model.norm.weight"


def file_of(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(shape: list, start: int, stop: int, dtype: object = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in two files."""
    return save_pretrained(build(TINY, seed=0), tmp_path / "m", shard_bytes=2000)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(build(TINY, seed=0), tmp_path_factory.mktemp("fuzz") / "m")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "has 0 bytes, and is no safetensors file"),
        (b"\1\0\0", "has 3 bytes"),
        (file_of(b"", length=1 << 60), "announces a header of 1,152,921,504,606,846,976"),
        (file_of(b"\xff\xfe"), "damaged header"),
        (file_of(b"[" * 100_000), "damaged header"),
        (file_of([]), "damaged header (a list and no object)"),
        (file_of(b'{"a": {}, "a": {}}'), "a name stands in it twice"),
        (file_of({"a": 3}), "tensor 'a' has no dtype, shape and data_offsets"),
        (file_of({"a": tensor([-1], 0, 4)}), "tensor 'a' has the shape [-1]"),
        (file_of({"a": tensor([1], 0, 4, "F33")}), "tensor 'a' has the dtype 'F33'"),
        (file_of({"a": tensor([1], 0, 4, [])}), "tensor 'a' has the dtype '[]'"),
        (file_of({"a": tensor([1], 4, True)}), "tensor 'a' has the data_offsets"),
        (file_of({"a": tensor([2, 3], 0, 20)}, bytes(20)), "tensor 'a' [2, 3] of F32 lies in 20 bytes"),
        (file_of({"a": tensor([2], 0, 8)}, bytes(7)), "is cut short: tensor 'a' [2] ends at byte"),
        (file_of({"a": tensor([2], 0, 8)}, bytes(9)), "but its tensors end at"),
        (file_of({"a": tensor([1], 0, 4), "b": tensor([1], 2, 6)}, bytes(6)), "tensor 'b' begins at byte 2"),
        (file_of({"a": tensor([1], 4, 8)}, bytes(8)), "tensor 'a' begins at byte 4 of the data, not at 0"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(tmp_path / "x.safetensors")
    assert words in str(caught.value)
    assert str(tmp_path / "x.safetensors") in str(caught.value)


def test_every_place_at_which_a_file_is_cut(folder: Path, tmp_path: Path) -> None:
    content = (folder / "model-00001-of-00002.safetensors").read_bytes()
    for size in [*range(0, 20), *range(20, len(content), 97), len(content) - 1]:
        (folder / "model-00001-of-00002.safetensors").write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"model-00001-of-00002\.safetensors"):
            from_pretrained(folder)


def save(folder: Path, change: dict[str, torch.Tensor | None]) -> Path:
    """The model of `folder` in one file, with tensors replaced, added or (None) left out."""
    model = from_pretrained(folder)
    out = save_pretrained(model, folder.parent / "one")
    from safetensors.torch import load_file

    tensors = {k: v for k, v in (load_file(out / "model.safetensors") | change).items() if v is not None}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({HEAD: None}, ["tensor 'lm_head.weight' [9, 8] is missing in", "tie_word_embeddings"]),
        ({HEAD: torch.zeros(8, 9)}, ["model.safetensors: tensor 'lm_head.weight' is [8, 9]", "makes it [9, 8]"]),
        ({HEAD: torch.zeros(9, 8, dtype=torch.int8)}, ["tensor 'lm_head.weight' [9, 8] is I8"]),
        ({"model.layers.1.mlp.up_proj.weight": torch.zeros(3)}, ["model.layers.1.mlp.up_proj.weight' [3] is none"]),
        ({"model.layers.0.self_attn.q_proj.bias": torch.zeros(8)}, ["self_attn.q_proj.bias' [8] is none of a Llama"]),
    ],
)
def test_tensors_that_do_not_fit(folder: Path, change: dict, words: list[str]) -> None:
    out = save(folder, change)
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(out)
    for part in words:
        assert part in str(caught.value)
    assert str(out) in str(caught.value)


def test_a_derived_table_may_be_there(folder: Path) -> None:
    from_pretrained(save(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({HEAD: "model-00009-of-00002.safetensors"}, "no such file in the folder"),
        ({HEAD: "../m/model-00001-of-00002.safetensors"}, "is no file name"),
        ({HEAD: "/etc/passwd"}, "is no file name"),
        ({HEAD: 3}, "is no file name"),
        ({HEAD: "a\0b"}, "is no file name"),
        ({HEAD: "model-00001-of-00002.safetensors"}, "'lm_head.weight' is said to lie in model-00001-of-00002"),
        ({"x": "model-00001-of-00002.safetensors"}, "tensor 'x' is said to lie in"),
        ({NORM: None}, "holds tensor 'model.norm.weight', which model.safetensors.index.json does not name"),
    ],
)
def test_an_index_that_does_not_fit(folder: Path, change: dict, words: str) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    assert index["weight_map"][HEAD] == "model-00002-of-00002.safetensors"
    index["weight_map"] = {k: v for k, v in (index["weight_map"] | change).items() if v is not None}
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    assert words in str(caught.value)


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no such folder; nothing is downloaded"):
        Checkpoint(tmp_path / "x")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin may be a pickle, which is never opened"):
        Checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        from_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": []}')
    with pytest.raises(CheckpointError, match="has no weight_map"):
        Checkpoint(tmp_path)


def test_blocks_of_a_tensor(tmp_path: Path) -> None:
    """Any block, into any dtype, also in a tensor that is no contiguous one; a block that is not there is refused."""
    whole = torch.arange(60.0).reshape(12, 5)
    save_file({"t": whole}, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path) as checkpoint:
        out = torch.empty(4, 2, dtype=torch.float64)
        checkpoint.read("t", out, (3, 1))
        assert torch.equal(out, whole[3:7, 1:3].double())
        wide = torch.zeros(5, 12)
        checkpoint.read("t", wide.T)
        assert torch.equal(wide, whole.T)
        checkpoint.read("t", torch.empty(0, 5))
        with pytest.raises(CheckpointError, match=r"'t' is \[12, 5\], which has no block of \[4, 2\] at \[9, 0\]"):
            checkpoint.read("t", out, (9, 0))
        with pytest.raises(CheckpointError, match="'u' is missing"):
            checkpoint.read("u", out)


def load_or_refuse(folder: Path) -> None:
    """Loads, or raises the one exception with the sentence; any other fails the test."""
    try:
        with Checkpoint(folder) as checkpoint:
            check_names(TINY, checkpoint)
            for name, entry in checkpoint.tensors.items():
                checkpoint.read(name, torch.empty(entry.shape))
    except CheckpointError as error:
        words = str(error)
    else:
        return
    assert words
    assert "\n" not in words


@functools.cache
def whole_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        return (save_pretrained(build(TINY, seed=0), Path(folder) / "m") / "model.safetensors").read_bytes()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
counts = st.integers(-1, 40) | st.integers(0, 1 << 70)
names = st.sampled_from([HEAD, "model.norm.weight", "model.embed_tokens.weight", "x", ""])
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I8", "F4", "F33"]) | json_values,
        "shape": st.lists(counts, max_size=3) | json_values,
        "data_offsets": st.lists(counts, min_size=2, max_size=2) | json_values,
    }
)
headers = st.dictionaries(names, entries | json_values, max_size=3)


@settings(max_examples=600, deadline=None)
@given(headers | json_values, st.binary(max_size=60), st.none() | counts.filter(lambda n: 0 <= n < 1 << 64))
def test_fuzz_headers(scratch: Path, header: object, data: bytes, length: int | None) -> None:
    (scratch / "model.safetensors").write_bytes(file_of(header, data, length))
    load_or_refuse(scratch)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_fuzz_bytes(scratch: Path, content: bytes) -> None:
    (scratch / "model.safetensors").write_bytes(content)
    load_or_refuse(scratch)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_fuzz_flipped_bytes(scratch: Path, data: st.DataObject) -> None:
    """A real file with a few of the bytes of its header changed."""
    content = bytearray(whole_file())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, 900))] = data.draw(st.integers(0, 255))
    (scratch / "model.safetensors").write_bytes(bytes(content))
    load_or_refuse(scratch)


@settings(max_examples=400, deadline=None)
@given(
    st.fixed_dictionaries({"weight_map": st.dictionaries(names, json_values | st.just("model.safetensors"))})
    | json_values
)
def test_fuzz_indexes(scratch: Path, index: object) -> None:
    (scratch / "model.safetensors").write_bytes(whole_file())
    (scratch / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        load_or_refuse(scratch)
    finally:
        (scratch / "model.safetensors.index.json").unlink()
