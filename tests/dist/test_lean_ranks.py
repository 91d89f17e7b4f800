"""Lean layers over several ranks: the loss and gradients of one rank, also where FSDP2 divides the parameters."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import flexcp
from flexcp import masks
from flexcp.leanlayer import Lean, make_lean
from flexcp.loss import chunked_loss
from flexcp.models import Llama3Config, build
from flexcp.offload import Store
from tests.live_memory import LiveMemory

CONFIG = Llama3Config(
    vocab_size=60, dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=96, head_dim=16, init_std=0.2
)
S = 700
MASKS = {
    "documents": (masks.causal() & masks.document(torch.arange(S) // 300), {}),
    "per head": (lambda b, h, q, kv: (q >= kv) & (q - kv < (h + 1) * 90), {"heads": 4}),
}


def gradients(lean: Lean | None, mask: str, comm: str, fsdp: bool) -> tuple[Tensor, list[Tensor], int]:
    """The whole loss and gradients in float64, and how often FSDP gathered."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",)) if size > 1 else 1
    model = build(CONFIG, seed=0, dtype=torch.float64)
    if lean is not None:
        make_lean(model.layers, lean, Store("cpu"))
    if fsdp:
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
    text = torch.randint(60, (1, S + 1), generator=torch.Generator().manual_seed(0))
    function, more = MASKS[mask]
    plan = flexcp.plan(function, S, mesh, comm=comm, balance="head_tail", **more)
    tokens, labels = plan.shard(text[:, :-1], pad=0), plan.shard(text[:, 1:], pad=-100)

    def head(x: Tensor, norm: nn.Module, weight: Tensor) -> Tensor:
        return chunked_loss(x, weight, labels, norm=norm, norm_parameters=list(norm.parameters()), chunk=50)

    with LiveMemory() as counted, flexcp.context_parallel(plan):
        loss = model(tokens, plan.positions, plan.block_mask, head=head)
        loss.backward()
    gathered = counted.calls["fsdp.all_gather_copy_in.default"]
    loss = loss.detach()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    if size > 1:
        for total in (loss, *(() if fsdp else grads)):
            dist.all_reduce(total)
    return loss, grads, gathered


@pytest.mark.parametrize(
    ("lean", "mask", "comm", "fsdp"),
    [
        (Lean(tile=100, head_groups=2), "documents", "gather", True),
        (Lean(tile=100, head_groups=2, keep_attention=False, every=2), "documents", "exchange", True),
        (Lean(tile=64, every=4), "per head", "exchange", False),
        (Lean(head_groups=2, keep_attention=False), "per head", "ring", True),
        (Lean(head_groups=2, every=3), "per head", "gather", False),
    ],
    ids=str,
)
def test_equal_to_one_rank(ranks, lean: Lean, mask: str, comm: str, fsdp: bool) -> None:
    loss, grads, _ = gradients(None, mask, "gather", False)
    for got_loss, got, gathered in ranks(2).run(gradients, lean, mask, comm, fsdp):
        torch.testing.assert_close(got_loss, loss, rtol=1e-12, atol=0)
        for one, other in zip(got, grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
        if fsdp:
            # The root once and each layer forward and backward, and at most once more for a layer that is run again
            # to make the next one's input.
            again = CONFIG.num_layers - -(-CONFIG.num_layers // lean.every)
            assert 0 <= gathered - (1 + 2 * CONFIG.num_layers) <= again


def refusal(lean: Lean, mask: str, comm: str) -> str:
    try:
        gradients(lean, mask, comm, False)
    except ValueError as error:
        return str(error)
    return "no error"


def test_heads_that_cannot_be_told_apart_are_refused(ranks) -> None:
    for text in ranks(2).run(refusal, Lean(head_groups=2), "per head", "exchange"):
        assert "a mask that tells heads apart cannot go head group by head group over 'exchange'" in text
