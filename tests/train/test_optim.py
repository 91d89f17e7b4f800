"""Sums over ranks, buckets, the schedule, the optimizers, the global norm, steps within backward."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flexcp.gradients import gradient_buckets, sum_gradients
from flexcp.optim import Optimizer, StepInBackward, learning_rate
from tests.ranks import Ranks
from tests.train import on_ranks


@given(st.lists(st.integers(1, 20)), st.integers(1, 30))
def test_buckets_hold_everything_in_order(sizes: list[int], limit: int) -> None:
    buckets = gradient_buckets(sizes, limit)
    assert [index for bucket in buckets for index in bucket] == list(range(len(sizes)))
    assert all(len(bucket) == 1 or sum(sizes[index] for index in bucket) <= limit for bucket in buckets)


def test_gradients_are_summed_and_a_missing_one_is_zero(ranks: Callable[[int], Ranks]) -> None:
    for floats, bfloats in ranks(4).run(on_ranks.sum_of_gradients, 2):
        assert floats.tolist() == [7.0] * 3  # 1 + 2 + 4: rank 2 has none
        assert bfloats.tolist() == [[10.0] * 2] * 2
        assert bfloats.dtype == torch.bfloat16


def test_one_rank_needs_no_group() -> None:
    param = nn.Parameter(torch.ones(2))
    sum_gradients([param], None)
    assert param.grad.tolist() == [0.0, 0.0]


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 100, 10, 2.0) for step in range(100)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10 + 89 // 2] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 44 / 89)))
    assert learning_rate(0, 1, 0, 2.0) == 2.0
    assert learning_rate(2, 3, 5, 1.0) == pytest.approx(0.6)  # a warm-up longer than the run


def test_a_step_equals_torch_and_clips() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    theirs.load_state_dict(ours.state_dict())
    optimizer = Optimizer(ours, weight_decay=0.1)
    groups = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    x = torch.randn(5, 4, dtype=torch.float64)
    for step, lr in enumerate((0.1, 0.01)):
        optimizer.begin(step, lr)
        for model in (ours, theirs):
            model(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in expected.param_groups:
            group["lr"] = lr
        expected.step()
        expected.zero_grad()
        assert optimizer.step(0.5) == pytest.approx(float(norm))
        assert all(param.grad is None for param in ours.parameters())
        for one, other in zip(ours.parameters(), theirs.parameters()):
            torch.testing.assert_close(one, other, rtol=1e-14, atol=1e-14)


COMPILES = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("adamw8bit", "adamw_bf16")]  # torchao's steps


@pytest.mark.parametrize("kind", ["adamw", *COMPILES])
def test_small_steps_of_a_bf16_weight_add_up(kind: str) -> None:
    """1 + 1e-4 is 1 in bf16: without an fp32 copy or random rounding a hundred such steps would change nothing."""
    size = 1 if kind == "adamw" else 4096
    model = nn.Linear(size, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = Optimizer(model, kind, weight_decay=0.0)
    for step in range(100):
        optimizer.begin(step, 1e-4)
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert model.weight.float().mean().item() == pytest.approx(0.99, abs=0.004 if kind == "adamw" else 0.0008)
    assert model.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["adamw", *COMPILES[:1]])
def test_steps_within_backward_are_the_same_steps(kind: str) -> None:
    """And afterwards no parameter has a gradient left."""
    torch.manual_seed(0)
    one, other = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch.bfloat16) for _ in range(2))
    other.load_state_dict(one.state_dict())
    after = Optimizer(one, kind, weight_decay=0.1)
    within = StepInBackward(Optimizer(other, kind, weight_decay=0.1))
    # Whole numbers of random bits are drawn in another order within backward, so only "adamw" is equal bit for bit.
    tolerance = 0.0 if kind == "adamw" else 0.02
    for step in range(3):
        x = torch.randn(8, 64, dtype=torch.bfloat16)
        norms = []
        for model, stepper in ((one, after), (other, within)):
            stepper.begin(step, 1e-2)
            model(x).square().mean().backward()
            norms.append(stepper.step())
        assert norms[1] == pytest.approx(norms[0], rel=1e-2)
        for a, b in zip(one.parameters(), other.parameters()):
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
            assert a.grad is b.grad is None
    with pytest.raises(ValueError, match="cannot be clipped"):
        within.step(1.0)


@pytest.mark.slow
def test_8_bit_moments_are_near_to_fp32_ones() -> None:
    torch.manual_seed(0)
    one, other = (nn.Linear(128, 64, bias=False) for _ in range(2))
    other.load_state_dict(one.state_dict())
    start = one.weight.detach().clone()
    for kind, model in (("adamw", one), ("adamw8bit", other)):
        optimizer = Optimizer(model, kind, weight_decay=0.1)
        for step in range(20):
            optimizer.begin(step, 1e-2)
            x = torch.randn(16, 128, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            optimizer.step(1.0)
    assert (one.weight - other.weight).norm() < 0.05 * (one.weight - start).norm()
    assert type(optimizer.inner.state[other.weight]["exp_avg"]).__name__ == "OptimState8bit"


def test_the_global_norm_of_mixed_meshes(ranks: Callable[[int], Ranks]) -> None:
    """Divided by two axes, by one, by the other, uneven, and not at all; torch's own clip refuses it."""
    for norm, clipped, torchs in ranks(4).run(on_ranks.norm_of_mixed_meshes):
        assert norm == pytest.approx(math.sqrt(sum(n * n for n in range(30)) + 15 * 4 + 21 * 9 + 12 * 16), rel=1e-12)
        assert clipped == pytest.approx(2.0, rel=1e-6)
        assert "DTensor" in torchs or "mesh" in torchs
