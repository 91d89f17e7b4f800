"""Sums over ranks, buckets, the schedule, AdamW with fp32 copies."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flexcp.optim import AdamW, gradient_buckets, learning_rate, sum_gradients
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
    optimizer = AdamW(ours, weight_decay=0.1)
    groups = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    x = torch.randn(5, 4, dtype=torch.float64)
    for lr in (0.1, 0.01):
        for model in (ours, theirs):
            model(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        for group in expected.param_groups:
            group["lr"] = lr
        expected.step()
        expected.zero_grad()
        assert optimizer.step(lr, grad_clip=0.5) == pytest.approx(float(norm))
        assert all(param.grad is None for param in ours.parameters())
        for one, other in zip(ours.parameters(), theirs.parameters()):
            assert torch.equal(one, other)


def test_small_steps_of_a_bf16_weight_add_up() -> None:
    """1 + 1e-4 is 1 in bf16: without an fp32 copy a hundred such steps would change nothing."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = AdamW(model, weight_decay=0.0)
    for _ in range(100):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step(1e-4, None)
    assert model.weight.item() == pytest.approx(0.99, abs=0.004)
    assert model.weight.dtype == torch.bfloat16
