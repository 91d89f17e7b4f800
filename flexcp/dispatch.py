"""The door for unmodified model code: a dispatch mode that catches the flex_attention operators, forward and backward.

Inside `context_parallel` the rules below recognise the token that a plan hands out as its block mask (`tokens`), and
put the plan's schedule in its place. Everywhere else that token raises.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp import arguments, call, compat
from flexcp.kernel import Score
from flexcp.tokens import IN_A_GRAPH, OUTSIDE, token_of

if TYPE_CHECKING:
    from flexcp.api import Plan


class ContextParallelMode(compat.TorchDispatchMode):
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


def _contexts() -> list[ContextParallelMode]:
    return [mode for mode in compat.active_modes() if isinstance(mode, ContextParallelMode)]


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
    with _way_prepared(), ContextParallelMode(plan, captured_grads):
        yield


@contextmanager
def bypass() -> Iterator[None]:
    """Inside, flex_attention is torch's own again, for attention over tensors that are not sharded."""
    with _way_prepared(), ContextParallelMode(None, "partial"):
        yield


@torch.compiler.disable  # called from compiled code, Dynamo would compile the executor, too
def _forward_rule(mode, q, k, v, score_mod, block_mask, scale, kernel_options, score_buffers=(), mask_buffers=()):
    plans = [context.plan for context in (*_contexts(), mode)]
    if mode.plan is None:
        with compat.without_modes():
            return compat.flex_operator(
                q, k, v, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers
            )
    token = token_of(block_mask)
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
    if kernel_options.get("OUTPUT_MAX"):
        raise NotImplementedError("max_scores cannot be returned under context parallelism; ask for lse only")
    score = Score(_unless_identity(score_mod), tuple(score_buffers))
    out, lse = call.forward(q, k, v, token, plan, score, scale)
    return out, lse, torch.full_like(lse, -torch.inf)


@torch.compiler.disable
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
    token = token_of(block_mask)
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
        raise RuntimeError(OUTSIDE)
    score = Score(_unless_identity(fw_graph), tuple(score_buffers), joint_graph.needs_grad)
    sum_captured = owner.captured_grads == "sum"
    dq, dk, dv, grads = call.backward(q, k, v, out, lse, dout, dlse, token, plan, score, scale, sum_captured)
    return dq, dk, dv, tuple(grads)


compat.flex_operator.py_impl(ContextParallelMode)(_forward_rule)
compat.flex_backward_operator.py_impl(ContextParallelMode)(_backward_rule)


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


@compat.never_a_frame
def _validate_device(query: Tensor, key: Tensor, value: Tensor) -> None:
    if torch.compiler.is_dynamo_compiling() or not _contexts():
        _replaced.originals["_validate_device"](query, key, value)
        return
    if _contexts()[-1].plan is not None:
        # Here and not in the rule, since Dynamo stumbles over a DTensor on the way, and torch over unequal batches.
        call.check_together(query, key, value)
        # Dynamo's message on these is a page. torch asks nobody about them, so they are looked up where it was called.
        given = sys._getframe(1).f_locals
        arguments.check_scale(given.get("scale"))
        arguments.check_score(given.get("score_mod"))
    if compat.inside_functorch():
        raise NotImplementedError(
            "attention over a sharded sequence does not work under torch.func transforms; use torch.autograd"
        )
    if query.device.type != "cpu":
        _replaced.originals["_validate_device"](query, key, value)


@compat.never_a_frame
def _create_empty_block_mask(query: Tensor, key: Tensor) -> BlockMask:
    """The mask that torch makes for block_mask=None: here, full attention over the innermost plan's sequence."""
    if torch.compiler.is_dynamo_compiling():
        # A compiler lowers the operator where no rule sees it.
        compat.graph_break(IN_A_GRAPH)
    contexts = _contexts()
    if not contexts or contexts[-1].plan is None:
        return _replaced.originals["_create_empty_block_mask"](query, key)
    return contexts[-1].plan.whole_sequence_token.block_mask


@compat.never_a_frame
def _warn_once(*args: Any, **kwargs: Any) -> None:
    if torch.compiler.is_dynamo_compiling() or not _contexts():
        _replaced.originals["_warn_once"](*args, **kwargs)


@dataclass(frozen=True)
class _JointGraph:
    """Stands where torch keeps the traced gradient of a score_mod; says only which captured tensors want one."""

    needs_grad: tuple[bool, ...]

    def __call__(self, *args: Any) -> Any:
        raise RuntimeError(OUTSIDE)


@compat.never_a_frame
def create_fw_bw_graph(score_mod: Callable[..., Tensor], index_values: Any, other_buffers: tuple[Any, ...]) -> Any:
    """Leaves the score_mod's gradient to the kernel, which takes it at the time of backward.

    torch would trace it now, under whatever saved-tensor hooks are active. Those of non-reentrant checkpointing
    recompute the checkpointed region inside the trace, and the gradients come out wrong.
    """
    contexts = _contexts()
    if not contexts or contexts[-1].plan is None:
        return _replaced.originals["create_fw_bw_graph"](score_mod, index_values, other_buffers)
    return score_mod, _JointGraph(tuple(isinstance(x, Tensor) and x.requires_grad for x in other_buffers))
