"""The second door, `flexcp.flex_attention`: on 1, 2 and 4 ranks equal to the oracle, and bit for bit to the first."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import flexcp
from tests import matrix
from tests.matrix import Case


def by_bias(s, b, h, q, kv, bias):
    return s + bias[(q - kv).abs()]


def attend(q: Tensor, k: Tensor, v: Tensor, plan: flexcp.Plan, bias: Tensor, learned: bool) -> tuple[Tensor, Tensor]:
    score = {"score_mod": by_bias, "score_tensors": (bias,)} if learned else {}
    return flexcp.flex_attention(q, k, v, plan, enable_gqa=True, return_lse=True, **score)


def results(case: Case, dtype: torch.dtype, compiled: bool) -> dict[str, Tensor]:
    """As matrix.flexcp_results, through the second door and without a context."""
    mask, more = matrix.flexcp_mask(case.mask, case.seq_len, case.heads)
    mesh = init_device_mesh("cpu", (case.cp,), mesh_dim_names=("cp",))
    comm, _, groups = case.comm.partition("*")
    more |= {"comm": comm, "balance": case.balance, "head_groups": int(groups or 1), "block_size": case.block}
    plan = flexcp.plan(mask, case.seq_len, mesh, **more)
    batch = 2 if case.mask == "per_batch" else 1
    x = {k: t.to(dtype) for k, t in matrix.inputs(batch, case.heads, case.groups, case.seq_len).items()}
    q, k, v, dout, dlse = (plan.shard(x[name], dim=2) for name in ("q", "k", "v", "dout", "dlse"))
    leaves = [t.requires_grad_() for t in (q, k, v, x["bias"])]
    function = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    out, lse = function(*leaves[:3], plan, leaves[3], case.score == "bias")
    loss = (out * dout).sum() + torch.where(lse == -torch.inf, 0.0, lse).mul(dlse).sum()
    dq, dk, dv, dbias = torch.autograd.grad(loss, leaves, allow_unused=True)
    dbias = torch.zeros_like(x["bias"]) if dbias is None else dbias
    torch.distributed.all_reduce(dbias)  # each rank has its part
    found = {"out": out.detach(), "lse": lse.detach(), "dq": dq, "dk": dk, "dv": dv}
    return {name: plan.unshard(value, dim=2) for name, value in found.items()} | {"dbias": dbias}


def check(case: Case, compiled: bool) -> None:
    every = {dtype: results(case, dtype, compiled) for dtype in (torch.float64, torch.float32)}
    first = {dtype: matrix.flexcp_results(case, dtype) for dtype in every}
    want = matrix.reference(case.mask, case.heads, case.groups, case.seq_len, case.score, torch.float64)
    for dtype, got in every.items():
        for name, value in got.items():
            if name == "dbias":  # summed over the ranks here by gloo, there by the context, in another order
                torch.testing.assert_close(value, first[dtype][name])
            else:
                assert torch.equal(value, first[dtype][name]), f"{name} in {dtype}: the doors differ"
    for name, value in want.items():
        seen = value != -torch.inf
        torch.testing.assert_close(every[torch.float64][name][seen], value[seen], rtol=0, atol=1e-10)


CASES = [
    (Case("causal", "gather", "head_tail", 1, "one", 129, 128, "bias"), True),
    (Case("document", "exchange*2", "affinity", 2, "all", 384, 128, "bias"), True),
    (Case("dead_rows", "ring", "contiguous", 4, "all", 384, 64, "bias"), False),
    (Case("per_head", "ulysses", "head_tail", 2, "two", 384, 128, "bias"), True),
    (Case("per_batch", "exchange", "min_heap", 4, "one", 384, 64, "bias"), False),
]


@pytest.mark.parametrize(("case", "compiled"), CASES, ids=str)
def test_both_doors_and_the_oracle_agree(ranks, case: Case, compiled: bool) -> None:
    ranks(case.cp).run(check, case, compiled)


def summed() -> None:
    plan = flexcp.plan(lambda b, h, q, kv: q >= kv, 256, init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (plan.shard(torch.randn(1, 2, 256, 16, generator=generator), dim=2) for _ in range(3))
    bias = torch.randn(256, generator=generator).requires_grad_()

    def gradient() -> Tensor:
        out = flexcp.flex_attention(q, k, v, plan, score_mod=by_bias, score_tensors=(bias,))
        return torch.autograd.grad(out.square().sum(), bias)[0]

    part = gradient()
    with flexcp.context_parallel(plan, captured_grads="sum"), flexcp.context_parallel(plan, captured_grads="sum"):
        whole = gradient()
    with flexcp.context_parallel(plan):
        assert torch.equal(gradient(), part)
    torch.distributed.all_reduce(part)
    torch.testing.assert_close(whole, part)


def test_a_context_that_sums_sums_the_gradients_of_score_tensors_once(ranks) -> None:
    ranks(2).run(summed)
