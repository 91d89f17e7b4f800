"""Lean layers give the loss and gradients of plain ones, whatever they leave out, and each technique saves memory."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import flexcp
from flexcp import masks
from flexcp.leanlayer import Lean, make_lean
from flexcp.loss import chunked_loss
from flexcp.models import Llama3Config, build
from flexcp.offload import Store
from tests import sampled_rows
from tests.live_memory import LiveMemory

CONFIG = Llama3Config(
    vocab_size=60, dim=32, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=96, head_dim=16, init_std=0.1
)
S = 200
DOCUMENTS = torch.arange(S) // 90


def head_by_chunks(labels: Tensor, chunk: int):
    def head(x: Tensor, norm: nn.Module, weight: Tensor) -> Tensor:
        return chunked_loss(x, weight, labels, norm=norm, norm_parameters=list(norm.parameters()), chunk=chunk)

    return head


def step(lean: Lean | None, store: Store | None = None):
    """Loss, gradients, and how often each parameter's hook fired."""
    model = build(CONFIG, seed=0, dtype=torch.float64)
    if lean is not None:
        make_lean(model.layers, lean, store)
    fired = {name: 0 for name, _ in model.named_parameters()}

    def count(name: str):
        return lambda parameter: fired.update({name: fired[name] + 1})

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(count(name))
    tokens = torch.randint(60, (1, S + 1), generator=torch.Generator().manual_seed(0))
    plan = flexcp.plan(masks.causal() & masks.document(DOCUMENTS), S, 1)
    labels = plan.shard(tokens[:, 1:], pad=-100)
    with flexcp.context_parallel(plan):
        loss = model(
            plan.shard(tokens[:, :-1], pad=0), plan.positions, plan.block_mask, head=head_by_chunks(labels, 64)
        )
        loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()], fired


@pytest.fixture(scope="module")
def plain():
    return step(None)


@pytest.mark.parametrize(
    ("lean", "stored"),
    [
        (Lean(), False),
        (Lean(tile=100), False),
        (Lean(head_groups=2), False),
        (Lean(keep_attention=False), False),
        (Lean(every=2), False),
        (Lean(every=3, keep_attention=False), True),
        (Lean(tile=37, head_groups=2, every=4), True),
        (Lean(tile=64, head_groups=2, every=2, keep_attention=False), True),
    ],
    ids=str,
)
def test_lean_layers_change_no_number(lean: Lean, stored: bool, plain) -> None:
    loss, grads, fired = step(lean, Store("cpu", keep_bytes=S * 32 * 8) if stored else None)
    torch.testing.assert_close(loss, plain[0], rtol=1e-12, atol=0)
    for one, other in zip(grads, plain[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    assert set(fired.values()) == {1}, "a gradient hook fires once a parameter"


WIDE = replace(CONFIG, dim=128, ffn_dim=1024, head_dim=32)
LONG = 1024
HIDDEN = LONG * WIDE.dim * 4  # bytes of the residual stream


def peak_of_a_step(lean: Lean | None, store: Store | None) -> int:
    """The most bytes alive in forward and backward, host memory left out; gradients are dropped as they come."""
    model = build(WIDE, seed=0)
    if lean is not None:
        make_lean(model.layers, lean, store)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    tokens = torch.randint(60, (1, LONG + 1), generator=torch.Generator().manual_seed(0))
    plan = flexcp.plan(masks.causal() & masks.sliding_window(32), LONG, 1)
    with LiveMemory() as memory, flexcp.context_parallel(plan):
        model(tokens[:, :-1], plan.positions, plan.block_mask, head=head_by_chunks(tokens[:, 1:], 64)).backward()
    return memory.peak_bytes - (0 if store is None else store.host_bytes)


def test_each_technique_saves_memory() -> None:
    """Added one after the other; each must save what it is there to save, in units of the residual stream."""
    rows = [
        ("plain layers", None, None, 0),
        ("lean layers", Lean(), None, 50),
        ("+ tiles of 64", Lean(tile=64), None, 20),
        ("+ head groups", Lean(tile=64, head_groups=2), None, 1),
        ("+ attention again", Lean(tile=64, head_groups=2, keep_attention=False), None, 2),
        ("+ offload", Lean(tile=64, head_groups=2, keep_attention=False), Store("cpu"), 1),
    ]
    before = None
    for name, lean, store, saved in rows:
        peak = peak_of_a_step(lean, store) / HIDDEN
        print(f"{name:20} {peak:6.1f} times the residual stream")
        assert before is None or peak <= before - saved, name
        before = peak


def test_evaluation_and_a_second_backward() -> None:
    model = build(CONFIG, seed=0)
    plan = flexcp.plan(masks.causal(), S, 1)
    tokens = plan.shard(torch.randint(60, (1, S)), pad=0)
    with flexcp.context_parallel(plan):
        with torch.no_grad():
            want = model(tokens, plan.positions, plan.block_mask)
            make_lean(model.layers, Lean(tile=50, head_groups=2, every=2), store := Store("cpu"))
            torch.testing.assert_close(model(tokens, plan.positions, plan.block_mask), want, rtol=1e-5, atol=1e-5)
            assert store.host_bytes == 0, "nothing is kept where nothing goes back"
        loss = model(tokens, plan.positions, plan.block_mask).square().mean()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


def test_wrong_uses_get_their_sentence() -> None:
    model = build(CONFIG, seed=0)
    plan = flexcp.plan(masks.causal(), S, 1)
    tokens = plan.shard(torch.randint(60, (1, S)), pad=0)
    with pytest.raises(ValueError, match="2 KV heads cannot be divided into 3 equal groups: choose a divisor"):
        make_lean(model.layers, Lean(head_groups=3))
    with pytest.raises(ValueError, match="every at least 1"):
        Lean(every=0)
    with pytest.raises(ValueError, match="a Linear offers no before_attention"):
        make_lean([nn.Linear(2, 2)], Lean())
    make_lean(model.layers, Lean(tile=50))
    with pytest.raises(RuntimeError, match=r"not of the active plan: call the model inside `with flexcp.context_par"):
        model(tokens, plan.positions, plan.block_mask)
    with flexcp.context_parallel(plan):
        with pytest.raises(RuntimeError, match="not of the active plan"):
            model(tokens)
        with pytest.raises(ValueError, match="take no score_mod"):
            model(tokens, plan.positions, plan.block_mask, lambda s, b, h, q, kv: s * 2)
        with pytest.raises(ValueError, match=r"was given 150 rows, but this rank's shard of the 200 tokens has 256"):
            model(tokens[:, :150], plan.positions[:, :150], plan.block_mask)


def test_a_gradient_that_a_hook_keeps_is_not_overwritten() -> None:
    """Between lean layers the gradient's memory is used again, but for one that somebody holds."""
    results = []
    for hooked in (None, lambda g: g, lambda g: g.detach()):
        model, kept, addresses = build(CONFIG, seed=0, dtype=torch.float64), [], []
        make_lean(model.layers, Lean(tile=64))
        plan = flexcp.plan(masks.causal(), S, 1)
        tokens = plan.shard(torch.randint(60, (1, S), generator=torch.Generator().manual_seed(0)), pad=0)

        def watch(layer, inputs, output, hooked=hooked, kept=kept, addresses=addresses):
            output.register_hook(lambda g: addresses.append(g.data_ptr()))
            if hooked is not None:
                output.register_hook(lambda g: kept.append((hooked(g), g.clone())) and None)

        for layer in model.layers:
            layer.register_forward_hook(watch)
        with flexcp.context_parallel(plan):
            model(tokens, plan.positions, plan.block_mask, head=head_by_chunks(tokens, 64)).backward()
        assert (len(set(addresses)) == 1) == (hooked is None), (
            "the memory of a gradient that nobody keeps is used again"
        )
        for held, copy in kept:
            assert torch.equal(held, copy)
        results.append([p.grad for p in model.parameters()])
    for grads in results[1:]:
        for one, other in zip(grads, results[0], strict=True):
            assert torch.equal(one, other)


def test_a_rows_result_does_not_depend_on_where_it_stands() -> None:
    """tests/gpu checks the same where indices pass 2^31."""
    config = replace(CONFIG, dim=64, head_dim=16)
    sampled_rows.check(config, 1024, Lean(tile=100, head_groups=2), torch.float64, "cpu", atol=1e-9)
