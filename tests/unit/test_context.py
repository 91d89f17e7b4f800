"""Sharded attention runs inside its context or not at all: no path may silently compute local attention."""

import threading

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexcp
from flexcp import masks
from tests import oracle

S, H, D = 256, 2, 16


def make_plan(mask=None, seq_len: int = S) -> flexcp.Plan:
    return flexcp.plan(mask or masks.causal(), seq_len, 1)


def qkv(length: int = S, requires_grad: bool = True, dtype=torch.float64):
    g = torch.Generator().manual_seed(length)
    return [torch.randn(1, H, length, D, generator=g, dtype=dtype).requires_grad_(requires_grad) for _ in range(3)]


def causal(b, h, q, kv):
    return q >= kv


OUTSIDE = "ran outside its context"


def test_forward_outside_raises_without_grad() -> None:
    plan = make_plan()
    with pytest.raises(RuntimeError, match=OUTSIDE), torch.no_grad():
        flex_attention(*qkv(requires_grad=False), block_mask=plan.block_mask)


def test_forward_outside_raises_with_grad() -> None:
    plan = make_plan()
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(*qkv(), block_mask=plan.block_mask)


def test_backward_outside_raises() -> None:
    plan = make_plan()
    with flexcp.context_parallel(plan):
        out = flex_attention(*qkv(), block_mask=plan.block_mask)
    with pytest.raises(RuntimeError, match=OUTSIDE):
        out.sum().backward()


def test_backward_outside_raises_with_block_mask_none() -> None:
    plan = make_plan()
    with flexcp.context_parallel(plan):
        out = flex_attention(*qkv())
    with pytest.raises(RuntimeError):
        out.sum().backward()


def test_another_thread_is_outside() -> None:
    plan = make_plan()
    raised: list[BaseException] = []

    def attend(requires_grad: bool) -> None:
        try:
            flex_attention(*qkv(requires_grad=requires_grad), block_mask=plan.block_mask)
        except BaseException as error:
            raised.append(error)

    with flexcp.context_parallel(plan):
        for requires_grad in (True, False):
            thread = threading.Thread(target=attend, args=(requires_grad,))
            thread.start()
            thread.join()
    assert [type(error) for error in raised] == [NotImplementedError, RuntimeError]
    assert OUTSIDE in str(raised[1])


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_region_never_computes_local_attention(backend: str, inside: bool) -> None:
    """Either it raises, or (inside the context) it is right."""
    plan = make_plan()
    q, k, v = qkv(requires_grad=False, dtype=torch.float32)
    torch._dynamo.reset()
    attend = torch.compile(lambda q, k, v: flex_attention(q, k, v, block_mask=plan.block_mask) * 2, backend=backend)
    if not inside:
        with pytest.raises(Exception, match=r"only_inside_context|outside its context"):
            attend(q, k, v)
        return
    with flexcp.context_parallel(plan):
        out = attend(q, k, v)
    i = torch.arange(S)
    want, _ = oracle.attention(q.double(), k.double(), v.double(), i[:, None] >= i)
    assert (out.double() - 2 * want).abs().max() < 1e-5


def test_foreign_block_mask_raises_and_names_the_remedy() -> None:
    foreign = create_block_mask(causal, None, None, S, S, device="cpu")
    with flexcp.context_parallel(make_plan()), pytest.raises(ValueError, match=r"pass block_mask=plan\.block_mask"):
        flex_attention(*qkv(), block_mask=foreign)


@pytest.mark.parametrize("with_mask", [True, False])
def test_unsharded_length_raises(with_mask: bool) -> None:
    plan = make_plan()
    with flexcp.context_parallel(plan), pytest.raises(ValueError, match=r"512 rows.*has 256; shard the inputs"):
        flex_attention(*qkv(512), block_mask=plan.block_mask if with_mask else None)


def test_block_mask_none_is_full_attention_with_gradients() -> None:
    plan = make_plan(seq_len=200)
    leaves = qkv(200)
    with flexcp.context_parallel(plan):
        out = plan.unshard(flex_attention(*(plan.shard(x, dim=2) for x in leaves)), dim=2, grad="replicated")
        grads = torch.autograd.grad(out.square().sum(), leaves)
    copies = [x.detach().requires_grad_() for x in leaves]
    want, _ = oracle.attention(*copies, torch.ones(200, 200, dtype=torch.bool))
    torch.testing.assert_close(out, want)
    for got, expected in zip(grads, torch.autograd.grad(want.square().sum(), copies)):
        torch.testing.assert_close(got, expected)


def test_each_call_belongs_to_the_plan_of_its_mask_also_in_backward() -> None:
    """Two plans alive and nested; every backward runs under the other's innermost context."""
    one, other = make_plan(masks.causal()), make_plan(masks.sliding_window(20))
    i = torch.arange(S)
    visible = {one: i[:, None] >= i, other: (i[:, None] >= i) & (i[:, None] - i < 20)}
    inputs = {plan: qkv() for plan in visible}
    with flexcp.context_parallel(one), flexcp.context_parallel(other):
        outs = {plan: flex_attention(*x, block_mask=plan.block_mask) for plan, x in inputs.items()}
    with flexcp.context_parallel(other), flexcp.context_parallel(one):
        grads = {plan: torch.autograd.grad(outs[plan].square().sum(), inputs[plan]) for plan in visible}
    for plan, x in inputs.items():
        copies = [t.detach().requires_grad_() for t in x]
        want, _ = oracle.attention(*copies, visible[plan])
        torch.testing.assert_close(outs[plan], want)
        for got, expected in zip(grads[plan], torch.autograd.grad(want.square().sum(), copies)):
            torch.testing.assert_close(got, expected)


def test_mask_of_an_inactive_plan_raises() -> None:
    one, other = make_plan(), make_plan()
    with flexcp.context_parallel(one), pytest.raises(RuntimeError, match="another plan"):
        flex_attention(*qkv(), block_mask=other.block_mask)


def test_bypass_is_plain_attention_forward_and_backward() -> None:
    plan = make_plan()
    x = qkv(64)
    mask = create_block_mask(causal, None, None, 64, 64, device="cpu")
    with flexcp.context_parallel(plan):
        with flexcp.bypass():
            out = flex_attention(*x, block_mask=mask)
        grads = torch.autograd.grad(out.square().sum(), x)
    copies = [t.detach().requires_grad_() for t in x]
    i = torch.arange(64)
    want, _ = oracle.attention(*copies, i[:, None] >= i)
    torch.testing.assert_close(out, want)
    for got, expected in zip(grads, torch.autograd.grad(want.square().sum(), copies)):
        torch.testing.assert_close(got, expected)


def test_plan_mask_under_bypass_raises() -> None:
    plan = make_plan()
    with flexcp.context_parallel(plan), flexcp.bypass(), pytest.raises(RuntimeError, match=OUTSIDE):
        flex_attention(*qkv(), block_mask=plan.block_mask)


def test_torchs_refusal_stands_after_contexts_threads_and_exceptions() -> None:
    plan = make_plan()
    started, finish = threading.Event(), threading.Event()

    def hold() -> None:
        with flexcp.context_parallel(plan):
            started.set()
            finish.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert started.wait(30)
    # A context is active on another thread: this one is still refused.
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(*qkv())
    with pytest.raises(ValueError), flexcp.context_parallel(plan), flexcp.context_parallel(plan):
        flex_attention(*qkv(512), block_mask=plan.block_mask)
    finish.set()
    thread.join()
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(*qkv())
    from torch.nn.attention import flex_attention as module

    assert module._validate_device.__module__ == "torch.nn.attention.flex_attention"


def test_double_backward_is_refused() -> None:
    plan = make_plan()
    x = qkv()
    with flexcp.context_parallel(plan):
        loss = flex_attention(*x, block_mask=plan.block_mask).square().sum()
        with pytest.raises(NotImplementedError, match="differentiated twice"):
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_torch_func_is_refused(transform) -> None:
    plan = make_plan()
    q, k, v = qkv(requires_grad=False)
    if transform is torch.func.vmap:
        q = q[None]
    with flexcp.context_parallel(plan), pytest.raises(NotImplementedError, match=r"torch\.func"):
        transform(lambda q: flex_attention(q, k, v, block_mask=plan.block_mask).sum())(q)


def test_wrong_heads_and_batch_are_refused() -> None:
    plan = flexcp.plan(lambda b, h, q, kv: q - kv < (h + 1) * 64, S, 1, heads=4)
    with (
        flexcp.context_parallel(plan),
        pytest.raises(ValueError, match="2 query heads, but the plan's mask is made for 4"),
    ):
        flex_attention(*qkv(), block_mask=plan.block_mask)


def test_max_scores_are_refused() -> None:
    from torch.nn.attention.flex_attention import AuxRequest

    plan = make_plan()
    with flexcp.context_parallel(plan), pytest.raises(NotImplementedError):
        flex_attention(*qkv(), block_mask=plan.block_mask, return_aux=AuxRequest(max_scores=True))


def test_plan_without_a_group_cannot_run() -> None:
    plan = flexcp.plan(masks.causal(), S, 4, rank=2)
    with pytest.raises(RuntimeError, match="does not exist"), flexcp.context_parallel(plan):
        pass


def test_no_grad_works() -> None:
    plan = make_plan()
    x = qkv()
    with flexcp.context_parallel(plan), torch.no_grad():
        out = flex_attention(*x, block_mask=plan.block_mask)
    i = torch.arange(S)
    torch.testing.assert_close(out, oracle.attention(*x, i[:, None] >= i)[0].detach())
