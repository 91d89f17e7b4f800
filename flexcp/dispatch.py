"""The door for unmodified model code: a dispatch mode that catches the flex_attention operators, forward and backward.

`plan.block_mask` is only a *token*. Its mask_mod calls an operator that raises when it is executed, so attention over a
shard can never silently be local attention: outside the context, in backward outside it, on another thread or in a
region that a compiler lowers, it stops with a sentence. Inside, the rules below recognise the token and put the plan's
schedule in its place.
"""

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp import attention, compat
from flexcp.kernel import Score, accumulation_dtype
from flexcp.planner import Schedule

if TYPE_CHECKING:
    from flexcp.api import Plan

_LN2 = math.log(2.0)

_OUTSIDE = (
    "attention over a sharded sequence ran outside its context: this block mask belongs to a flexcp plan. Call the "
    "model, and .backward() too, inside `with flexcp.context_parallel(plan):`, on the same thread, and keep the "
    "attention call out of torch.compile"
)

torch.library.define("flexcp::only_inside_context", "(Tensor index) -> Tensor")


@torch.library.impl("flexcp::only_inside_context", "CompositeExplicitAutograd")
def _raise_outside(index: Tensor) -> Tensor:
    raise RuntimeError(_OUTSIDE)


@torch.library.register_fake("flexcp::only_inside_context")
def _fake_outside(index: Tensor) -> Tensor:
    return torch.empty_like(index, dtype=torch.bool)


@torch.library.register_vmap("flexcp::only_inside_context")
def _vmap_outside(info: Any, in_dims: tuple[int | None, ...], index: Tensor) -> tuple[Tensor, int | None]:
    return torch.ops.flexcp.only_inside_context(index), in_dims[0]


def _token_mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.ops.flexcp.only_inside_context(q_idx)


_ids = itertools.count(1)
_tokens: "weakref.WeakValueDictionary[int, Token]" = weakref.WeakValueDictionary()


class Token:
    """A block mask that stands for one mask of one plan.

    It is known by a number, kept as a negative count of blocks, which no real BlockMask has. The number travels with
    the tensor wherever saved-tensor hooks take it.
    """

    def __init__(self, plan: "Plan", schedule: Callable[[], Schedule], device: torch.device) -> None:
        self.plan = weakref.ref(plan)
        self.schedule = schedule
        self.id = next(_ids)
        length = plan.local_len
        count = torch.full((1, 1, 1), -self.id, dtype=torch.int32, device=device)
        index = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
        self.block_mask = BlockMask(
            seq_lengths=(length, length),
            kv_num_blocks=count,
            kv_indices=index,
            full_kv_num_blocks=None,
            full_kv_indices=None,
            q_num_blocks=count,
            q_indices=index,
            full_q_num_blocks=None,
            full_q_indices=None,
            # With this block size torch leaves the comparison of lengths to the rule, whose sentence knows the plan.
            BLOCK_SIZE=(compat.WHOLE_SEQUENCE_BLOCK, compat.WHOLE_SEQUENCE_BLOCK),
            mask_mod=_token_mask_mod,
        )
        _tokens[self.id] = self


def _token_of(block_mask: tuple[Any, ...]) -> Token | None:
    return _tokens.get(-int(block_mask[2].flatten()[0])) if block_mask[2].numel() else None


class _ContextParallelMode(compat.TorchDispatchMode):
    """Active inside `context_parallel`; everything but flex_attention passes through."""

    supports_higher_order_operators = True

    def __init__(self, plan: "Plan | None", captured_grads: str) -> None:
        super().__init__()
        self.plan = plan
        self.captured_grads = captured_grads

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _contexts() -> list[_ContextParallelMode]:
    return [mode for mode in compat.active_modes() if isinstance(mode, _ContextParallelMode)]


@contextmanager
def context_parallel(plan: "Plan", *, captured_grads: str = "partial") -> Iterator[None]:
    """Inside, `torch.nn.attention.flex_attention.flex_attention` on this thread runs over the plan's whole sequence.

    Backward belongs inside, too. Contexts nest: a call belongs to the plan whose block mask it carries, and a call
    with `block_mask=None`, which is full attention over the whole sequence, to the innermost.

    Args:
        plan: from `flexcp.plan`.
        captured_grads: "partial": the gradient of a tensor captured by a score_mod is this rank's part, to be summed
            over cp with those of all replicated parameters; "sum": it is summed here, for a bare `autograd.grad`.
    Raises:
        ValueError: captured_grads is neither.
        RuntimeError: the plan was made for a group that does not exist.
    """
    if captured_grads not in ("partial", "sum"):
        raise ValueError(f"captured_grads is 'partial' or 'sum', got {captured_grads!r}")
    plan.require_group()
    with _trainable_on_cpu(), _ContextParallelMode(plan, captured_grads):
        yield


@contextmanager
def bypass() -> Iterator[None]:
    """Inside, flex_attention is torch's own again, for attention over tensors that are not sharded."""
    with _trainable_on_cpu(), _ContextParallelMode(None, "partial"):
        yield


def _forward_rule(
    mode, q, k, v, score_mod, block_mask, scale, kernel_options, score_buffers=(), mask_buffers=()
):
    plans = [context.plan for context in (*_contexts(), mode)]
    if mode.plan is None:
        with compat.without_modes():
            return compat.flex_operator(
                q, k, v, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers
            )
    token = _token_of(block_mask)
    if token is None:
        token = _whole_sequence_token(mode.plan, block_mask)
    plan = token.plan()
    if plan is None or not any(plan is other for other in plans):
        raise RuntimeError(
            "this block mask belongs to another plan than the active one; enter flexcp.context_parallel of its plan"
        )
    schedule = token.schedule()
    _check_inputs(q, k, v, plan, schedule, kernel_options)
    score = Score(_unless_identity(score_mod), tuple(score_buffers))
    out, lse = attention.forward(q, k, v, schedule, score, scale, plan.link)
    # The operator speaks log2; the public function turns it back into the natural logarithm.
    return out.to(q.dtype), lse / _LN2, torch.full_like(lse, -torch.inf)


def _backward_rule(
    mode,
    q,
    k,
    v,
    out,
    lse,
    dout,
    dlse,
    fw_graph,
    joint_graph,
    block_mask,
    scale,
    kernel_options,
    score_buffers=(),
    mask_buffers=(),
):
    token = _token_of(block_mask)
    if token is None:
        # No forward inside a context takes a foreign mask, so this one ran outside it or under `bypass`: it was local.
        with compat.without_modes():
            return compat.flex_backward_operator(
                q,
                k,
                v,
                out,
                lse,
                dout,
                dlse,
                fw_graph,
                joint_graph,
                block_mask,
                scale,
                kernel_options,
                score_buffers,
                mask_buffers,
            )
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "attention over a sharded sequence cannot be differentiated twice; call backward without create_graph=True"
        )
    plan = token.plan()
    owner = next((c for c in (mode, *reversed(_contexts())) if c.plan is not None and c.plan is plan), None)
    if plan is None or owner is None:
        raise RuntimeError(_OUTSIDE)
    needs_grad = _buffers_that_need_grad(joint_graph, score_buffers)
    score = Score(_unless_identity(fw_graph), tuple(score_buffers), needs_grad)
    dtype = accumulation_dtype(q.dtype)
    dq, dk, dv, dbuffers = attention.backward(
        q,
        k,
        v,
        out,
        lse.to(dtype) * _LN2,
        torch.zeros_like(out) if dout is None else dout,
        None if dlse is None else dlse.to(dtype) / _LN2,
        token.schedule(),
        score,
        scale,
        plan.link,
    )
    if owner.captured_grads == "sum":
        dbuffers = [None if grad is None else plan.link.all_reduce(grad) for grad in dbuffers]
    grads = tuple(
        None if grad is None else grad.to(buffer.dtype) for grad, buffer in zip(dbuffers, score_buffers)
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), grads


compat.flex_operator.py_impl(_ContextParallelMode)(_forward_rule)
compat.flex_backward_operator.py_impl(_ContextParallelMode)(_backward_rule)


def _whole_sequence_token(plan: "Plan", block_mask: tuple[Any, ...]) -> Token:
    """The token of full attention, for a call with block_mask=None; any real BlockMask is refused."""
    *_, q_block, kv_block, _ = block_mask
    if (q_block, kv_block) != (compat.WHOLE_SEQUENCE_BLOCK, compat.WHOLE_SEQUENCE_BLOCK):
        raise ValueError(
            f"inside flexcp.context_parallel, flex_attention was given a BlockMask of {block_mask[0]} x {block_mask[1]} "
            "that is not this plan's; pass block_mask=plan.block_mask (the mask itself goes to flexcp.plan), or wrap "
            "attention that is not sharded in `with flexcp.bypass():`"
        )
    token = plan.whole_sequence_token
    # torch makes this mask afresh for every such call. Marking it tells backward which plan the call belongs to.
    block_mask[2].fill_(-token.id)
    return token


def _check_inputs(
    q: Tensor, k: Tensor, v: Tensor, plan: "Plan", schedule: Schedule, kernel_options: dict
) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) not in (Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name} is a {type(x).__name__}, but sharded attention needs plain local tensors; call .to_local() first"
            )
        if x.shape[2] != plan.local_len:
            raise ValueError(
                f"{name} has {x.shape[2]} rows, but this rank's shard of the {plan.seq_len} tokens has {plan.local_len}; "
                "shard the inputs with plan.shard (or wrap attention that is not sharded in `with flexcp.bypass():`)"
            )
    source = schedule.source
    for what, given, known in (
        ("batch rows", q.shape[0], source.batch),
        ("query heads", q.shape[1], source.heads),
    ):
        if known not in (1, given):
            raise ValueError(f"q has {given} {what}, but the plan's mask is made for {known}")
    if kernel_options.get("OUTPUT_MAX"):
        raise NotImplementedError("max_scores cannot be returned under context parallelism; ask for lse only")


def _unless_identity(score_mod: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    """None for a score_mod that hands the score back."""
    if isinstance(score_mod, torch.fx.GraphModule):
        first, *_ = score_mod.graph.nodes
        result = score_mod.graph.output_node().args[0]
        if isinstance(result, (tuple, list)) and len(result) == 1:
            result = result[0]
        return None if result is first else score_mod
    return None if getattr(score_mod, "__name__", "") == "_identity" else score_mod


def _buffers_that_need_grad(joint_graph: Any, buffers: tuple[Any, ...]) -> tuple[bool, ...]:
    """Read off the joint graph, which was traced when the buffers still said so: hooks may unpack them without."""
    if isinstance(joint_graph, torch.fx.GraphModule):
        grads = joint_graph.graph.output_node().args[0][5:]
        return tuple(grad is not None for grad in grads)
    return tuple(isinstance(x, Tensor) and x.is_floating_point() for x in buffers)


@dataclass
class _Replaced:
    """How many contexts of the process have replaced torch's checks, and what they replaced."""

    lock: threading.Lock
    users: int = 0
    originals: dict[str, Callable[..., None]] = field(default_factory=dict)


_replaced = _Replaced(threading.Lock())


@contextmanager
def _trainable_on_cpu() -> Iterator[None]:
    """Lets flex_attention take CPU tensors that require grad, on threads with an active context only.

    torch refuses them in its public function, before anything could intercept it. Its check is one name for the whole
    process, so the replacement asks the calling thread's own modes and falls back to the original. So does the
    advice to compile flex_attention, which is wrong inside a context.
    """
    module = compat.flex_public_module()
    with _replaced.lock:
        if _replaced.users == 0:
            for name, replacement in (("_validate_device", _validate_device), ("_warn_once", _warn_once)):
                _replaced.originals[name] = getattr(module, name)
                setattr(module, name, replacement)
        _replaced.users += 1
    try:
        yield
    finally:
        with _replaced.lock:
            _replaced.users -= 1
            if _replaced.users == 0:
                for name, original in _replaced.originals.items():
                    setattr(module, name, original)


def _validate_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    if torch.compiler.is_dynamo_compiling() or not _contexts():
        _replaced.originals["_validate_device"](query, key, value)
    elif compat.inside_functorch():
        raise NotImplementedError(
            "attention over a sharded sequence does not work under torch.func transforms; use torch.autograd"
        )
    elif query.device.type != "cpu":
        _replaced.originals["_validate_device"](query, key, value)


def _warn_once(*args: Any, **kwargs: Any) -> None:
    if torch.compiler.is_dynamo_compiling() or not _contexts():
        _replaced.originals["_warn_once"](*args, **kwargs)
