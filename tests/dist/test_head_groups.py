"""Pipelining over groups of KV heads changes no number, and every head keeps its global index."""

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

import flexcp
from tests import matrix


def equal_in_groups(comm: str, mask_name: str) -> list[int]:
    """Collectives of a forward pass, by number of groups; asserts that the results are the same."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    mask, more = matrix.flexcp_mask(mask_name, 500)
    x = [torch.randn(1, heads, 500, 16, generator=torch.Generator().manual_seed(heads)) for heads in (8, 4, 4)]
    if mask_name == "per_head":
        mask, more = (lambda b, h, q, kv: (q >= kv) & (q - kv < (h + 1) * 40)), {"heads": 8}
    scale = torch.arange(8.0)

    def score(s, b, h, q, kv):
        return s + scale[h] * 0.1 * (q - kv)

    results, calls = [], []
    for groups in (1, 2, 3, 4):
        plan = flexcp.plan(mask, 500, mesh, comm=comm, balance="head_tail", head_groups=groups, **more)
        leaves = [plan.shard(t, dim=2).requires_grad_() for t in x]
        with flexcp.context_parallel(plan):
            out = flex_attention(*leaves, score_mod=score, block_mask=plan.block_mask, enable_gqa=True)
            calls.append(plan.link.counters.collective_calls)
            results.append((out.detach(), *torch.autograd.grad(out.square().sum(), leaves)))
    for one, other in itertools.pairwise(results):
        for a, b in zip(one, other):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6)
    return calls


@pytest.mark.parametrize("comm", ["gather", "exchange"])
@pytest.mark.parametrize("mask_name", ["causal", "per_head"])
def test_groups_change_no_number(ranks, comm: str, mask_name: str) -> None:
    # 3 does not divide 4 KV heads and counts as 1.
    assert ranks(2).run(equal_in_groups, comm, mask_name) == [[1, 2, 1, 4]] * 2
