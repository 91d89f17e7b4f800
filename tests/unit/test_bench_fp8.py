"""scripts/bench fp8 runs at a tiny size on a CPU, every part in every recipe, and leaves nothing behind."""

import importlib.util
from pathlib import Path

import pytest


def test_every_part_is_timed_in_every_recipe(capsys: pytest.CaptureFixture) -> None:
    path = Path(__file__).parents[2] / "scripts" / "bench_fp8.py"
    spec = importlib.util.spec_from_file_location("bench_fp8", path)
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    times = bench.fp8("cpu", "llama3-debug", 128, 1, compiled=False)
    assert set(times) == {(part, recipe) for part in bench.PARTS for recipe in bench.RECIPES}
    assert all(ms > 0 for ms in times.values())
    shown = capsys.readouterr().out
    assert "rowwise_with_gw_hp" in shown
    assert "times bf16" in shown
