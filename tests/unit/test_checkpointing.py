"""Gradients of scores that save tensors are right under every kind of activation checkpointing and offload.

Stock torch gets them wrong under non-reentrant checkpointing (shared FACTS: dq off by up to 1e6), since the joint
graph it hands to the backward operator is traced under checkpoint's saved-tensor hooks.
"""

import functools

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flexcp
from flexcp import masks
from tests import oracle

S, H, D = 200, 2, 16
i = torch.arange(S)
DISTANCE = (i[:, None] - i).abs()


def softcap(s, b, h, q, kv):
    return torch.tanh(s / 2) * 2


def window_by_inf(s, b, h, q, kv):
    return torch.where((q - kv).abs() < 30, s, -float("inf"))


SCORES = {
    "none": (lambda bias, scalar: None, lambda s, bias, scalar: s),
    "softcap": (lambda bias, scalar: softcap, lambda s, bias, scalar: torch.tanh(s / 2) * 2),
    "square": (lambda bias, scalar: lambda s, b, h, q, kv: s * s / 4, lambda s, bias, scalar: s * s / 4),
    "window_by_inf": (
        lambda bias, scalar: window_by_inf,
        lambda s, bias, scalar: torch.where(DISTANCE < 30, s, -torch.inf),
    ),
    "learned_bias": (
        lambda bias, scalar: lambda s, b, h, q, kv: torch.tanh(s) + bias[h, (q - kv).abs()],
        lambda s, bias, scalar: torch.tanh(s) + bias[:, DISTANCE],
    ),
    "learned_scalar": (
        lambda bias, scalar: lambda s, b, h, q, kv: torch.tanh(s * scalar),
        lambda s, bias, scalar: torch.tanh(s * scalar),
    ),
}


def save_attention(ctx, op, *args, **kwargs):
    is_attention = "flex_attention" in str(op)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


MODES = {
    "none": lambda f, *x: f(*x),
    "non_reentrant": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "selective_recompute": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(
            create_selective_checkpoint_contexts, lambda *a, **k: CheckpointPolicy.PREFER_RECOMPUTE
        ),
    ),
    "selective_save": functools.partial(
        checkpoint,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, save_attention),
    ),
}


def offloaded(f, *x):
    # A copy, as to another device and back: what is unpacked is a new tensor at another address.
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t.clone()):
        return f(*x)


MODES["offloaded"] = offloaded


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("score", SCORES)
def test_gradients_are_right(mode: str, score: str) -> None:
    torch.manual_seed(0)
    make_score, dense = SCORES[score]
    leaves = [torch.randn(1, H, S, D, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(H, S, dtype=torch.float64, requires_grad=True)
    scalar = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(1, H, S, D, dtype=torch.float64)
    plan = flexcp.plan(masks.causal(), S, 1)

    def block(q, k, v):
        q, k, v = (plan.shard(x * 1.5, dim=2) for x in (q, k, v))
        return flex_attention(q, k, v, score_mod=make_score(bias, scalar), block_mask=plan.block_mask) * 2

    def dense_block(q, k, v):
        return oracle.attention(q * 1.5, k * 1.5, v * 1.5, i[:, None] >= i, lambda s: dense(s, bias, scalar))[0] * 2

    with flexcp.context_parallel(plan):
        out = plan.unshard(MODES[mode](block, *leaves), dim=2, grad="replicated")
        (out * dout).sum().backward()
    got = [x.grad for x in (*leaves, bias, scalar)]
    for x in (*leaves, bias, scalar):
        x.grad = None
    want = dense_block(*leaves)
    (want * dout).sum().backward()
    torch.testing.assert_close(out, want)
    for name, x, grad in zip(("dq", "dk", "dv", "dbias", "dscalar"), (*leaves, bias, scalar), got):
        if x.grad is not None and x.grad.any():
            assert grad is not None, f"{name} is missing"
            torch.testing.assert_close(grad, x.grad, msg=name)
