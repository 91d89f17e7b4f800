"""scripts/bench_memory.py on a CPU at a tiny size: every command measures, and says what it leaves out."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_memory.py"
TINY = ["--model", "llama3-debug", "--device", "cpu", "--optim", "adamw"]


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_memory", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_memory"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_memory"]


def rows(text: str) -> list[str]:
    """Those with a loss, of about ln 256, and not with a time that is as long."""
    return [line for line in text.splitlines() if " 5." in line and "s a step" not in line]


def test_two_ranks_of_two_in_turn(bench, capsys) -> None:
    bench.main(["million", *TINY, "--seq-len", "1024", "--world", "2", "--ranks", "0", "1"])
    out = capsys.readouterr().out
    assert [row.split()[1] for row in rows(out)] == ["0", "1"]
    assert "ranks of 2 at 450 GB/s" in out
    assert "not measured: waiting for slower ranks" in out
    assert not dist.is_initialized()


def test_the_gpu_is_chosen_before_a_mesh_is_made(bench, monkeypatch) -> None:
    """Otherwise DeviceMesh warns and takes the GPU of the simulated rank's number, which need not be there."""
    calls: list[object] = []

    def mesh(*_: object) -> None:
        calls.append("mesh")
        raise KeyboardInterrupt  # this machine need not have a GPU

    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(bench, "Mesh", mesh)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench.Common, "limits", lambda *_: bench.Limits(1 << 40, 1 << 40))
    with pytest.raises(KeyboardInterrupt):
        bench.million(bench.Common(model="llama3-debug", device="cuda"), ranks=(3,))
    assert calls == [0, "mesh"]
    assert not dist.is_initialized()


def test_alone_and_documents(bench, capsys) -> None:
    bench.main(["alone", *TINY, "--seq-len", "512", "--limit-s", "0"])
    assert "left out: 1 step(s) would take" in capsys.readouterr().out
    bench.main(["documents", *TINY, "--seq-len", "512", "--length", "128"])
    assert len(rows(capsys.readouterr().out)) == 1


@pytest.mark.slow
def test_every_technique_is_measured(bench, capsys) -> None:
    bench.main(["cost", *TINY, "--seq-len", "512", "--steps", "1"])
    out = capsys.readouterr().out
    assert len(rows(out)) == 8
    assert out.count("to the row above") == 7
    losses = {line.split()[-1] for line in rows(out)}
    assert len(losses) == 1, "the first step's loss is the same with each technique"
