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
from types import ModuleType
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


_REFUSED = 1  # the number of a token that belongs to no plan
_ids = itertools.count(_REFUSED + 1)
_tokens: "weakref.WeakValueDictionary[int, Token]" = weakref.WeakValueDictionary()
# The same tokens by the address of their counts, which spares a GPU the wait for a number.
_tokens_at: "weakref.WeakValueDictionary[int, Token]" = weakref.WeakValueDictionary()


class Token:
    """A block mask that stands for one mask of one plan.

    It is known by a number, kept as a negative count of blocks, which no real BlockMask has. The number travels with
    the tensor wherever saved-tensor hooks take it.
    """

    def __init__(self, plan: "Plan", schedule: Schedule, device: torch.device) -> None:
        self.plan = weakref.ref(plan)
        self.schedule = schedule
        self.id = next(_ids)
        self.block_mask = _token_block_mask(-self.id, plan.local_len, plan.local_len, device)
        _tokens[self.id] = self
        _tokens_at[self.block_mask.kv_num_blocks.data_ptr()] = self


def _token_block_mask(count: int, q_len: int, kv_len: int, device: torch.device) -> BlockMask:
    num_blocks = torch.full((1, 1, 1), count, dtype=torch.int32, device=device)
    indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    return BlockMask(
        seq_lengths=(q_len, kv_len),
        kv_num_blocks=num_blocks,
        kv_indices=indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=num_blocks,
        q_indices=indices,
        full_q_num_blocks=None,
        full_q_indices=None,
        # With this block size torch leaves the comparison of lengths to the rule, whose sentence knows the plan.
        BLOCK_SIZE=(compat.WHOLE_SEQUENCE_BLOCK, compat.WHOLE_SEQUENCE_BLOCK),
        mask_mod=_token_mask_mod,
    )


def _token_of(block_mask: tuple[Any, ...]) -> Token | None:
    """The token that a BlockMask's tuple stands for; None for a real BlockMask."""
    num_blocks = block_mask[2]
    at = _tokens_at.get(num_blocks.data_ptr())
    return at or (_tokens.get(-int(num_blocks.flatten()[0])) if num_blocks.numel() else None)


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
    with _way_prepared(), _ContextParallelMode(plan, captured_grads):
        yield


@contextmanager
def bypass() -> Iterator[None]:
    """Inside, flex_attention is torch's own again, for attention over tensors that are not sharded."""
    with _way_prepared(), _ContextParallelMode(None, "partial"):
        yield


def _forward_rule(mode, q, k, v, score_mod, block_mask, scale, kernel_options, score_buffers=(), mask_buffers=()):
    plans = [context.plan for context in (*_contexts(), mode)]
    if mode.plan is None:
        with compat.without_modes():
            return compat.flex_operator(
                q, k, v, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers
            )
    token = _token_of(block_mask)
    if token is None:
        raise ValueError(
            f"inside flexcp.context_parallel, flex_attention was given a BlockMask of {block_mask[0]} x "
            f"{block_mask[1]} that is not this plan's; pass block_mask=plan.block_mask (the mask itself goes to "
            "flexcp.plan), or wrap attention that is not sharded in `with flexcp.bypass():`"
        )
    plan = token.plan()
    if plan is None or not any(plan is other for other in plans):
        raise RuntimeError(
            "this block mask belongs to another plan than the active one; enter flexcp.context_parallel of its plan"
        )
    schedule = token.schedule
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
    score = Score(_unless_identity(fw_graph), tuple(score_buffers), joint_graph.needs_grad)
    dtype = accumulation_dtype(q.dtype)
    dq, dk, dv, dbuffers = attention.backward(
        q,
        k,
        v,
        out,
        lse.to(dtype) * _LN2,
        torch.zeros_like(out) if dout is None else dout,
        None if dlse is None else dlse.to(dtype) / _LN2,
        token.schedule,
        score,
        scale,
        plan.link,
    )
    if owner.captured_grads == "sum":
        dbuffers = [None if grad is None else plan.link.all_reduce(grad) for grad in dbuffers]
    grads = tuple(None if grad is None else grad.to(buffer.dtype) for grad, buffer in zip(dbuffers, score_buffers))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), grads


compat.flex_operator.py_impl(_ContextParallelMode)(_forward_rule)
compat.flex_backward_operator.py_impl(_ContextParallelMode)(_backward_rule)


def _check_inputs(q: Tensor, k: Tensor, v: Tensor, plan: "Plan", schedule: Schedule, kernel_options: dict) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[2] != plan.local_len:
            raise ValueError(
                f"{name} has {x.shape[2]} rows, but this rank's shard of the {plan.seq_len} tokens has "
                f"{plan.local_len}; shard the inputs with plan.shard (or wrap attention that is not sharded in "
                "`with flexcp.bypass():`)"
            )
    if k.shape[0] != v.shape[0] or k.shape[0] not in (1, q.shape[0]):
        raise ValueError(f"q, k and v have {q.shape[0]}, {k.shape[0]} and {v.shape[0]} batch rows; make them equal")
    source = schedule.source
    for what, given, known in (
        ("batch rows", q.shape[0], source.batch),
        ("query heads", q.shape[1], schedule.mask_heads),
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


@dataclass
class _Replaced:
    """How many contexts of the process have replaced names in torch's modules, and what they replaced."""

    lock: threading.Lock
    users: int = 0
    originals: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def install(self) -> None:
        for module, replacement in _replacements():
            self.originals[replacement.__name__] = getattr(module, replacement.__name__)
            setattr(module, replacement.__name__, replacement)

    def restore(self) -> None:
        for module, replacement in _replacements():
            setattr(module, replacement.__name__, self.originals[replacement.__name__])


_replaced = _Replaced(threading.Lock())


def _replacements() -> list[tuple[ModuleType, Callable[..., Any]]]:
    public, operators = compat.flex_public_module(), compat.flex_operator_module()
    return [
        (public, _validate_device),
        (public, _create_empty_block_mask),
        (public, _warn_once),
        (operators, create_fw_bw_graph),
    ]


@contextmanager
def _way_prepared() -> Iterator[None]:
    """Prepares torch's way from its public flex_attention to the rules, on threads with an active context only.

    Before anything could intercept the call, it refuses CPU tensors that require grad, makes a mask of its own for
    block_mask=None, advises to compile what a context must see, and traces the score_mod's gradient. These are names
    of the whole process, so the replacements ask the calling thread's own modes and fall back to the originals.
    """
    with _replaced.lock:
        if _replaced.users == 0:
            _replaced.install()
        _replaced.users += 1
    try:
        yield
    finally:
        with _replaced.lock:
            _replaced.users -= 1
            if _replaced.users == 0:
                _replaced.restore()


def _validate_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    if torch.compiler.is_dynamo_compiling() or not _contexts():
        _replaced.originals["_validate_device"](query, key, value)
        return
    for name, x in (("q", query), ("k", key), ("v", value)):
        # Here and not in the rule, since Dynamo stumbles over a DTensor on the way.
        if type(x) not in (Tensor, torch.nn.Parameter) and _contexts()[-1].plan is not None:
            raise TypeError(
                f"{name} is a {type(x).__name__}, but sharded attention needs plain local tensors; "
                "call .to_local() first"
            )
    if compat.inside_functorch():
        raise NotImplementedError(
            "attention over a sharded sequence does not work under torch.func transforms; use torch.autograd"
        )
    if query.device.type != "cpu":
        _replaced.originals["_validate_device"](query, key, value)


def _create_empty_block_mask(query: Tensor, key: Tensor) -> BlockMask:
    """The mask that torch makes for block_mask=None: here, full attention over the innermost plan's sequence."""
    if torch.compiler.is_dynamo_compiling():
        # A compiler lowers the operator where no rule sees it, so it gets a mask that stops it.
        return _token_block_mask(-_REFUSED, query.shape[-2], key.shape[-2], query.device)
    contexts = _contexts()
    if not contexts or contexts[-1].plan is None:
        return _replaced.originals["_create_empty_block_mask"](query, key)
    return contexts[-1].plan.whole_sequence_token.block_mask


def _warn_once(*args: Any, **kwargs: Any) -> None:
    if torch.compiler.is_dynamo_compiling() or not _contexts():
        _replaced.originals["_warn_once"](*args, **kwargs)


@dataclass(frozen=True)
class _JointGraph:
    """Stands where torch keeps the traced gradient of a score_mod; says only which captured tensors want one."""

    needs_grad: tuple[bool, ...]

    def __call__(self, *args: Any) -> Any:
        raise RuntimeError(_OUTSIDE)


def create_fw_bw_graph(score_mod: Callable[..., Tensor], index_values: Any, other_buffers: tuple[Any, ...]) -> Any:
    """Leaves the score_mod's gradient to the kernel, which takes it at the time of backward.

    torch would trace it now, under whatever saved-tensor hooks are active. Those of non-reentrant checkpointing
    recompute the checkpointed region inside the trace, and the gradients come out wrong.
    """
    contexts = _contexts()
    if not contexts or contexts[-1].plan is None:
        return _replaced.originals["create_fw_bw_graph"](score_mod, index_values, other_buffers)
    return score_mod, _JointGraph(tuple(isinstance(x, Tensor) and x.requires_grad for x in other_buffers))
