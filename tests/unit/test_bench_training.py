"""scripts/bench training: runs of the trainer side by side, judged by what they leave behind."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexcp.config import TrainConfig
from flexcp.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--steps", "2", "--seq-len", "600", "--data", str(ROOT / "LICENSE")]


@pytest.fixture
def bench(script):
    return script("bench_training")


@pytest.fixture
def runs(script):
    return script("bench_runs")


def record(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "loss": loss}


def command(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/bench.py", "training", arguments[0], "--device", "cpu", "--out", str(out)]
        + [*arguments[1:], "--", *TINY],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_grid_is_read(runs) -> None:
    assert runs.grid_flags("1") == []
    assert runs.grid_flags("cp4xdp2") == ["--cp", "4", "--dp-shard", "2"]
    assert runs.grid_flags("rep2xtp2:ulysses") == ["--dp-replicate", "2", "--tp", "2", "--comm", "ulysses"]
    for wrong in ("pp2", "cp", "2", "cp2,dp2"):
        with pytest.raises(UserError, match="write 1, or axes"):
            runs.grid_flags(wrong)


@pytest.mark.parametrize(
    ("others", "code", "words"),
    [
        ([5.0, 4.0 + 3e-4], 0, "Equal: 2 of 2 steps, 7.5e-05 (limit 1e-04)"),
        ([5.0, 4.0 + 5e-4], 1, "NOT EQUAL: 2 of 2 steps, 1.2e-04 (limit 1e-04)"),
        ([5.0], 1, "NOT EQUAL: 1 of 2 steps, 0.0e+00"),
        ([], 1, "NOT EQUAL: 0 of 2 steps"),
    ],
)
def test_losses_that_differ_or_lack_are_not_equal(
    bench, runs, monkeypatch, capsys, others: list[float], code: int, words: str
) -> None:
    losses = {"1": [5.0, 4.0], "cp2": others}

    def train(self, name: str, argv: list[str], ends: float):
        assert ("--cp" in argv) == (name == "cp2")
        return runs.Run(TrainConfig(), [record(i, loss) for i, loss in enumerate(losses[name])], 1.0, None)

    monkeypatch.setattr(runs.Runs, "train", train)
    assert bench.main(["equal", "--grid", "1", "cp2", "--", *TINY]) == code
    assert words in capsys.readouterr().out


def test_the_search_ends_at_the_longest(bench) -> None:
    for true, first in ((1200, 1000), (1200, 4000), (990, 1000), (1000, 1000)):
        tried = []
        low, high = bench.search(first, 10, lambda n, true=true, tried=tried: tried.append(n) or n <= true, 40, 10_000)
        assert (low, high) == (true, true + 10)
        assert tried[0] == first
        assert len(set(tried)) == len(tried)
    assert bench.search(1000, 10, lambda n: True, 40, 1200) == (1200, None)
    assert bench.search(1000, 10, lambda n: False, 40, 1200) == (0, 10)
    assert bench.search(1000, 10, lambda n: True if n < 1100 else None, 40, 9999) == (1000, None)


@pytest.mark.slow
def test_a_run_is_measured_and_leaves_no_model(tmp_path: Path) -> None:
    done = command("throughput", "--grid", "cp2", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("│  cp2")]
    assert row.count("│") == 14
    assert len((tmp_path / "cp2" / "metrics.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "cp2" / "model").exists()


def test_a_run_that_fails_is_told(runs, tmp_path: Path) -> None:
    bench = runs.Runs(device="cpu", out=str(tmp_path))
    failed = bench.train("wrong", ["--mask", "nonsense"], float("inf"))
    assert failed.failure is not None
    assert failed.failure.startswith("exit code 2: ")
    assert "Unknown mask 'nonsense'" in failed.failure
    late = bench.train("late", TINY, 0.0)
    assert late.failure is not None
    assert "the time was over" in late.failure


@pytest.mark.slow
def test_grids_are_equal_and_the_longest_is_found(tmp_path: Path) -> None:
    done = command("equal", "--grid", "1", "cp2:ring", "cp2xdp2", "--limit", "1e-5", out=tmp_path)
    assert done.returncode == 1
    assert "cp2xdp2: exit code 2: flexcp.train: error: --batch 1 rows cannot be divided" in done.stdout
    done = command("equal", "--grid", "1", "cp2:ring", "--torchrun", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Equal: 2 of 2 steps" in done.stdout
    done = command("longest", "--grid", "cp2", "--most", "600", out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "512 tokens (as given): trains" in done.stdout
    assert "longest that trains: 512 tokens; shortest that does not: not reached" in done.stdout
