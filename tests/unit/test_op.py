"""`flexcp.flex_attention`, the door for compiled code: one graph, no recompile, and sentences for wrong use."""

import functools
import gc

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flexcp
from flexcp import masks
from flexcp.masks import scores
from flexcp.scoremod import constant_number
from tests import oracle

S, H, G, D = 200, 4, 2, 16
CAP = 5.0
TABLE = torch.linspace(0, 1, S)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of itself


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def qkv(dtype: torch.dtype = torch.float32, requires_grad: bool = True, length: int = 256) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, length, D) for heads in (H, G, G)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(requires_grad) for s in shapes]


def make_plan(mask=None) -> flexcp.Plan:
    return flexcp.plan(mask or masks.causal(), S, 1)


def document_plan(length: int) -> flexcp.Plan:
    return make_plan(masks.causal() & masks.document(torch.arange(S) // length))


def learned(s, b, h, q, kv, bias):
    return torch.tanh(s) + bias[h, (q - kv).abs()]


def softcap(s, b, h, q, kv):
    return torch.tanh(s / 2) * 2


def with_global_number(s, b, h, q, kv):
    return torch.tanh(s / CAP) * CAP


def with_global_tensor(s, b, h, q, kv):
    return s + TABLE[(q - kv).abs()]


def capped(cap: float):
    return lambda s, b, h, q, kv: torch.tanh(s / cap) * cap


def second(q, k, v, plan, **more) -> tuple[Tensor, Tensor]:
    return flexcp.flex_attention(q, k, v, plan, enable_gqa=True, return_lse=True, **more)


def gradients(out: Tensor, lse: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    loss = (out * out).sum() + torch.where(lse == -torch.inf, 0.0, lse).sin().sum()
    return torch.autograd.grad(loss, leaves)


def bias_of() -> Tensor:
    return torch.randn(H, S, generator=torch.Generator().manual_seed(1)).requires_grad_()


SCORES = {
    "none": (lambda bias: {}, lambda bias: {}),
    "plain": (lambda bias: {"score_mod": softcap}, lambda bias: {"score_mod": softcap}),
    "score_tensors": (
        lambda bias: {"score_mod": learned, "score_tensors": (bias,)},
        lambda bias: {"score_mod": lambda *x: learned(*x, bias)},
    ),
    "captured": (
        lambda bias: {"score_mod": flexcp.ScoreMod(lambda *x: learned(*x, bias))},
        lambda bias: {"score_mod": lambda *x: learned(*x, bias)},
    ),
    "library": (
        lambda bias: {"score_mod": flexcp.ScoreMod(scores.compose(scores.softcap(3.0), scores.distance_bias(bias)))},
        lambda bias: {"score_mod": scores.compose(scores.softcap(3.0), scores.distance_bias(bias))},
    ),
    "globals": (
        lambda bias: {"score_mod": flexcp.ScoreMod(with_global_tensor)},
        lambda bias: {"score_mod": with_global_tensor},
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", SCORES)
def test_both_doors_give_the_same_bits_eager_and_compiled(score: str, dtype: torch.dtype) -> None:
    plan, bias = make_plan(), bias_of()
    for_second, for_first = (make(bias) for make in SCORES[score])
    leaves = [*qkv(dtype), *([bias] if score in ("score_tensors", "captured", "library") else [])]
    with flexcp.context_parallel(plan):
        out, aux = flex_attention(
            *leaves[:3], block_mask=plan.block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True), **for_first
        )
        want = (out, aux.lse, *gradients(out, aux.lse, leaves))
    block = torch.compile(second, backend="aot_eager", fullgraph=True)
    for door in (second, block):
        out, lse = door(*leaves[:3], plan, **for_second)
        got = (out, lse, *gradients(out, lse, leaves))
        assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_a_hundred_plans_with_new_documents_and_new_scores_are_one_graph() -> None:
    x, bias = qkv(), bias_of()
    block = torch.compile(
        lambda *x, **more: second(*x, **more)[0] * 2, backend="aot_eager", fullgraph=True, dynamic=False
    )

    def step(plan: flexcp.Plan, bias: Tensor, door=block) -> tuple[Tensor, ...]:
        out = door(*x, plan, score_mod=learned, score_tensors=(bias,))
        return (out, *torch.autograd.grad(out.square().sum(), [*x, bias]))

    step(document_plan(99), bias)
    assert graphs() == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        for length in range(1, 101):
            # A number of documents that changes is a new shape in the plan, and not in the graph.
            plan, bias = document_plan(length), bias_of() * length
            got = step(plan, bias)
            if length % 20 == 0:
                eager = lambda *x, **more: second(*x, **more)[0] * 2  # noqa: E731
                assert all(torch.equal(a, b) for a, b in zip(got, step(plan, bias, eager)))
    assert graphs() == 1


def test_the_operator_is_in_the_graph() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs) -> object:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(second, backend=backend, fullgraph=True)(*qkv(), make_plan())
    assert seen.count("flexcp.flex_attention.default") == 1


def test_results_have_the_strides_that_a_compiler_was_promised() -> None:
    """Inductor reads by the fakes' strides, which are those of contiguous tensors whatever the inputs' are."""
    plan = make_plan()
    rows = [torch.randn(2, 256, heads, D).transpose(1, 2).requires_grad_() for heads in (H, G, G)]
    bias = torch.zeros(S, H).T.requires_grad_()
    args = (*rows, plan.block_mask.handle, constant_number(learned), [bias], 0.25)
    out, lse = torch.ops.flexcp.flex_attention(*args)
    more = (out, lse, torch.ones_like(out), None)
    grads = torch.ops.flexcp.flex_attention_backward(*rows, *more, *args[3:6], [True], 0.25, False)
    assert len(grads) == 4
    assert all(x.is_contiguous() for x in (out, lse, *grads))


def test_several_masks_by_name_and_by_token() -> None:
    plan = flexcp.plan({"causal": masks.causal(), "window": masks.sliding_window(20)}, S, 1)
    x = qkv(requires_grad=False)
    i = torch.arange(256)
    for name, visible in (("causal", i[:, None] >= i), ("window", (i[:, None] >= i) & (i[:, None] - i < 20))):
        want, _ = oracle.attention(*x, visible & (i[:, None] < S))
        for arguments in ({"plan": plan, "mask": name}, {"block_mask": plan.block_masks[name]}):
            got = flexcp.flex_attention(*x, enable_gqa=True, **arguments)
            torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="no mask 'other'"):
        flexcp.flex_attention(*x, plan, mask="other", enable_gqa=True)
    with pytest.raises(ValueError, match="several masks"):
        flexcp.flex_attention(*x, plan, enable_gqa=True)


@pytest.mark.parametrize("before", ["forward", "backward"])
def test_a_plan_that_is_gone_is_named(before: str) -> None:
    plan, x = make_plan(), qkv()
    mask = plan.block_mask
    out = flexcp.flex_attention(*x, plan, enable_gqa=True)
    del plan
    gc.collect()
    use = {
        "forward": lambda: flexcp.flex_attention(*x, block_mask=mask, enable_gqa=True),
        "backward": lambda: out.sum().backward(),
    }[before]
    with pytest.raises(RuntimeError, match="plan of this attention no longer exists"):
        use()


def test_closures_of_one_code_are_told_apart() -> None:
    plan, x = make_plan(), qkv(requires_grad=False)
    block = torch.compile(second, backend="aot_eager", fullgraph=True)
    outs = [second(*x, plan, score_mod=capped(cap))[0] for cap in (1.0, 2.0)]
    assert not torch.equal(*outs)
    for cap, out in zip((1.0, 2.0), outs):
        assert torch.equal(block(*x, plan, score_mod=flexcp.ScoreMod(capped(cap)))[0], out)


@pytest.mark.parametrize(
    ("score_mod", "what"), [(capped(2.0), "captures cap"), (with_global_number, "captures global CAP")]
)
def test_compiled_code_refuses_a_function_that_dynamo_could_confuse(score_mod, what: str) -> None:
    with pytest.raises(Exception, match=f"{what}; make it a flexcp.ScoreMod"):
        torch.compile(second, backend="aot_eager", fullgraph=True)(*qkv(), make_plan(), score_mod=score_mod)


class Holder(torch.nn.Module):
    def score(self, s, b, h, q, kv):
        return s


def recursive(s, b, h, q, kv):
    return recursive(s, b, h, q, kv)


@pytest.mark.parametrize(("score_mod", "what"), [(Holder().score, "a Holder"), (recursive, "captures itself")])
def test_a_score_that_cannot_be_passed_is_refused(score_mod, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        flexcp.flex_attention(*qkv(), make_plan(), enable_gqa=True, score_mod=score_mod)


def wrong(change: str) -> None:
    q, k, v = qkv(length=512 if change == "length" else 256)
    more = {"plan": make_plan(), "enable_gqa": change != "heads"}
    if change == "dtype":
        k = k.bfloat16()
    if change == "batch":
        q = q.expand(2, -1, -1, -1)
    if change == "dims":
        q, k, v = (x[0] for x in (q, k, v))
    if change == "subclass":
        q = torch.nn.Buffer(q)
        q.__class__ = type("Other", (torch.Tensor,), {})
    if change == "no plan":
        more["plan"] = None
    if change == "own mask":
        more["plan"] = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256, device="cpu")
    if change == "two":
        more["block_mask"] = more["plan"].block_mask
    if change == "tensors":
        more["score_tensors"] = (q,)
    if change == "no group":
        more["plan"] = flexcp.plan(masks.causal(), 2 * S, 2, rank=0)
    flexcp.flex_attention(q, k, v, **more)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("length", "512 rows, but this rank's shard of the 200 tokens has 256; shard the inputs"),
        ("heads", "enable_gqa=True"),
        ("dtype", "cast them to one dtype"),
        ("batch", "2, 1 and 1 batch rows; make them equal"),
        ("dims", r"takes q \[B, H, L, D\]"),
        ("subclass", "a Other, but sharded attention needs plain local tensors"),
        ("no plan", "needs a plan, or the block mask of one, but got a NoneType"),
        ("own mask", "got a BlockMask; the mask itself goes to flexcp.plan"),
        ("two", "pass one of them"),
        ("tensors", "no score_mod that takes them"),
        ("no group", "group of 2 that does not exist"),
    ],
)
def test_wrong_use_gets_a_sentence(change: str, sentence: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError), match=sentence):
        wrong(change)


def test_the_first_door_refuses_unequal_batches_with_our_sentence() -> None:
    plan, (q, k, v) = make_plan(), qkv()
    with flexcp.context_parallel(plan), pytest.raises(ValueError, match="batch rows; make them equal"):
        flex_attention(q.expand(2, -1, -1, -1), k, v, block_mask=plan.block_mask, enable_gqa=True)


def test_double_backward_and_torch_func_are_refused() -> None:
    plan, x = make_plan(), qkv()
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        torch.autograd.grad(flexcp.flex_attention(*x, plan, enable_gqa=True).square().sum(), x, create_graph=True)
    loss = lambda q: flexcp.flex_attention(q, *x[1:], plan, enable_gqa=True).sum()  # noqa: E731
    for transformed, q in ((torch.func.grad(loss), x[0]), (torch.func.vmap(loss), x[0][None])):
        with pytest.raises(NotImplementedError, match=r"torch\.func"):
            transformed(q)
    operator = torch.ops.flexcp.flex_attention
    with pytest.raises(NotImplementedError, match=r"does not work under torch\.func"):
        torch.func.grad(lambda q: operator(q, *x[1:3], plan.block_mask.handle, 0, [], 1.0)[0].sum())(x[0])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        loss(forward_ad.make_dual(x[0], torch.ones_like(x[0])))


def test_without_gradients_and_under_autocast_nothing_changes() -> None:
    plan, x = make_plan(), qkv()
    want = flexcp.flex_attention(*x, plan, enable_gqa=True).detach()
    for context in (torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)):
        with context():
            assert torch.equal(flexcp.flex_attention(*x, plan, enable_gqa=True), want)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpointing_saves_the_operator(compiled: bool, inside: bool, monkeypatch) -> None:
    from flexcp import call

    plan, x, count = make_plan(), qkv(), []
    forward = call.forward
    monkeypatch.setattr(call, "forward", lambda *a: count.append(1) or forward(*a))

    def policy(ctx, op, *args, **kwargs):
        saved = op is torch.ops.flexcp.flex_attention.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return second(q * 1.5, k, v, plan)[0].sin()

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    function = lambda *x: checkpoint(block, *x, use_reentrant=False, context_fn=contexts)  # noqa: E731
    if compiled:
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    want = torch.autograd.grad(block(*x).sum(), x)
    count.clear()
    if inside:
        with flexcp.context_parallel(plan):
            got = torch.autograd.grad(function(*x).sum(), x)
    else:
        got = torch.autograd.grad(function(*x).sum(), x)
    assert len(count) == 1, "attention was computed again"
    assert all(torch.equal(a, b) for a, b in zip(got, want))
