"""Runs on the kinds of data and with held-out data: the same at any group size, and told to the user."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.train import check_all, main, run
from tests.ranks import Ranks
from tests.train import on_ranks

SETTINGS = {"seq_len": 300, "batch": 2, "steps": 3, "warmup_steps": 0}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "x.jsonl"
    rows = []
    for n in range(12):
        question, answer = (
            {"role": "user", "content": f"{n}+1?"},
            {"role": "assistant", "content": str(n + 1) * (n + 1)},
        )
        rows.append(json.dumps({"messages": [question, answer] * (1 + n % 3)}))
    path.write_text("\n".join(rows))
    return path


@pytest.mark.parametrize("packing", ["concat", "first_fit"])
def test_conversations_train_the_same_at_cp_2_and_4(ranks: Callable[[int], Ranks], chat: Path, packing: str) -> None:
    """Masked labels, padding of rows, and a shard whose labels are all ignored: the losses agree, held out, too."""
    config = TrainConfig(
        data=str(chat), data_field="messages", packing=packing, tokenizer="bytes", long_documents="truncate", **SETTINGS
    )
    alone = run(config)
    assert all(0 < record["tokens"] < 300 for record in alone)  # of 600: most are questions and headers
    for cp in (2, 4):
        for result in ranks(cp).run(on_ranks.train, dataclasses.replace(config, cp=cp)):
            assert [r["tokens"] for r in result["records"]] == [r["tokens"] for r in alone]
            assert [r["loss"] for r in result["records"]] == pytest.approx([r["loss"] for r in alone], rel=1e-4)


def test_held_out_loss_is_written_and_shown(
    chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    argv = ["--seq-len", "300", "--steps", "3", "--data-field", "messages", "--data", str(chat), "--packing"]
    argv += ["first_fit", "--long-documents", "truncate"]
    argv += ["--eval-data", str(chat), "--eval-every", "2", "--eval-batches", "2", "--out", str(tmp_path / "o")]
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "step 2/3  held out: loss" in told
    assert "step 3/3  held out: loss" in told
    read = next(line for line in told.splitlines() if line.startswith("# read: "))
    assert "padding" in read
    assert "cut tokens" in read
    two, three = (json.loads(line) for line in (tmp_path / "o" / "eval.jsonl").read_text().splitlines())
    assert (two["step"], three["step"]) == (2, 3)
    assert three["loss"] < two["loss"]
    assert [bucket["first"] for bucket in two["buckets"]] == [0, 64, 128, 256]
    assert sum(bucket["tokens"] for bucket in two["buckets"]) == two["tokens"] > 0
    weighted = sum(bucket["loss"] * bucket["tokens"] for bucket in two["buckets"] if bucket["tokens"])
    assert weighted / two["tokens"] == pytest.approx(two["loss"], rel=1e-9)


def test_wrong_data_is_told_before_anything_starts(chat: Path, tmp_path: Path) -> None:
    for change, words in (
        ({"data_field": "text"}, "has no 'text' (it has messages)"),
        ({"eval_data": str(tmp_path / "x")}, f"--eval-data {tmp_path / 'x'} does not exist"),
        ({"packing": "firstfit"}, "unknown packing 'firstfit': did you mean first_fit"),
        ({"positions": "restart"}, "unknown positions 'restart'"),
        ({"long_documents": "drop"}, "unknown long_documents 'drop'"),
        ({"long_documents": "refuse"}, "more than a row's 300"),
        ({"eval_every": -1}, "--eval-every is -1"),
        ({"tokenizer": str(tmp_path)}, "there is no file"),
    ):
        config = TrainConfig(**{"data": str(chat), "data_field": "messages", **SETTINGS, **change})
        with pytest.raises(UserError) as caught:
            check_all(config, None)
        assert words in str(caught.value)
