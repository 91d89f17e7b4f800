"""Checkpoints of `transformers`: same logits, same gradients, and back without a bit changed."""

import dataclasses
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flexcp.models import CheckpointError, build, from_hf, from_pretrained, get_config, save_pretrained
from tests.ranks import Ranks
from tests.train import on_ranks_hf

hf = pytest.importorskip("tests.hf")

GetRanks = Callable[[int], Ranks]
KINDS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied": {"tie_word_embeddings": True},
    "llama3 scaling": {"scaling": hf.LLAMA3_ROPE},
    "heads wider than the model": {"head_dim": 16, "num_key_value_heads": 1},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for kind, fields in KINDS.items():
        made[kind] = tmp_path_factory.mktemp("hf") / "model"
        hf.llama(**fields).save_pretrained(made[kind])
    return made


def tokens_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(60, (2, 131), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_transformers(ranks: GetRanks, folders: dict[str, Path], kind: str) -> None:
    """fp32 at cp 1, 2 and 4: within 1e-5 of the largest, in a row that needs padding."""
    tokens, labels = tokens_and_labels()
    theirs = hf.llama(**KINDS[kind])
    logits = theirs(tokens).logits
    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    expected = {from_hf(name): param.grad for name, param in theirs.named_parameters()}
    for cp, comm in ((1, "auto"), (2, "gather"), (2, "ring"), (4, "gather"), (4, "ring")):
        args = (str(folders[kind]), tokens, labels, comm)
        if cp == 1:
            results = [on_ranks_hf.logits_and_gradients(*args)]
        else:
            results = ranks(cp).run(on_ranks_hf.logits_and_gradients, *args)
        for result in results:
            assert (result["logits"] - logits.detach()).abs().max() < 1e-5 * max(
                1.0, float(logits.detach().abs().max())
            )
            assert set(result["grads"]) == set(expected)
            for name, grad in expected.items():
                error = (result["grads"][name] - grad).abs().max()
                assert error < 1e-5 * max(1.0, float(grad.abs().max())), (name, cp, comm)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shard_bytes", [10**9, 12_000])
def test_there_and_back_changes_no_bit(folders: dict[str, Path], tmp_path: Path, kind: str, shard_bytes: int) -> None:
    original = hf.LlamaForCausalLM.from_pretrained(folders[kind], attn_implementation="eager")
    save_pretrained(from_pretrained(folders[kind]), tmp_path / "out", origin=folders[kind], shard_bytes=shard_bytes)
    back = hf.LlamaForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    for (name, one), (other_name, other) in zip(original.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other_name
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name
    tokens, _ = tokens_and_labels()
    with torch.no_grad():
        assert torch.equal(original(tokens).logits, back(tokens).logits)
    for name in ("rope_parameters", "eos_token_id", "bos_token_id", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(original.config, name) == getattr(back.config, name)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 2) == (shard_bytes == 12_000)
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    if len(files) > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        stored = [load_file(tmp_path / "out" / file) for file in files]
        assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in stored for t in tensors.values())
        assert set(index["weight_map"].values()) == set(files)
        assert all(sum(t.nbytes for t in s.values()) <= shard_bytes or len(s) == 1 for s in stored)


def reshard(folder: Path, out: Path, seed: int) -> None:
    """The folder's tensors in three files, the index in random order, and a consolidated file of nonsense beside."""
    tensors = load_file(folder / "model.safetensors")
    names = list(tensors)
    random.Random(seed).shuffle(names)
    out.mkdir()
    shutil.copy(folder / "config.json", out)
    weight_map = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        part = names[number::3]
        save_file({name: tensors[name] for name in part}, out / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    random.Random(seed).shuffle(names)
    index = {"metadata": {"total_size": 0}, "weight_map": {name: weight_map[name] for name in names}}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({name: torch.zeros(1) for name in names}, out / "consolidated.safetensors")
    save_file({name: torch.zeros(1) for name in names}, out / "model.safetensors")


@pytest.mark.parametrize("kind", ["gqa", "tied"])
def test_three_files_and_a_shuffled_index(folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    reshard(folders[kind], tmp_path / "three", seed=5)
    one, three = from_pretrained(folders[kind]), from_pretrained(tmp_path / "three")
    for (name, p), q in zip(one.named_parameters(), three.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_tied_head_that_is_there_too(folders: dict[str, Path], tmp_path: Path) -> None:
    """The same head twice is one; another one, or zeros, is not quietly left aside."""
    shutil.copytree(folders["tied"], tmp_path / "m")
    tensors = load_file(folders["tied"] / "model.safetensors")
    assert "lm_head.weight" not in tensors
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "m" / "model.safetensors")
    one, both = from_pretrained(folders["tied"]), from_pretrained(tmp_path / "m")
    for p, q in zip(one.parameters(), both.parameters(), strict=True):
        assert torch.equal(p, q)
    for change in (lambda: head[7:].mul_(2), lambda: head.zero_()):
        change()
        save_file(tensors | {"lm_head.weight": head}, tmp_path / "m" / "model.safetensors")
        with pytest.raises(CheckpointError, match=r"'lm_head.weight' \[60, 32\] differs from the embedding in row"):
            from_pretrained(tmp_path / "m")
    save_file(tensors | {"lm_head.weight": head[:5].clone()}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not as the embedding"):
        from_pretrained(tmp_path / "m")


def test_dtypes_are_cast_when_asked_to(folders: dict[str, Path], tmp_path: Path) -> None:
    fp32, bf16 = from_pretrained(folders["gqa"]), from_pretrained(folders["gqa"], dtype=torch.bfloat16)
    for p, q in zip(fp32.parameters(), bf16.parameters(), strict=True):
        assert torch.equal(p.to(torch.bfloat16), q)
    save_pretrained(bf16, tmp_path / "m")
    theirs = hf.LlamaForCausalLM.from_pretrained(tmp_path / "m")
    assert theirs.dtype == torch.bfloat16
    assert from_pretrained(tmp_path / "m").embed.weight.dtype == torch.bfloat16
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"is BF16 and 'lm_head.weight' is F32|is F32 and .* is BF16"):
        from_pretrained(tmp_path / "m")
    assert from_pretrained(tmp_path / "m", dtype=torch.float32).head.weight.dtype == torch.float32


def test_hf_precision_gives_the_logits_of_long_positions(folders: dict[str, Path]) -> None:
    """At position 200,000 fp32 phases are off by 0.01: with them, as transformers has them, the logits agree."""
    tokens, _ = tokens_and_labels()
    positions = torch.arange(200_000, 200_130)[None]
    with torch.no_grad():
        expected = hf.llama()(tokens, position_ids=positions.expand(2, -1)).logits
        got = from_pretrained(folders["gqa"], rope_precision="hf")(tokens, positions)
        exact = from_pretrained(folders["gqa"])(tokens, positions)
    assert (got - expected).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
    assert (exact - expected).abs().max() > (got - expected).abs().max()


def test_companions_are_copied_and_a_folder_is_replaced_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(folders["gqa"], tmp_path / "origin")
    (tmp_path / "origin" / "tokenizer.json").write_text("{}")
    (tmp_path / "origin" / "pytorch_model.bin").write_text("pickle")
    model = from_pretrained(tmp_path / "origin")
    out = save_pretrained(model, tmp_path / "a" / "out", origin=tmp_path / "origin", shard_bytes=12_000)
    assert (out / "tokenizer.json").read_text() == "{}"
    assert not (out / "pytorch_model.bin").exists()
    save_pretrained(model, out)
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "diary").touch()
    with pytest.raises(CheckpointError, match="holds files, and no model"):
        save_pretrained(model, tmp_path / "mine")
    with pytest.raises(CheckpointError, match="is a file"):
        save_pretrained(model, tmp_path / "mine" / "diary")


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(get_config("llama3-debug"), num_layers=1)
    save_pretrained(build(config, seed=0), tmp_path / "m")
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    from flexcp.models import safetensors_out

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr(safetensors_out, "_write_tensor", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save_pretrained(build(config, seed=1), tmp_path / "m")
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_8b_checkpoint_is_loaded_in_the_memory_of_the_shard(tmp_path: Path) -> None:
    """16 GB in 4 files that the disk does not hold; one rank of 128 takes its rows: its shard and half a GiB at most.

    The largest tensor alone has twice that.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.load_8b", str(tmp_path), "128"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["checkpoint_bytes"] == 2 * 8_030_261_248
    assert report["shard_bytes"] > report["checkpoint_bytes"] / 129
    assert report["peak_bytes"] < report["shard_bytes"] + (1 << 29), report
    assert report["last_row"] == [1.0, 2.0, 3.0]
