"""--model FOLDER and --init-from FOLDER; the trained model in --out."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flexcp.commandline import parse
from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.models import Llama3, Llama3Config, build, from_pretrained, save_pretrained
from flexcp.train import check_all, run
from tests.ranks import Ranks
from tests.train import on_ranks

SHAPE = Llama3Config(vocab_size=256, dim=32, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=32, head_dim=16)
SETTINGS = {"seq_len": 100, "steps": 2, "warmup_steps": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = build(dataclasses.replace(SHAPE, tied_head=True), seed=3)
    return save_pretrained(model, tmp_path_factory.mktemp("init") / "m")


def test_a_run_begins_with_the_folders_weights_and_leaves_its_own(
    ranks: Callable[[int], Ranks], folder: Path, tmp_path: Path
) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    still = TrainConfig(init_from=str(folder), out=str(tmp_path / "o"), lr=0.0, **SETTINGS)
    alone = run(still)
    for one, other in zip(from_pretrained(folder).parameters(), from_pretrained(tmp_path / "o" / "model").parameters()):
        assert torch.equal(one, other)
    assert (tmp_path / "o" / "model" / "tokenizer_config.json").exists()
    both = ranks(2).run(on_ranks.train, dataclasses.replace(still, cp=2, lr=1e-2, out=str(tmp_path / "two")))
    assert both[0]["records"][0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-5)
    trained = from_pretrained(tmp_path / "two" / "model")
    weights = [float(p.detach().double().sum()) for p in trained.parameters()]
    assert weights == both[0]["weights"] == both[1]["weights"]
    # And on from there, by the same flag.
    again = run(dataclasses.replace(still, init_from=str(tmp_path / "two" / "model"), out=None))
    assert again[0]["loss"] < alone[0]["loss"]


def test_a_folders_shape_with_random_weights(folder: Path) -> None:
    made: list[Llama3] = []
    run(TrainConfig(model=str(folder), **SETTINGS), on_step=lambda model, record: made.append(model))
    assert made[0].config == dataclasses.replace(SHAPE, tied_head=True)
    hf = TrainConfig(model=str(folder), rope_precision="hf").model_config()
    assert hf.rope_precision == "hf"
    assert TrainConfig().model_config().num_layers == 2
    assert TrainConfig(model="llama3.2-1b", init_from="x").model_config().tied_head


def test_what_cannot_be_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    (tmp_path / "o" / "model").mkdir(parents=True)
    (tmp_path / "o" / "model" / "diary").touch()
    for config, words in (
        (TrainConfig(out=str(tmp_path / "o"), seq_len=64), "holds files, and no model to be replaced"),
        (TrainConfig(model=str(tmp_path)), f"--model {tmp_path}: {tmp_path}/config.json: model_type is"),
        (TrainConfig(model=str(tmp_path / "x")), "unknown model"),
        (TrainConfig(init_from=str(tmp_path / "x")), "is no folder"),
        (TrainConfig(init_from=str(tmp_path)), "model_type is"),
        (TrainConfig(model="llama3-debug", init_from=str(folder)), "tensor 'model.embed_tokens.weight' is [256, 32]"),
        (parse(["--rope-precision", "hg"]), "unknown rope_precision 'hg': did you mean hf"),
    ):
        with pytest.raises(UserError) as caught:
            check_all(config, None)
        assert words in str(caught.value)
