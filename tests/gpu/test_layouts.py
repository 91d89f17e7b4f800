"""Head dims, dtypes, block sizes, batches and strides that a GPU's kernels take give what dense float64 gives."""

import pytest
import torch
from torch import Tensor

import flexcp
from flexcp import kernel, masks
from flexcp.kernel import Score
from tests import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own internals
]

S, H, G = 1100, 4, 2


def tensors(batch: int, dim: int, dtype: torch.dtype, transposed: bool) -> list[Tensor]:
    """q, k, v and dout, [batch, heads, S, dim]; transposed: views of [batch, S, heads, dim]."""
    torch.manual_seed(0)
    shapes = [(batch, S, h, dim) if transposed else (batch, h, S, dim) for h in (H, G, G, H)]
    made = [torch.randn(*shape, device="cuda", dtype=dtype) for shape in shapes]
    return [x.transpose(1, 2) for x in made] if transposed else made


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize(
    ("dim", "dtype", "block", "batch", "transposed"),
    [
        (64, torch.float16, 128, 2, False),
        (128, torch.bfloat16, 256, 1, False),
        (256, torch.bfloat16, 128, 1, False),
        (128, torch.float16, (256, 128), 1, True),
    ],
)
def test_layouts(backend: str, dim: int, dtype: torch.dtype, block, batch: int, transposed: bool) -> None:
    q, k, v, dout = tensors(batch, dim, dtype, transposed)
    mask = (masks.causal() & masks.document(torch.arange(S) // 450)).to("cuda")
    plan = flexcp.plan(mask, S, 2, rank=1, comm="gather", balance="head_tail", block_size=block, device="cuda")
    (stage,) = plan.schedules["mask"].stages
    order = plan.layout.permutation().cuda()
    keys = []
    for x in (k, v):
        padded = torch.cat([x, x.new_zeros(batch, G, int(order.max()) + 1 - S, dim)], 2)
        keys.append(padded[:, :, order])
    mine, dmine = plan.shard(q, dim=2), plan.shard(dout, dim=2)
    score, scale = Score(None), dim**-0.5
    out, lse = kernel.forward(mine, *keys, stage, score, scale, backend)
    dq, *_ = kernel.backward(mine, *keys, out.to(dtype), lse, dmine, None, stage, score, scale, backend)

    i, zero = torch.arange(S, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    dense = mask(zero, zero, i[:, None], i[None, :])
    unused = torch.zeros(S, device="cuda")
    want = oracle.results(q, k, v, dense, lambda s, bias: s, unused, dout, torch.zeros(batch, H, S, device="cuda"))
    rows, real = plan.positions[0], plan.valid.flatten()
    for name, got in (("out", out), ("dq", dq)):
        right = want[name][:, :, rows[real]]
        error = (got[:, :, real].double() - right).abs().max()
        assert error <= 0.01 * right.abs().max(), f"{name}: {error} of {right.abs().max()}"
