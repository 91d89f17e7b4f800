"""On a GPU every rank's stages, merged, equal dense float64 attention as well as the one-device kernel does.

One GPU stands for each rank in turn: the real kernels on the real shards, without a network.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import flexcp
from flexcp import kernel, kernel_gpu, masks
from flexcp.kernel import Score
from flexcp.merge import merge
from tests import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own internals
]

S, H, G, D = 1000, 4, 2, 64
FLASH = pytest.param(
    "flash",
    marks=pytest.mark.skipif(
        not torch.cuda.is_available() or not kernel_gpu.flash_is_available(torch.device("cuda")),
        reason="flash-attn-4 is not installed, or not for this GPU",
    ),
)


def softcap(s, b, h, q, kv):
    return torch.tanh(s / 5) * 5


def by_distance(s, b, h, q, kv, bias):
    return s + bias[(q - kv).abs()]


SCORES = {
    "none": (None, lambda s, bias: s),
    "softcap": (softcap, lambda s, bias: torch.tanh(s / 5) * 5),
    "learned_bias": (by_distance, None),
}


def dense(mask) -> Tensor:
    i, zero = torch.arange(S, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    return mask(zero, zero, i[:, None], i[None, :]).expand(S, S)


def make_masks() -> dict:
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([317, 411, 272]))
    every = {
        "causal": masks.causal(),
        "document": masks.causal() & masks.document(ids),
        "window": masks.sliding_window(100),
        "full": masks.full(),
    }
    return {name: mask.to("cuda") for name, mask in every.items()}


def by_ranks(mask, comm: str, cp: int, q, k, v, dout, score: Score, backend: str) -> dict[str, Tensor]:
    """Every rank in turn; gradients summed where the ranks would sum them."""
    total: dict[str, Tensor] = {}
    scale = D**-0.5
    for name, x in (("out", q), ("dq", q), ("dk", k), ("dv", v)):
        total[name] = torch.zeros_like(x, dtype=torch.float32)
    dbias = [torch.zeros_like(x, dtype=torch.float32) for x in score.buffers]
    for rank in range(cp):
        plan = flexcp.plan(mask, S, cp, rank=rank, comm=comm, balance="head_tail", device="cuda")
        rows = plan.layout.positions(rank).cuda()
        real = rows < S
        shard = lambda x, rank=rank, plan=plan: plan.shard(x, dim=2)  # noqa: E731
        of = [flexcp.plan(mask, S, cp, rank=r, comm=comm, balance="head_tail", device="cuda") for r in range(cp)]
        stages = [s for s in plan.schedules["mask"].stages if s.block_mask is not None]
        keys = [[torch.cat([of[r].shard(x, dim=2) for r in s.sources], 2) for x in (k, v)] for s in stages]
        out = lse = None
        for stage, (ks, vs) in zip(stages, keys):
            partial = kernel.forward(shard(q), ks, vs, stage, score, scale, backend)
            out, lse = partial if out is None else merge(out, lse, *partial)
        assert (out[:, :, ~real] == 0).all()
        total["out"][:, :, rows[real]] = out[:, :, real].float()
        for stage, (ks, vs) in zip(stages, keys):
            dq, dk, dv, db = kernel.backward(
                shard(q), ks, vs, out.to(q.dtype), lse, shard(dout), None, stage, score, scale, backend
            )
            total["dq"][:, :, rows[real]] += dq[:, :, real]
            columns = torch.cat([of[r].layout.positions(r) for r in stage.sources]).cuda()
            total["dk"].index_add_(2, columns[columns < S], dk[:, :, columns < S].float())
            total["dv"].index_add_(2, columns[columns < S], dv[:, :, columns < S].float())
            for sum_, part in zip(dbias, db):
                sum_ += part
    return total | ({"dbias": dbias[0]} if dbias else {})


@pytest.mark.parametrize(
    ("mask_name", "score", "comm", "cp", "backend"),
    [
        ("causal", "none", "gather", 4, "triton"),
        ("causal", "none", "ring", 8, "triton"),
        ("document", "softcap", "ring", 4, "triton"),
        ("window", "learned_bias", "gather", 4, "triton"),
        ("full", "learned_bias", "ring", 4, "triton"),
        pytest.param("causal", "none", "ring", 8, *FLASH.values, marks=FLASH.marks),
        pytest.param("document", "softcap", "gather", 4, *FLASH.values, marks=FLASH.marks),
    ],
)
def test_ranks_equal_the_oracle_as_well_as_one_device_does(
    mask_name: str, score: str, comm: str, cp: int, backend: str
) -> None:
    torch.manual_seed(0)
    mask = make_masks()[mask_name]
    q, dout = (torch.randn(1, H, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, G, S, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bias = torch.randn(S, device="cuda")
    function, dense_score = SCORES[score]
    i = torch.arange(S, device="cuda")
    if score == "learned_bias":
        dense_score = lambda s, bias: s + bias[(i[:, None] - i).abs()]  # noqa: E731
    buffers = (bias,) if score == "learned_bias" else ()
    got = by_ranks(mask, comm, cp, q, k, v, dout, Score(function, buffers, (True,) * len(buffers)), backend)
    want = oracle.results(q, k, v, dense(mask), dense_score, bias, dout, torch.zeros(1, H, S, device="cuda"))

    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    one_mod = None
    if score == "softcap":
        one_mod = softcap
    if score == "learned_bias":
        one_mod = lambda s, b, h, q, kv: s + leaves[3][(q - kv).abs()]  # noqa: E731
    block_mask = create_block_mask(mask, None, None, S, S, device="cuda")
    torch._dynamo.reset()
    options = {"BACKEND": "TRITON"} | ({"num_stages": 1} if score == "learned_bias" else {})
    out = torch.compile(flex_attention, fullgraph=True)(
        *leaves[:3], score_mod=one_mod, block_mask=block_mask, enable_gqa=True, kernel_options=options
    )
    (out * dout).sum().backward()
    one = {"out": out, "dq": leaves[0].grad, "dk": leaves[1].grad, "dv": leaves[2].grad, "dbias": leaves[3].grad}
    for name, value in got.items():
        reference = want[name]
        error, own = ((x.double() - reference).abs().max() for x in (value, one[name]))
        print(f"{mask_name} {score} {comm} {backend} {name}: {error:.2e}, one device {own:.2e}")
        assert not value.isnan().any()
        assert error <= 2 * own + 1e-3 * reference.abs().max(), name


def test_public_path_on_a_group_of_one() -> None:
    torch.manual_seed(0)
    mask = make_masks()["document"]
    leaves = [torch.randn(1, h, S, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (H, G, G)]
    plan = flexcp.plan(mask, S, 1, device="cuda")
    with flexcp.context_parallel(plan):
        out = flex_attention(*(plan.shard(x, dim=2) for x in leaves), block_mask=plan.block_mask, enable_gqa=True)
        plan.unshard(out, dim=2, grad="replicated").square().sum().backward()
    copies = [x.detach().double().requires_grad_() for x in leaves]
    want, _ = oracle.attention(*copies, dense(mask))
    want.square().sum().backward()
    torch.testing.assert_close(out[:, :, :S].double(), want, rtol=0.02, atol=0.02)
    for got, expected in zip(leaves, copies):
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=0.03, atol=0.05)


def test_a_kernel_is_built_inside_a_checkpointed_region() -> None:
    """Checkpointing works with saved-tensor hooks, which torch's tracing must not see."""
    torch.manual_seed(0)
    x = torch.randn(1, H, 640, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    plan = flexcp.plan(masks.causal().to("cuda"), 640, 1, device="cuda")

    def attend(x: Tensor) -> Tensor:
        return flex_attention(x, x, x, score_mod=softcap, block_mask=plan.block_mask)

    with flexcp.context_parallel(plan):
        checkpoint(attend, x, use_reentrant=False).square().sum().backward()
        grad, x.grad = x.grad, None
        attend(x).square().sum().backward()
    torch.testing.assert_close(grad, x.grad, rtol=0.02, atol=0.02)


def test_new_documents_are_new_data_for_old_programs() -> None:
    torch.manual_seed(0)
    x = [torch.randn(1, h, 1024, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for h in (H, G, G)]

    def step(ids: Tensor) -> None:
        plan = flexcp.plan((masks.causal() & masks.document(ids)).to("cuda"), 1024, 1, device="cuda")
        with flexcp.context_parallel(plan):
            flex_attention(*x, block_mask=plan.block_mask, enable_gqa=True).sum().backward()

    step(torch.arange(1024) // 300)
    programs = len(kernel_gpu._programs)
    for length in range(100, 400, 10):
        step(torch.arange(1024) // length)
    assert len(kernel_gpu._programs) == programs


def test_auto_is_flash_where_it_can_and_says_where_not() -> None:
    """A learned bias and a score that reads indices under grouped heads go to Triton, with one warning each."""
    if not kernel_gpu.flash_is_available(torch.device("cuda")):
        pytest.skip("flash-attn-4 is not installed, or not for this GPU")
    torch.manual_seed(0)
    plan = flexcp.plan(masks.causal().to("cuda"), S, 1, device="cuda")
    (stage,) = plan.schedules["mask"].stages
    q, k, v = (plan.shard(torch.randn(1, h, S, D, device="cuda", dtype=torch.bfloat16), dim=2) for h in (H, G, G))
    distance = torch.arange(S, device="cuda") * -0.01

    def gradients(score: Score, backend: str) -> list[Tensor]:
        out, lse = kernel.forward(q, k, v, stage, score, D**-0.5, backend)
        return kernel.backward(q, k, v, out, lse, torch.ones_like(q), None, stage, score, D**-0.5, backend)[:3]

    before = set(kernel_gpu._programs)
    for score, backward in (
        (Score(None), "FLASH"),
        (Score(by_distance, (distance,), (True,)), "TRITON"),
        (Score(by_distance, (distance,), (False,)), "TRITON"),
    ):
        for got, want in zip(gradients(score, "auto"), gradients(score, "triton")):
            torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
        mine = {key[:2] for key in set(kernel_gpu._programs) - before}
        assert ("backward", backward) in mine
        before = set(kernel_gpu._programs)
