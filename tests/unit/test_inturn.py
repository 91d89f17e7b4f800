"""Ranks that take turns on one device compute what one rank computes, and a rank can be run again alone."""

from functools import partial

import pytest
import torch
from torch import Tensor

import flexcp
from flexcp import attention, masks
from flexcp.inturn import Replay, in_turn
from flexcp.kernel import Score

S, CP, H, G, D = 1000, 4, 4, 2, 16
SCALE = D**-0.5


def one_rank(q, k, v, dout, mask) -> list[Tensor]:
    plan = flexcp.plan(mask, S, 1)
    results = in_turn(1, partial(on_rank, [plan], q, k, v, dout))
    return [x[:, :, :S] for x in results[0][0]]


def on_rank(plans, q, k, v, dout, link, received) -> tuple[list[Tensor], list[Tensor | None]]:
    plan = plans[link.rank]
    schedule = plan.schedules["mask"]
    q, k, v, dout = (plan.shard(x, dim=2) for x in (q, k, v, dout))
    out, lse = attention.forward(q, k, v, schedule, Score(None), SCALE, link)
    grads = attention.backward(q, k, v, out, lse, dout, None, schedule, Score(None), SCALE, link)
    return [out, *grads[:3]], received


@pytest.mark.parametrize("comm", ["gather", "ring", "exchange"])
def test_ranks_in_turn_equal_one_rank(comm: str) -> None:
    torch.manual_seed(0)
    q, dout = (torch.randn(1, H, S, D, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(1, G, S, D, dtype=torch.float64) for _ in range(2))
    mask = masks.causal() & masks.document(torch.arange(S) // 300)
    plans = [flexcp.plan(mask, S, CP, rank=rank, comm=comm, balance="head_tail") for rank in range(CP)]
    results = in_turn(CP, partial(on_rank, plans, q, k, v, dout))
    for i, want in enumerate(one_rank(q, k, v, dout, mask)):
        got = torch.zeros_like(want)
        for plan, (tensors, _) in zip(plans, results):
            rows, real = plan.positions[0], plan.valid.flatten()
            got[:, :, rows[real]] = tensors[i][:, :, real]
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)

    tensors, received = results[2]
    again, _ = on_rank(plans, q, k, v, dout, Replay(CP, 2, received), [])
    for x, y in zip(tensors, again):
        assert torch.equal(x, y)


def test_a_rank_that_fails_ends_all() -> None:
    def rank(link, received) -> None:
        if link.rank == 1:
            raise ValueError("rank 1 cannot")
        link.all_gather(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 cannot"):
        in_turn(3, rank)
