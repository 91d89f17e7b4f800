"""A run that was killed goes on as if it had not been: the same losses, and every token once; on any grid of ranks."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flexcp.config import TrainConfig
from flexcp.data import open_documents
from flexcp.packing import Order
from tests.ranks import Ranks, free_port
from tests.train import on_ranks_resume as on
from tests.train.test_cli import MODULE, ROOT, command, records

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # on_ranks.py

GetRanks = Callable[[int], Ranks]
SEQ_LEN, BATCH = 96, 4


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 600 bytes, which end within rows and go on over steps and epochs."""
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text()
    sizes = [1 + (37 * number * number) % 600 for number in range(20)]
    lines = [json.dumps({"text": license_text[11 * n : 11 * n + size]}) for n, size in enumerate(sizes)]
    path.write_text("\n".join(lines))
    return path


def settings(text: Path, **more: Any) -> dict[str, Any]:
    return {"seq_len": SEQ_LEN, "batch": BATCH, "steps": 20, "data": str(text), "save_every": 4} | more


def stream(text: Path, count: int, seed: int = 0) -> list[int]:
    """The documents' tokens end to end, epoch after epoch, as any run has to read them."""
    documents, found, epoch = open_documents(str(text)), [], 0
    while sum(map(len, found)) < count:
        order = Order(documents.blocks, seed, epoch)
        found += [documents[order[place]][0] for place in range(sum(documents.blocks))]
        epoch += 1
    return np.concatenate(found)[:count].tolist()


def tokens_of(results: list[dict], grid: dict[str, int]) -> list[int]:
    """What all data parallel ranks have read, in the order of steps and rows."""
    dp = grid.get("dp_shard", 1) * grid.get("dp_replicate", 1)
    shares = [results[rank]["read"] for rank in range(0, len(results), len(results) // dp)]
    for rank, result in enumerate(results):  # ranks that share rows have got the same
        assert result["read"] == shares[rank * dp // len(results)]
    return [token for step in zip(*shares) for share in step for token in share]


def run_on(ranks: GetRanks, grid: dict[str, Any], config: dict[str, Any], stop: int | None = None) -> list[dict]:
    size = int(np.prod([n for n in grid.values() if isinstance(n, int)]))
    if size == 1:
        return [on.train(TrainConfig(**config), stop)]
    return ranks(size).run(on.train, TrainConfig(**grid, **config), stop)


# Steps, the grid of the run that is stopped, and those that go on from it.
CHAINS = [
    (8, {"cp": 2}, [{"cp": 2}, {"cp": 4}]),
    (8, {"dp_shard": 4}, [{"dp_shard": 2}, {"dp_replicate": 2, "cp": 2}]),
    pytest.param(20, {"cp": 2}, [{"cp": 2}, {"cp": 4}, {"dp_shard": 2}, {}], marks=pytest.mark.slow),
    pytest.param(20, {"dp_shard": 4}, [{"dp_shard": 4}, {"dp_shard": 2}, {"cp": 2}], marks=pytest.mark.slow),
    pytest.param(20, {"tp": 2}, [{"tp": 2}, {"tp": 2, "cp": 2}, {"dp_shard": 2}], marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("steps", "first", "others"), CHAINS)
def test_a_run_goes_on_where_it_was(
    ranks: GetRanks, text: Path, tmp_path: Path, steps: int, first: dict[str, int], others: list[dict[str, int]]
) -> None:
    """Stopped after half of its steps and one, with a checkpoint of the half; bit for bit on the same grid, 1e-5 on
    others.
    """
    half = steps // 2
    config = settings(text, steps=steps, save_every=half)
    straight = run_on(ranks, first, config | {"out": str(tmp_path / "straight")})
    whole = stream(text, steps * BATCH * SEQ_LEN)
    assert tokens_of(straight, first) == whole
    stopped = run_on(ranks, first, config | {"out": str(tmp_path / "stopped")}, half + 1)
    assert len(stopped[0]["losses"]) == half + 1
    for number, grid in enumerate(others):
        out = tmp_path / f"resumed-{number}"
        shutil.copytree(tmp_path / "stopped", out)
        resumed = run_on(ranks, grid, config | {"out": str(out), "resume": "auto"})
        assert tokens_of(resumed, grid) == whole[half * BATCH * SEQ_LEN :]
        for result in resumed:
            expected = {step: loss for step, loss in straight[0]["losses"].items() if step > half}
            if grid == first:
                assert result["losses"] == expected
            else:
                assert result["losses"] == pytest.approx(expected, rel=0, abs=1e-5)
        assert [record["step"] for record in records(out)] == list(range(1, steps + 1))
        assert [r["tokens_seen"] for r in records(out)] == [r["tokens_seen"] for r in records(tmp_path / "straight")]


def _children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


NCCL = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def _environment(device: str) -> dict[str, str]:
    """Nothing of torchrun's, and GPUs only where they are meant; the checkout is found from anywhere."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    clean["PYTHONPATH"] = os.pathsep.join(paths)
    return clean if device == "cuda" else clean | {"CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def one_core() -> Iterator[None]:
    """A rank alone then has one thread: with two, its sums now and then differ in the last bit (docs/log.md)."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def _wait_for_records(out: Path, count: int, process: subprocess.Popen, seconds: float) -> None:
    written, deadline = out / "metrics.jsonl", time.monotonic() + seconds
    while not (written.exists() and written.read_text().count("\n") >= count):
        assert process.poll() is None, f"exit code {process.returncode}"
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks' processes in /proc")
@pytest.mark.parametrize(
    ("cp", "device"),
    [(1, "cpu"), pytest.param(2, "cpu", marks=pytest.mark.slow), pytest.param(2, "cuda", marks=NCCL)],
)
def test_killed_and_resumed_is_straight(
    text: Path, tmp_path: Path, cp: int, device: str, request: pytest.FixtureRequest
) -> None:
    """The program: 20 steps, and 20 steps with a SIGKILL of a rank after 10: losses bit for bit the same.

    On GPUs twice as many, since a step is soon over, and not bit for bit: torch adds up the embedding's gradient in any
    order there.
    """
    if cp == 1:
        request.getfixturevalue("one_core")
    steps, seconds, env = (20, 60, _environment(device)) if device == "cpu" else (40, 240, _environment(device))
    argv = list(MODULE)
    for name, value in settings(text, cp=cp, save_every=5, steps=steps).items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    straight = command([*argv, "--out", "straight"], tmp_path, seconds, **env)
    assert straight.code == 0, straight.err
    process = subprocess.Popen(
        [*argv, "--out", "killed"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _wait_for_records(tmp_path / "killed", 10, process, seconds)
    os.kill(process.pid if cp == 1 else _children(process.pid)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if cp == 1 else 128 + signal.SIGKILL)
    assert cp == 1 or "rank 1 was killed by SIGKILL" in err
    assert len(records(tmp_path / "killed")) < steps
    resumed = command([*argv, "--out", "killed", "--resume", "auto"], tmp_path, seconds, **env)
    assert resumed.code == 0, resumed.err
    done = int(resumed.out.split("# resumed from killed/checkpoints/step-")[1].split(":")[0])
    assert 5 <= done < steps
    seen = done * BATCH * SEQ_LEN - _ends(straight, done, tmp_path)
    assert f"step {done} of {steps}, {seen:,} tokens seen" in resumed.out
    one, other = (records(tmp_path / name) for name in ("straight", "killed"))
    for name in ("step", "loss", "grad_norm", "tokens_seen", "lr"):
        expected = [record[name] for record in one]
        near = pytest.approx(expected, rel=1e-2 if name == "grad_norm" else 1e-3)
        assert [record[name] for record in other] == (expected if device == "cpu" else near)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NCCL)])
def test_a_rank_that_loses_another_ends_within_the_timeout(text: Path, tmp_path: Path, device: str) -> None:
    """Without a launcher that would end it: the ranks are started as on two nodes."""
    argv, timeout_s = [*MODULE, "--out", "run", "--timeout-s", "20"], 20
    for name, value in settings(text, cp=2, steps=100_000).items():
        argv += [f"--{name.replace('_', '-')}", str(value)]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            env = _environment(device) | group | {"RANK": str(rank), "OMP_NUM_THREADS": "1"}
            error = stack.enter_context(open(tmp_path / f"rank-{rank}.txt", "wb"))
            process = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL, stderr=error)
            stack.callback(process.wait)
            stack.callback(process.kill)
            ranks.append(process)
        _wait_for_records(tmp_path / "run", 3, ranks[0], 60 if device == "cpu" else 240)
        ranks[1].kill()
        code = ranks[0].wait(timeout_s + 60)  # NCCL's watchdog writes down what it knows first
        assert code != 0
        assert (tmp_path / "rank-0.txt").read_text().strip()


def _ends(straight: Any, done: int, place: Path) -> int:
    """Tokens without a label in the first steps: the last ones of documents."""
    return sum(BATCH * SEQ_LEN - record["tokens"] for record in records(place / "straight")[:done])


REFUSED = [
    ({"seed": 1}, "was saved by a run with --seed 0, and this one has 1: pass --seed 0, or begin a new run"),
    ({"seq_len": 64}, "with --seq-len 96, and this one has 64"),
    ({"dtype": "float64"}, "with --dtype float32"),
    ({"steps": 3}, "is of step 4, and --steps is 3: raise --steps"),
    ({"resume": "none"}, "holds checkpoints of an earlier run, the newest of step 4: --resume auto goes on from it"),
    ({"resume": "nowhere"}, "--resume nowhere does not exist"),
    ({"out": None}, "--resume auto needs --out"),
]


@pytest.fixture(scope="module")
def saved(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank with a checkpoint of step 4."""
    out = tmp_path_factory.mktemp("saved") / "run"
    on.train(TrainConfig(**settings(text, steps=4, out=str(out))))
    return out


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[str(change) for change, _ in REFUSED])
def test_what_does_not_fit_is_refused(text: Path, saved: Path, change: dict[str, Any], words: str) -> None:
    before = {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}
    config = settings(text) | {"out": str(saved), "resume": "auto", "save_every": 0} | change
    assert words in on.said(TrainConfig(**config))
    assert before == {path: path.read_bytes() for path in saved.rglob("*") if path.is_file()}


def test_other_data_is_refused(text: Path, saved: Path, tmp_path: Path) -> None:
    fewer = tmp_path / "text.jsonl"
    fewer.write_text("\n".join(text.read_text().splitlines()[:-1]))
    config = settings(text, out=str(saved), resume="auto")
    words = on.said(TrainConfig(**config | {"data": str(fewer)}))
    assert "was trained on other data (20 documents" in words
    assert "than this run has (19 documents" in words


def test_another_model_is_refused(text: Path, saved: Path, tmp_path: Path) -> None:
    fields = json.loads((saved / "model" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": 1}))
    config = settings(text, out=str(saved), resume="auto", model=str(tmp_path))
    words = on.said(TrainConfig(**config))
    assert "holds a model with num_layers=2, and" in words
    assert "has 1: resume with the model of the run" in words


def test_a_checkpoint_of_another_run_starts_a_branch(text: Path, saved: Path, tmp_path: Path) -> None:
    """A run's folder or a checkpoint's, into a folder of its own; not among the checkpoints of another."""
    for place in (saved, saved / "checkpoints" / "step-00000004"):
        out = tmp_path / place.name
        config = settings(text, steps=6, lr=1e-3, out=str(out), resume=str(place))
        assert list(on.train(TrainConfig(**config))["losses"]) == [5, 6]
        assert [record["step"] for record in records(out)] == [5, 6]
    config = settings(text, out=str(tmp_path / saved.name), resume=str(saved))
    assert "holds other checkpoints, the newest of step 6" in on.said(TrainConfig(**config))


def test_a_finished_run_is_not_trained_again(text: Path, saved: Path, capsys: pytest.CaptureFixture) -> None:
    from flexcp.train import run

    assert run(TrainConfig(**settings(text, steps=4, out=str(saved), resume="auto")), verbose=True) == []
    assert "step 4 of 4 (nothing is left to train)" in capsys.readouterr().out
    assert [record["step"] for record in records(saved)] == [1, 2, 3, 4]


def test_what_changes_and_may_is_told(text: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from flexcp.train import run

    config = settings(text, steps=5, lr=0.5, out=str(tmp_path), resume=str(saved), comm="ring", save_every=0)
    run(TrainConfig(**config), verbose=True)
    shown = capsys.readouterr().out
    assert "# --lr is 0.5 now, and was 0.003" in shown
    assert "# --steps is 5 now, and was 4" in shown
    assert "--comm is" not in shown


def test_ranks_that_see_different_checkpoints_are_stopped(ranks: GetRanks, text: Path, tmp_path: Path) -> None:
    for name, steps in (("a", 4), ("b", 8)):
        on.train(TrainConfig(**settings(text, steps=steps, out=str(tmp_path / name))))
    config = TrainConfig(**settings(text, out=str(tmp_path / "a"), resume="auto", cp=2))
    for words in ranks(2).run(on.said, config, {"out": str(tmp_path / "b")}):
        assert "rank 1 would go on from step 8 and rank 0 from step 4" in words


def test_a_full_disk_ends_the_run_on_all_ranks_at_once(ranks: GetRanks, text: Path, tmp_path: Path) -> None:
    config = TrainConfig(**settings(text, cp=2, save_every=2, out=str(tmp_path)))
    (words, steps), other = ranks(2).run(on.train_on_a_full_disk, config)
    assert "the checkpoint of step 4 could not be written (rank 1: No space left on device" in words
    assert (words, steps) == tuple(other)
    assert steps[-1] in range(5, 7)  # told with the next step, or the one after it, or before the next save
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-00000002"]


def test_first_fit_keeps_what_waits(text: Path, tmp_path: Path) -> None:
    """Documents that fit no row yet are part of the position."""
    config = settings(text, packing="first_fit", long_documents="truncate", steps=8, save_every=3)
    straight = on.train(TrainConfig(**config, out=str(tmp_path / "a")))
    on.train(TrainConfig(**config, out=str(tmp_path / "b")), 4)
    resumed = on.train(TrainConfig(**config, out=str(tmp_path / "b"), resume="auto"))
    assert resumed["read"] == straight["read"][3:]
    assert resumed["losses"] == {step: loss for step, loss in straight["losses"].items() if step > 3}


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw8bit", "adamw_bf16"])
def test_other_optimizers_go_on_bit_for_bit(ranks: GetRanks, text: Path, tmp_path: Path, optim: str) -> None:
    """8-bit moments and stochastic rounding, divided over two ranks."""
    grid = {"dp_shard": 2}
    config = settings(text, optim=optim, dtype="bfloat16", steps=8)
    straight = run_on(ranks, grid, config | {"out": str(tmp_path / "a")})
    run_on(ranks, grid, config | {"out": str(tmp_path / "b")}, 5)
    resumed = run_on(ranks, grid, config | {"out": str(tmp_path / "b"), "resume": "auto"})
    for result in resumed:
        assert result["losses"] == {step: loss for step, loss in straight[0]["losses"].items() if step > 4}
    half = str(tmp_path / "b" / "checkpoints" / "step-00000004")
    other = run_on(ranks, {"cp": 2, "fsdp": "off"}, config | {"out": str(tmp_path / "c"), "resume": half})
    assert other[0]["losses"] == pytest.approx(resumed[0]["losses"], rel=0.01)


def test_fp8_and_other_checkpointing_go_on(text: Path, tmp_path: Path) -> None:
    """Wrapped layers keep their names, so that --ac may change, and what is computed stays the same bit for bit."""
    config = TrainConfig(**settings(text, fp8="rowwise", ac="full", steps=4, save_every=2, out=str(tmp_path / "a")))
    straight = on.train(config)
    config = dataclasses.replace(config, out=str(tmp_path / "b"))
    on.train(config, 3)
    resumed = on.train(dataclasses.replace(config, resume="auto", ac="none"))
    assert resumed["losses"] == {step: loss for step, loss in straight["losses"].items() if step > 2}


def test_low_precision_weights_keep_their_fp32_copies(text: Path, tmp_path: Path) -> None:
    config = TrainConfig(**settings(text, dtype="bfloat16", steps=6, save_every=3, out=str(tmp_path / "a")))
    straight = on.train(config)
    config = dataclasses.replace(config, out=str(tmp_path / "b"))
    on.train(config, 4)
    resumed = on.train(dataclasses.replace(config, resume="auto"))
    assert resumed["losses"] == {step: loss for step, loss in straight["losses"].items() if step > 3}
