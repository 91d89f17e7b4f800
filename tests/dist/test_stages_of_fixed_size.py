"""A plan made like an earlier one keeps its shapes: what does not fit into one stage makes a second, and no number
changes."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

import flexcp
from flexcp import masks

S = 512


def documents(length: int):
    return masks.causal() & masks.document(torch.arange(S) // length)


def second_stage() -> tuple[list[int], float]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    keywords = {"comm": "exchange", "balance": "contiguous", "block_size": 32, "head_groups": 2}
    first = flexcp.plan(documents(128), S, mesh, **keywords)  # a document a rank: nothing is received
    x = [torch.randn(1, h, S, 16, generator=torch.Generator().manual_seed(h)).double() for h in (4, 2, 2)]
    found = []
    for like in (None, first):
        plan = flexcp.plan(documents(512), S, mesh, like=like, **keywords)
        leaves = [plan.shard(t, dim=2).requires_grad_() for t in x]
        with flexcp.context_parallel(plan):
            out = flex_attention(*leaves, block_mask=plan.block_mask, enable_gqa=True)
            grads = torch.autograd.grad(out.square().sum(), leaves)
        found.append((len(plan.schedules["mask"].stages), [out.detach(), *grads]))
    (one, a), (many, b) = found
    return [one, many], max(float((x - y).abs().max()) for x, y in zip(a, b))


def test_what_does_not_fit_into_a_stage_makes_another(ranks) -> None:
    results = ranks(4).run(second_stage)
    assert [stages for stages, _ in results] == [[1, 1], [1, 2], [1, 3], [1, 4]]
    assert max(gap for _, gap in results) < 1e-12
