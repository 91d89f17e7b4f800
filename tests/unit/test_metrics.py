"""Numbers of a step: what is counted, against dense counting; where they go; what is missing gets a sentence."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

import flexcp
from flexcp import cost, flops, loggers, masks
from flexcp.checks import check
from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.evaluate import Evaluation
from flexcp.flops import VisiblePairs, peak_tflops, step_flops
from flexcp.meter import Record
from flexcp.metrics import Reporter
from flexcp.models import get_config
from flexcp.profiling import Profiler, steps_of
from flexcp.stopwatch import Stopwatch

S = 500
DOCUMENTS = torch.arange(S) // 130


def by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40 * (h + 1))


MASKS = {
    "causal": (masks.causal(), {}),
    "documents": (masks.causal() & masks.document(DOCUMENTS), {}),
    "full": (masks.full(), {}),
    "window": (masks.sliding_window(70), {}),
    "plain": (lambda b, h, q, kv: (q - kv) % 3 == 0, {}),
    "heads": (by_head, {"heads": 4}),
}


def dense_pairs(mask, heads: int) -> float:
    """Visible pairs per head, by looking at every pair."""
    index = torch.arange(S)
    over = torch.vmap(torch.vmap(mask, in_dims=(None, None, None, 0)), in_dims=(None, None, 0, None))
    return sum(int(over(torch.tensor(0), torch.tensor(h), index, index).sum()) for h in range(heads)) / heads


@pytest.mark.parametrize("name", MASKS)
def test_visible_pairs_are_those_of_the_mask(name: str) -> None:
    """Summed over the ranks, for every kind of communication and layout: none twice, none missed, no padding."""
    mask, more = MASKS[name]
    expected = dense_pairs(mask, more.get("heads", 1))
    for size, comm, balance in [
        *((1, "gather", "contiguous"), (2, "ring", "head_tail"), (3, "exchange", "contiguous")),
        *((2, "gather", "head_tail"), (4, "exchange", "head_tail"), (4, "ring", "contiguous")),
    ]:
        plans = [flexcp.plan(mask, S, size, rank=r, comm=comm, balance=balance, **more) for r in range(size)]
        assert sum(map(VisiblePairs(), plans)) == pytest.approx(expected, rel=1e-12), (size, comm, balance)


def test_visible_pairs_where_ranks_share_heads() -> None:
    plans = [flexcp.plan(masks.causal(), S, 2, rank=r, comm="ulysses") for r in range(2)]
    assert sum(map(VisiblePairs(), plans)) == S * (S + 1) // 2


def test_many_partial_blocks_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, _ = MASKS["plain"]
    plan = flexcp.plan(mask, S, 1, block_size=16)
    exact = VisiblePairs()(plan)
    monkeypatch.setattr(flops, "_MOST_BLOCKS", 100)
    assert VisiblePairs()(plan) == pytest.approx(exact, rel=0.05)


def test_operations_are_those_of_the_papers() -> None:
    """Llama 3 8B at 8,192 tokens: 6 N' T + 12 L H D S T."""
    model = get_config("llama3-8b")
    tokens = 8192
    matrices = 8_030_261_248 - 128_256 * 4096
    full = step_flops(model, tokens, 32 * tokens * tokens)
    assert full == 6 * matrices * tokens + 12 * 32 * 32 * 128 * tokens * tokens
    half = step_flops(model, tokens, 32 * tokens * tokens / 2)
    assert full - half == 6 * 32 * 32 * 128 * tokens * tokens
    tied = get_config("llama3.2-1b")  # its embedding is looked up and multiplied
    assert tied.tied_head
    assert step_flops(tied, 1, 0) == 6 * tied.num_params


def test_only_known_devices_have_a_peak() -> None:
    assert peak_tflops("NVIDIA H200", torch.bfloat16) == 989.4
    assert peak_tflops("NVIDIA H200", torch.float32) == 66.9
    assert peak_tflops("NVIDIA GeForce GTX 1080", torch.bfloat16) is None
    assert all({"name", "peak_tflops"} <= set(device) for device in cost.devices().values())


def test_a_stopwatch_counts_what_is_inside() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for _ in range(2):
        with watch.running():
            time.sleep(0.02)
        time.sleep(0.02)
    assert 0.04 <= watch.take() < 0.06 + 0.5
    assert watch.take() == 0


def record(step: int) -> Record:
    values = dict.fromkeys(Record.__annotations__, 0.5) | {"step": step, "memory_bytes": 1 << 20, "mfu": None}
    return Record(**values)  # type: ignore[typeddict-item]


def test_a_resumed_file_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    """What was written after it, and half a line, are cut off; a new run begins anew."""
    with Reporter(tmp_path, 9, quiet=True) as reporter:
        for step in (1, 2, 3, 4, 5):
            reporter.add(record(step))
            reporter.add_evaluation(step, Evaluation(1, 2.0, 0.5, ()))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')
    with Reporter(tmp_path, 9, quiet=True, done=3) as reporter:
        reporter.add(record(4))
    for name, steps in (("metrics.jsonl", [1, 2, 3, 4]), ("eval.jsonl", [1, 2, 3])):
        assert [json.loads(line)["step"] for line in (tmp_path / name).read_text().splitlines()] == steps
    with Reporter(tmp_path, 9, quiet=True):
        pass
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert not (tmp_path / "eval.jsonl").exists()


def test_mfu_is_shown_where_it_is_known(capsys: pytest.CaptureFixture) -> None:
    with Reporter(None, 2) as reporter:
        reporter.add(record(1))
        reporter.add(record(2) | {"mfu": 0.4125})  # type: ignore[arg-type]
    first, second = capsys.readouterr().out.splitlines()
    assert "MFU" not in first
    assert second.endswith("  1 MiB  MFU 41.2%")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"log": "wandb,tensorbord"}, "unknown log 'tensorbord': did you mean tensorboard"),
        ({"profile": "3"}, "--profile is '3', and must be START:STOP"),
        ({"profile": "5:5", "out": "x"}, "3:5 is steps 3 and 4"),
        ({"profile": "2:3"}, "--profile needs --out"),
        ({"memory_snapshot": 2}, "--memory-snapshot needs --out"),
        ({"save_every": -1}, "--save-every is -1, and must be 0 or more"),
        ({"save_mode": "later"}, "unknown save_mode 'later'"),
    ],
)
def test_wrong_settings_get_a_sentence(change: dict, words: str) -> None:
    with pytest.raises(UserError, match=words.replace("(", r"\(")):
        check(TrainConfig(**change))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # as find_spec sees a package that is not there
    monkeypatch.setattr(loggers, "find_spec", lambda wanted: None)
    with pytest.raises(UserError, match=rf"--log {name} needs the package {name}: pip install 'flexcp\[{name}\]'"):
        check(TrainConfig(log=name))


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (sink,) = loggers.open_sinks(["tensorboard"], tmp_path, {"lr": 0.1})
    with Reporter(tmp_path, 2, quiet=True, sinks=[sink]) as reporter:
        for step in (1, 2):
            reporter.add(record(step) | {"loss": float(step)})  # type: ignore[arg-type]
    events = reading.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0)]
    assert "mfu" not in events.Tags()["scalars"]  # unknown is absent, and not 0


def test_a_trace_has_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, 3, steps_of("2:4"), 0)
    for step in range(1, 6):
        profiler.begin(step)
        # Otherwise torch 2.11 warns, on a GPU, of events that are lost; other versions say nothing here.
        assert profiler._profile is None or profiler._profile.acc_events
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(2) + 1
        profiler.end(step)
    profiler.close()
    assert profiler.written == [tmp_path / "profile" / "rank-3.json"]
    names = {event.get("name") for event in json.loads(profiler.written[0].read_text())["traceEvents"]}
    assert {"step 2", "step 3", "aten::add"} <= names
    assert not {"step 1", "step 4"} & names


def test_a_run_that_ends_early_has_its_trace(tmp_path: Path) -> None:
    profiler = Profiler(tmp_path, 0, (1, 100), 0)
    profiler.begin(1)
    profiler.end(1)
    profiler.close()
    assert json.loads((tmp_path / "profile" / "rank-0.json").read_text())["traceEvents"]
