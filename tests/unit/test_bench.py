"""What the benches measure is right: every schedule's results are those of the kernel on one device."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bench_attention(script):
    return script("bench_attention")


@pytest.fixture
def bench_cases(script):
    return script("bench_cases")


@pytest.fixture
def bench_ranks(script):
    return script("bench_ranks")


def test_visible_pairs_are_counted_right(bench_cases) -> None:
    seq_len = 640
    i, zero = torch.arange(seq_len), torch.zeros((), dtype=torch.int64)
    for case in bench_cases.cases(seq_len, bench_cases.MASKS):
        assert int(case.mask(zero, zero, i[:, None], i[None, :]).sum()) == case.pairs, case.name


def test_every_schedule_is_measured_and_right(bench_attention, bench_cases) -> None:
    bench = bench_attention.Bench(300, 2, (4, 2, 8), "cpu", 1)
    (case,) = bench_cases.cases(300, ("documents-causal",))
    one, reference = bench.one_device(case)
    ready = [bench.schedule(name, case, reference, **how) for name, how in bench_attention.SCHEDULES.items()]
    bench.race([one, *ready], 1)
    for row in ready:
        assert min(row.ms["forward"], row.ms["backward"]) > 0
        assert row.errors.keys() == {"out", "dq", "dk", "dv"}
        assert max(row.errors.values()) < 1e-5, (row.name, row.errors)


def test_only_communication_with_nothing_beside_it_is_exposed(bench_ranks) -> None:
    assert bench_ranks.exposed_share([], [(0, 5)]) == 0.0
    assert bench_ranks.exposed_share([(0, 2), (5, 6)], [(1, 4), (8, 10)]) == 0.2
    assert bench_ranks.exposed_share([(0, 10)], [(0, 10)]) == 0.0


@pytest.mark.slow
def test_the_bench_of_real_ranks_runs_on_gloo() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "scripts/bench_ranks.py"]
    sizes = ["--device", "cpu", "--seq-len", "256", "--heads", "4", "2", "16", "--repeat", "1", "--mask", "causal"]
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for name in ("gather-grouped", "ring", "exchange", "ulysses"):
        assert f"│ {name}" in done.stdout
