"""Heads in place of rows: numbers, bytes on the wire, and sentences where heads cannot be shared."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

import flexcp
from flexcp import masks
from tests import matrix, oracle

S, D = 330, 16


def by_head(b, h, q, kv):
    return (q >= kv) & (q - kv < (h + 1) * 40)


def results(plan, q, k, v, table, captured_grads="sum"):
    """out and the gradients of q, k, v and of a table of biases for each head and distance, of the whole sequence."""
    leaves = [plan.shard(x, dim=2).requires_grad_() for x in (q, k, v)] + [table.clone().requires_grad_()]

    def score(s, b, h, q, kv):
        return s + leaves[3][h, (q - kv).abs()]

    with flexcp.context_parallel(plan, captured_grads=captured_grads):
        out = flex_attention(*leaves[:3], score_mod=score, block_mask=plan.block_mask, enable_gqa=True)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    whole = [plan.unshard(x.detach(), dim=2) for x in (out, *grads[:3])]
    return [*whole, grads[3]]


def expected(q, k, v, table):
    i = torch.arange(S)
    distance = (i[:, None] - i).abs()
    visible = torch.stack([(i[:, None] >= i) & (i[:, None] - i < (h + 1) * 40) for h in range(q.shape[1])])[None]
    leaves = [x.clone().requires_grad_() for x in (q, k, v, table)]
    out, _ = oracle.attention(*leaves[:3], visible, lambda s: s + leaves[3][:, distance])
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


def gaps(heads: int, groups: int, mesh_shape: tuple[int, ...], comm: str, head_groups: int) -> list[float]:
    names = ("cp", "ulysses")[: len(mesh_shape)]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, S, D, generator=g, dtype=torch.float64) for h in (heads, groups, groups))
    table = torch.randn(heads, S, generator=g, dtype=torch.float64)
    plan = flexcp.plan(by_head, S, mesh, comm=comm, heads=heads, block_size=16, head_groups=head_groups)
    first = results(plan, q, k, v, table)
    assert all(torch.equal(a, b) for a, b in zip(first, results(plan, q, k, v, table))), "a run repeats bit for bit"
    return [float((a - b).abs().max()) for a, b in zip(first, expected(q, k, v, table))]


@pytest.mark.parametrize(
    ("heads", "groups", "mesh", "comm", "head_groups"),
    [
        (4, 4, (4,), "ulysses", 1),
        (8, 2, (4,), "ulysses", 1),  # two ranks with the same KV head
        (4, 1, (4,), "ulysses", 1),
        (6, 2, (3,), "ulysses", 1),  # the middle rank's query heads read two KV heads
        (12, 4, (3,), "ulysses", 1),  # and unevenly
        (4, 2, (2, 2), "ulysses+ring", 1),
        (4, 1, (2, 2), "ulysses+exchange", 1),
        (8, 4, (2, 2), "ulysses+gather", 2),
        (8, 4, (2, 2), "auto", 2),
        (4, 2, (4,), "ulysses+exchange", 1),
    ],
)
def test_heads_keep_their_global_index_and_every_gradient_is_exact(ranks, heads, groups, mesh, comm, head_groups):
    size = torch.Size(mesh).numel()
    for gap in ranks(size).run(gaps, heads, groups, mesh, comm, head_groups):
        assert max(gap) < 1e-10


def sentence(**keywords) -> str:
    try:
        flexcp.plan(**({"mask": masks.causal(), "seq_len": 512, "mesh": 4} | keywords))
    except ValueError as error:
        return str(error)
    return "no error"


def test_wrong_uses_get_a_sentence() -> None:
    assert "ulysses=3 ranks are to share the heads, but do not divide" in sentence(comm="ulysses+ring", ulysses=3)
    assert "pass comm='ulysses+ring'" in sentence(comm="ring", ulysses=2)
    assert "among all 4 ranks, but ulysses=2" in sentence(comm="ulysses", ulysses=2)
    assert "among all 4 ranks, but ulysses=1" in sentence(comm="ulysses", ulysses=1)
    assert "6 query heads cannot be shared evenly by the 4 ranks" in sentence(mask=by_head, heads=6, comm="ulysses")
    assert "ulysses is a whole number, at least 1" in sentence(ulysses=0)
    plan = flexcp.plan(masks.causal(), 512, 1, comm="ulysses")
    assert (plan.comm, plan.ulysses) == ("ulysses", 1)


def six_heads_on_four_ranks() -> str:
    plan = flexcp.plan(masks.causal(), 512, init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), comm="ulysses")
    x = torch.randn(1, 6, plan.local_len, D)
    try:
        with flexcp.context_parallel(plan):
            flex_attention(x, x, x, block_mask=plan.block_mask)
    except ValueError as error:
        return str(error)
    return "no error"


def test_heads_that_the_ranks_cannot_share_raise_on_every_rank(ranks) -> None:
    said = "6 query heads cannot be shared evenly by the 4 ranks of ulysses; pass a ulysses= that divides them"
    assert all(text.startswith(said) for text in ranks(4).run(six_heads_on_four_ranks))
