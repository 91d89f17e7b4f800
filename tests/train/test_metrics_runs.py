"""Records of runs: what does not depend on the ranks does not, and what one rank sees, all tell."""

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexcp.config import TrainConfig
from flexcp.data import IGNORE, open_documents
from flexcp.inputs import make_reader
from flexcp.models import build, get_config
from flexcp.train import main
from tests.ranks import Ranks
from tests.train import on_ranks, reference
from tests.train.test_cli import SCRIPT, command, records

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # on_ranks.py

GetRanks = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    words = (Path(__file__).parents[2] / "LICENSE").read_text()
    path.write_text("\n".join(json.dumps({"text": words[n * 90 : n * 97 + 40]}) for n in range(12)))
    return path


def settings(text: Path, **more: Any) -> dict[str, Any]:
    return {"seq_len": 256, "batch": 2, "steps": 2, "data": str(text), "packing": "first_fit"} | more


def test_counts_do_not_depend_on_the_ranks(ranks: GetRanks, text: Path) -> None:
    """Tokens and operations of a step are those of one rank: neither times nor divided by cp or dp; no padding."""
    alone = on_ranks.train(TrainConfig(**settings(text)))["records"]
    grids = ({"cp": 2, "comm": "ring"}, {"dp_shard": 2}, {"cp": 2, "comm": "exchange", "grad_accum": 2})
    for grid in grids:
        both = ranks(2).run(on_ranks.train, TrainConfig(**settings(text), **grid))
        for record, other, expected in zip(both[0]["records"], both[1]["records"], alone):
            assert record == other  # all ranks have the same record, times too
            assert record["tokens_seen"] == expected["tokens_seen"]
            step_s = record["step_s"]
            for name in ("tflops_per_device", "tflops_per_device_full"):
                total, one = record[name] * 2 * step_s, expected[name] * expected["step_s"]
                assert total == pytest.approx(one, rel=1e-9), (grid, name)
            assert record["tokens_per_s"] * step_s == pytest.approx(expected["tokens_per_s"] * expected["step_s"])
            assert record["tokens_per_s_per_device"] * 2 == pytest.approx(record["tokens_per_s"])
            assert (record["mfu"], record["mfu_full"]) == (None, None)
            assert record["tflops_per_device"] < record["tflops_per_device_full"]
            assert 0 < record["data_s"] + record["plan_s"] < step_s
            assert (record["comm_wait_s"] > 0) == ("cp" in grid)
    assert all(record["comm_wait_s"] == 0 for record in alone)


def test_tokens_are_those_of_documents(text: Path) -> None:
    config = TrainConfig(**settings(text))
    reader = make_reader(config, open_documents(str(text)))
    for record in on_ranks.train(config)["records"]:
        batch = reader.next()
        read = int((batch.tokens != 0).sum())  # the text has no zero bytes, and padding is zeros
        assert record["tokens_per_s"] * record["step_s"] == pytest.approx(read)
        assert record["tokens"] == batch.num_labels < read < 2 * 256  # ends of documents have no label; rows are padded


def test_the_largest_loss_of_a_rank(ranks: GetRanks, text: Path) -> None:
    """Two ranks, contiguous: each has half of every row."""
    config = TrainConfig(**settings(text, cp=2, balance="contiguous", steps=1))
    record = ranks(2).run(on_ranks.train, config)[0]["records"][0]
    batch = make_reader(config, open_documents(str(text))).next()
    model = build(get_config("llama3-debug"), seed=config.seed)
    losses = reference.token_losses(model, batch, reference.causal_documents(batch.doc_ids)).detach()
    halves = [part[label != IGNORE].mean() for part, label in zip(losses.chunk(2, 1), batch.labels.chunk(2, 1))]
    assert record["loss"] == pytest.approx(float(losses[batch.labels != IGNORE].mean()), rel=1e-5)
    assert record["loss_max"] == pytest.approx(float(torch.stack(halves).max()), rel=1e-5)
    assert record["loss_max"] > record["loss"]


def test_a_snapshot_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["--memory-snapshot", "2", "--out", str(tmp_path)]) == 2
    assert "shows the memory of a GPU, and this run is on a CPU: leave it out" in capsys.readouterr().err


@pytest.mark.slow
def test_services_get_a_run_that_goes_on(text: Path, tmp_path: Path) -> None:
    """The program with all of them, offline, twice: the second run goes on in the same run of each service."""
    for name in ("wandb", "trackio", "tensorboard"):
        pytest.importorskip(name)
    argv = [str(SCRIPT), "--seq-len", "128", "--data", str(text), "--out", "run", "--save-every", "2"]
    argv += ["--log", "tensorboard,wandb,trackio", "--profile", "2:3"]
    env = {"WANDB_MODE": "offline", "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    for steps, resume in ((2, "none"), (4, "auto")):
        outcome = command([*argv, "--steps", str(steps), "--resume", resume], tmp_path, **env)
        assert outcome.code == 0, outcome.err
    assert [record["step"] for record in records(tmp_path / "run")] == [1, 2, 3, 4]
    run_id = (tmp_path / "run" / "run_id").read_text()
    offline = [path for path in (tmp_path / "run" / "wandb").glob("offline-run-*") if path.name.endswith(run_id)]
    assert offline
    assert all(list(path.glob("*.wandb")) for path in offline)
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    assert (tmp_path / "run" / "profile" / "rank-0.json").exists()
    with sqlite3.connect(tmp_path / "trackio" / "flexcp.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [(name, step) for name, step, _ in rows] == [(f"run-{run_id}", step) for step in (1, 2, 3, 4)]
    assert "loss" in json.loads(rows[0][2])
    assert os.path.getsize(tmp_path / "run" / "profile" / "rank-0.json") > 10_000
