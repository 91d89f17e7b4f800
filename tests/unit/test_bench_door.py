"""scripts/bench_door.py runs, at a tiny size on a CPU, and counts no recompile."""

import importlib.util
from pathlib import Path

import pytest


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_runs(capsys) -> None:
    path = Path(__file__).parents[2] / "scripts" / "bench_door.py"
    spec = importlib.util.spec_from_file_location("bench_door", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main("cpu", "llama3-debug", 128, 2, 1, "aot_eager")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 23
    assert lines[-1].split()[-1] == "0"
    assert float(lines[-3].split()[-1]) < 1e-5
