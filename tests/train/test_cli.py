"""The program as a user runs it: three ways in, the same numbers; wrong uses end with one sentence and exit code 2."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from flexcp.meter import Record
from flexcp.train import main

ROOT = Path(__file__).parents[2]
SCRIPT = Path(sys.executable).parent / "flexcp.train"
MODULE = [sys.executable, "-m", "flexcp.train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "flexcp.train"]
SMALL = ["--seq-len", "200", "--steps", "3"]

MASKS = """
import torch

TABLE = torch.arange(150)

def late(b, h, q_idx, kv_idx):
    return TABLE[q_idx] >= kv_idx  # 150 and more: only what is planned for the whole row runs into it

def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx
"""


@dataclass
class Outcome:
    code: int
    out: str
    err: str
    seconds: float


def command(argv: list[str], cwd: Path, timeout_s: float = 60, **env: str) -> Outcome:
    """Runs a program with no terminal and nothing of torchrun's in its environment, for a minute at most."""
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    began = time.monotonic()
    done = subprocess.run(
        argv, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
    )
    return Outcome(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def limit_s() -> float:
    """Half a minute for a wrong use, on a machine that has a core to spare for it."""
    return 30 if os.getloadavg()[0] < 2 * (os.cpu_count() or 1) else 60


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory away from the checkout, with data, masks and a config file."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text").mkdir()
    for name in ("LICENSE", "pyproject.toml"):
        (folder / "text" / name).write_text((ROOT / name).read_text())
    (folder / "zeros.bin").write_bytes(b"text\0more")
    (folder / "my_masks.py").write_text(MASKS)
    (folder / "c.yaml").write_text("steps: 3\nseq_len: 100\ndata: text\ncp: 2\ncomm: ring\n")
    (folder / "typo.yaml").write_text("seq_lem: 100\n")
    return folder


@pytest.fixture(scope="module")
def runs(place: Path) -> dict[str, Outcome]:
    """Programs, two at a time: most of their time is the import of torch.

    `late` is the one that the module starts ranks for.
    """
    many = {
        "module": lambda: command([*MODULE, *SMALL, "--data", "text", "--out", "by-module"], place),
        "script": lambda: command([SCRIPT, "--config", "c.yaml", "--seq-len=200", "--out", "by-script"], place),
        "torchrun": lambda: command([*TORCHRUN, *SMALL, "--data", "text", "--cp", "2", "--out", "by-torchrun"], place),
        "late": lambda: command([*MODULE, *SMALL, "--data", "text", "--cp", "2", "--mask", "my_masks:late"], place),
        "torchrun cp 3": lambda: command([*TORCHRUN, *SMALL, "--cp", "3"], place),
    }
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(many, pool.map(lambda run: run(), many.values())))


def test_three_ways_in_give_the_same_numbers(runs: dict[str, Outcome], place: Path) -> None:
    """One rank, two of the launcher's and two of torchrun's."""
    for name in ("module", "script", "torchrun"):
        assert runs[name].code == 0, runs[name].err
        assert "step 3/3  loss" in runs[name].out
    one, *others = (records(place / f"by-{name}") for name in ("module", "script", "torchrun"))
    assert [record["step"] for record in one] == [1, 2, 3]
    assert set(one[0]) == set(Record.__annotations__)
    assert all(record["memory_bytes"] > 1 << 20 and record["step_s"] > 0 for record in one)
    for other in others:
        assert [r["tokens"] for r in other] == [r["tokens"] for r in one]
        assert [r["loss"] for r in other] == pytest.approx([r["loss"] for r in one], rel=1e-4)


def test_the_config_is_printed_and_saved(runs: dict[str, Outcome], place: Path) -> None:
    saved = (place / "by-script" / "config.yaml").read_text()
    assert saved in runs["script"].out
    values = yaml.safe_load(saved)
    assert (values["seq_len"], values["steps"], values["comm"], values["cp"]) == (200, 3, "ring", 2)


def test_the_checkouts_own_text_is_the_default(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """In this process, as the wrong uses below, to save the import of torch."""
    monkeypatch.chdir(ROOT)
    assert main(["--seq-len", "64", "--steps", "1"]) == 0
    out = capsys.readouterr().out
    assert "# data: " in out
    loss = float(out.split("step 1/1  loss ")[1].split()[0])
    assert 5 < loss < 6  # before the first step all bytes are about equally likely: ln 256 = 5.545


def test_a_wrong_use_ends_with_one_sentence(runs: dict[str, Outcome]) -> None:
    """`late` passes every check before the start and raises when the ranks plan: still one sentence, and no hang."""
    outcome = runs["late"]
    assert outcome.code == 2
    lines = outcome.err.strip().splitlines()
    assert len(lines) == 1, outcome.err
    assert lines[0].startswith("flexcp.train: error")
    assert "late raised IndexError" in lines[0]
    assert outcome.seconds < limit_s()


def test_torchrun_with_another_size_is_told_once(runs: dict[str, Outcome]) -> None:
    outcome = runs["torchrun cp 3"]
    assert outcome.code != 0
    told = [line for line in outcome.err.splitlines() if line.startswith("flexcp.train: error")]
    assert len(told) == 1
    assert "is a grid of 3 ranks, and 2 were started: start 3 rank(s)" in told[0]
    assert outcome.seconds < limit_s()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--seq-len", "0"], "--seq-len is 0, and must be at least 1"),
        (["--steps", "0"], "--steps is 0"),
        (["--cp", "0"], "--cp is 0"),
        (["--pp", "2"], "pipeline parallelism is not supported; use --cp, --tp and --dp-shard"),
        (["--tp", "4"], "--tp 4 cannot divide the model's 2 KV heads equally"),
        (["--dp-shard", "-1"], "no ranks have been started: start them with torchrun, or name a number"),
        (["--cp", "2", "--dp-shard", "2"], "--batch 1 rows cannot be divided equally over 2 data parallel ranks"),
        (["--grad-accum", "3"], "--grad-accum 3 is more than the 1 row(s) of a step"),
        (["--optim-step", "in_backward"], "pass --grad-clip None, or --optim-step after"),
        (["--lr", "-1"], "--lr is -1.0"),
        (["--stepz", "3"], "did you mean --steps"),
        (["--steps", "x"], "--steps is 'x', and must be an integer"),
        (["--model", "llama3-debgu"], "did you mean llama3-debug"),
        (["--comm", "gathr"], "did you mean gather"),
        (["--balance", "headtail"], "did you mean head_tail"),
        (["--dtype", "float23"], "did you mean float32"),
        (["--mask", "casual & document"], "did you mean causal"),
        (["--mask", "my_masks:casual"], "did you mean causal"),
        (["--mask", "no_masks:causal"], "there is no module 'no_masks'"),
        (["--data", "zeros.bin"], "zeros.bin is not UTF-8 text (byte 0x00 at offset 4)"),
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--out", "c.yaml"], "--out c.yaml cannot be written to"),
        (["--config", "typo.yaml"], "did you mean seq_len"),
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--model", "llama3-8b"], "llama3-8b with "),
        (["--model", "llama3-8b", "--cp", "4"], "each of the 4 rank(s) here has"),
        (["--seq-len", "999999999999"], "the longest sequence that fits is --seq-len"),
    ],
)
def test_wrong_uses(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, argv: list[str], words: str
) -> None:
    """The same program, called in this process to save the import of torch."""
    monkeypatch.chdir(place)
    data = [] if "--data" in argv else ["--data", "text"]
    assert main([*argv, *data]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert words in captured.err
