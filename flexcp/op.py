"""The door for compiled code: attention over a plan as an operator, which goes into a graph.

An operator takes neither plans nor functions. A plan is given by the number of its token (`tokens`), in a small tensor,
so that a new plan is new data and no recompile; a score_mod by the number of its code, and its tensors one by one
(`scoremod`), so that autograd sees them. Below that, both doors are one (`call`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp import arguments, call, compat
from flexcp.api import Plan
from flexcp.dispatch import ContextParallelMode
from flexcp.kernel import Score, accumulation_dtype
from flexcp.scoremod import IDENTITY, ScoreMod, code_and_tensors, constant_number, function_of
from flexcp.tokens import TokenMask, token_by

_TWICE = "attention over a sharded sequence cannot be differentiated twice; call backward without create_graph=True"
_TRANSFORMED = "attention over a sharded sequence does not work under torch.func transforms; use torch.autograd"

_FORWARD_MODE = "attention over a sharded sequence has no forward-mode derivative; use backward or torch.autograd.grad"

_probed = {IDENTITY}  # numbers of score_mods that return a tensor

# plan: a token's handle. score, score_tensors: see `scoremod`. lse is to the base 2, as in torch's own operator.
torch.library.define(
    "flexcp::flex_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor plan, SymInt score, Tensor[] score_tensors, float scale) "
    "-> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
torch.library.define(
    "flexcp::flex_attention_backward",
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, Tensor plan, SymInt score, "
    "Tensor[] score_tensors, bool[] needs_grad, float scale, bool sum_captured) -> Tensor[]",
    tags=torch.Tag.pt2_compliant_tag,
)


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan | BlockMask | None = None,
    *,
    mask: str | None = None,
    score_mod: Callable[..., Tensor] | ScoreMod | None = None,
    score_tensors: Sequence[Tensor] = (),
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    block_mask: BlockMask | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of this rank's rows over the whole sequence of a plan, in eager and in compiled code.

    It takes what torch's flex_attention takes, and goes into a graph (`fullgraph=True`) as one operator. A new plan
    does not recompile. No context is needed; forward and backward give bit for bit what torch's function gives inside
    `context_parallel`.

    Args:
        q: [B, H, L, D]; k: [B, G, L, D]; v: [B, G, L, Dv]: this rank's shards (`plan.shard`), of one dtype. H is a
            multiple of G; where they differ, enable_gqa must be True.
        plan: from `flexcp.plan`. The operator holds it weakly: keep it until backward has run.
        mask: which of the plan's masks, where there are several.
        score_mod: (score, b, h, q_idx, kv_idx, *score_tensors) -> score, in global indices. Compiled code takes a
            function that captures nothing, or a `flexcp.ScoreMod`; eager code takes any function.
        score_tensors: what the score learns, or reads. Their gradient is this rank's part, as that of every replicated
            parameter; inside `context_parallel(plan, captured_grads="sum")`, their sum.
        scale: factor on q @ k; None: 1 / sqrt(D).
        return_lse: also give the logarithm of each row's denominator.
        block_mask: in the place of plan and mask, `plan.block_mask` or one of `plan.block_masks`: so a model that calls
            torch's function can call this one.
    Returns:
        out [B, H, L, Dv] in the dtype of q; with return_lse (out, lse), lse [B, H, L] the natural logarithm in fp32
        (fp64 for fp64 inputs), -inf for rows that see nothing. Both are differentiable, once.
    Raises:
        ValueError, TypeError: what does not fit, and what to do.
        RuntimeError: the plan is gone, or was made for a group that does not exist.
        NotImplementedError: under torch.func, or in double backward.

    >>> import torch, flexcp
    >>> from flexcp import masks
    >>> plan = flexcp.plan(masks.causal(), seq_len=256, mesh=1)
    >>> q, k, v = torch.randn(3, 1, 2, 256, 16)
    >>> block = torch.compile(lambda *x: flexcp.flex_attention(*x, plan) * 2, backend="eager", fullgraph=True)
    >>> torch.equal(block(q, k, v), flexcp.flex_attention(q, k, v, plan) * 2)
    True
    """
    call.check_together(q, k, v)
    if not torch.compiler.is_compiling() and compat.inside_functorch():
        raise NotImplementedError(_TRANSFORMED)
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(f"q has {q.shape[1]} heads, k and v have {k.shape[1]}; pass enable_gqa=True")
    arguments.check_scale(scale)
    handle = _handle(plan, mask, block_mask)
    number, captured = _score(score_mod)
    tensors = [*score_tensors, *captured]
    if score_mod is None and tensors:
        raise ValueError("score_tensors were given, but no score_mod that takes them")
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    out, lse = torch.ops.flexcp.flex_attention.default(q, k, v, handle, number, tensors, scale)
    return (out, lse * call.LN2) if return_lse else out


def _handle(plan: Plan | BlockMask | None, mask: str | None, block_mask: BlockMask | None) -> Tensor:
    if isinstance(plan, Plan):
        if block_mask is not None:
            raise ValueError("flex_attention was given a plan and a block_mask; pass one of them")
        token = plan.block_mask if mask is None else plan.block_masks.get(mask)
        if token is None:
            raise ValueError(f"this plan has no mask {mask!r}, but {list(plan.block_masks)}")
    else:
        token = block_mask if plan is None else plan
    if not isinstance(token, TokenMask):
        raise ValueError(
            f"flexcp.flex_attention needs a plan, or the block mask of one, but got a {type(token).__name__}; the mask "
            "itself goes to flexcp.plan, and attention that is not sharded to torch's own flex_attention"
        )
    return token.handle


def _score(score_mod: Callable[..., Tensor] | ScoreMod | None) -> tuple[int, tuple[Tensor, ...]]:
    if score_mod is None:
        return IDENTITY, ()
    if isinstance(score_mod, ScoreMod):
        return score_mod.number, score_mod.tensors
    if torch.compiler.is_compiling():
        return constant_number(score_mod), ()
    arguments.require_callable(score_mod)
    return code_and_tensors(score_mod)


@torch.library.impl("flexcp::flex_attention", "CompositeExplicitAutograd")
@torch.compiler.disable
def _attention(q, k, v, handle, score, score_tensors, scale):
    token, modified = token_by(handle), Score(function_of(score), tuple(score_tensors))
    if score not in _probed:
        # Here, where compiled code's score is a function again, too.
        arguments.require_tensor(modified.function, score_tensors)
        _probed.add(score)
    with compat.below_autograd():
        out, lse = call.forward(q, k, v, token, token.plan(), modified, scale)
    return out.contiguous(), lse.contiguous()  # the strides that the fakes promise: inductor reads by them


@torch.library.register_fake("flexcp::flex_attention")
def _fake_attention(q, k, v, handle, score, score_tensors, scale):
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype))


@torch.library.impl("flexcp::flex_attention_backward", "CompositeExplicitAutograd")
@torch.compiler.disable
def _attention_backward(q, k, v, out, lse, dout, dlse, handle, score, tensors, needs_grad, scale, sum_captured):
    token, modified = token_by(handle), Score(function_of(score), tuple(tensors), tuple(needs_grad))
    with compat.below_autograd():
        *dqkv, grads = call.backward(q, k, v, out, lse, dout, dlse, token, token.plan(), modified, scale, sum_captured)
    return [grad.contiguous() for grad in (*dqkv, *grads) if grad is not None]


@torch.library.register_fake("flexcp::flex_attention_backward")
def _fake_backward(q, k, v, out, lse, dout, dlse, handle, score, score_tensors, needs_grad, scale, sum_captured):
    wanted = [x for x, needed in zip(score_tensors, needs_grad) if needed]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, *wanted)]


class _Differentiable(torch.autograd.Function):
    """What `torch.library.register_autograd` would make, whose unpacking of any arguments costs 0.1 ms a call."""

    @staticmethod
    def forward(ctx: Any, q, k, v, handle, score, scale, *score_tensors):
        with compat.past_autograd():
            out, lse = torch.ops.flexcp.flex_attention.default(q, k, v, handle, score, score_tensors, scale)
        ctx.score, ctx.scale = score, scale
        ctx.needs_grad = [x.requires_grad for x in score_tensors]
        # A missing gradient of lse is no input of the kernel, and not zeros.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, handle, *score_tensors)
        return out, lse

    @staticmethod
    def jvp(ctx: Any, *tangents: Any):
        raise NotImplementedError(_FORWARD_MODE)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None):
        if torch.is_grad_enabled():
            raise NotImplementedError(_TWICE)
        q, k, v, out, lse, handle, *tensors = ctx.saved_tensors
        (*dqkv,) = torch.ops.flexcp.flex_attention_backward.default(
            q, k, v, out, lse, dout, dlse, handle, ctx.score, tensors, ctx.needs_grad, ctx.scale, False
        )
        grads = iter(dqkv[3:])
        return *dqkv[:3], None, None, None, *(next(grads) if needed else None for needed in ctx.needs_grad)


@torch.library.impl("flexcp::flex_attention", "Autograd")
def _differentiable(q, k, v, handle, score, score_tensors, scale):
    if compat.inside_functorch():
        raise NotImplementedError(_TRANSFORMED)
    return _Differentiable.apply(q, k, v, handle, score, scale, *score_tensors)


@torch.library.register_torch_dispatch("flexcp::flex_attention_backward", ContextParallelMode)
def _in_context(mode: ContextParallelMode, func: Any, types: Any, args: tuple, kwargs: dict | None) -> Any:
    """A context that sums the gradients of captured tensors sums those of its own plan's score_tensors."""
    *rest, handle, score, score_tensors, needs_grad, scale, sum_captured = args
    summed = mode.captured_grads == "sum" and mode.plan is token_by(handle).plan()
    return func(*rest, handle, score, score_tensors, needs_grad, scale, sum_captured or summed)


@torch.library.register_vmap("flexcp::flex_attention")
def _vmap(info: Any, in_dims: Any, *args: Any) -> Any:
    raise NotImplementedError(_TRANSFORMED)
