"""What scripts/bench attention measures is right: every schedule's results are those of the kernel on one device."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_attention.py"


@pytest.fixture(scope="module")
def bench_attention():
    spec = importlib.util.spec_from_file_location("bench_attention", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_visible_pairs_are_counted_right(bench_attention) -> None:
    import torch

    seq_len = 640
    i, zero = torch.arange(seq_len), torch.zeros((), dtype=torch.int64)
    for case in bench_attention.cases(seq_len, bench_attention.MASKS):
        assert int(case.mask(zero, zero, i[:, None], i[None, :]).sum()) == case.pairs, case.name


def test_every_schedule_is_measured_and_right(bench_attention) -> None:
    bench = bench_attention.Bench(300, 2, (4, 2, 8), "cpu", 1)
    (case,) = bench_attention.cases(300, ("documents-causal",))
    _, reference = bench.one_device(case)
    for name, how in bench_attention.SCHEDULES.items():
        row = bench.schedule(name, case, reference, **how)
        assert row.forward > 0
        assert row.backward > 0
        assert row.errors.keys() == {"out", "dq", "dk", "dv"}
        assert max(row.errors.values()) < 1e-5, (name, row.errors)
