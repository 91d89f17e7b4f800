"""Every private torch name that more than one room needs, in one place, for torch 2.11 and later."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._dynamo
import torch._inductor
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import create_fw_bw_graph as _create_fw_bw_graph
from torch._higher_order_ops.flex_attention import flex_attention as flex_operator
from torch._higher_order_ops.flex_attention import flex_attention_backward as flex_backward_operator
from torch.distributed import distributed_c10d
from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE as WHOLE_SEQUENCE_BLOCK
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils.checkpoint import checkpoint

__all__ = [
    "TorchDispatchMode",
    "TransformGetItemToIndex",
    "WHOLE_SEQUENCE_BLOCK",
    "active_modes",
    "autograd_enabled",
    "below_autograd",
    "flex_backward_operator",
    "flex_operator",
    "flex_operator_module",
    "flex_public_module",
    "graph_break",
    "inside_functorch",
    "never_a_frame",
    "over_pairs",
    "record_memory_history",
    "selective_checkpoint_options",
    "set_timeouts",
    "without_modes",
    "write_memory_snapshot",
]


def flex_public_module() -> ModuleType:
    """torch.nn.attention.flex_attention, the module."""
    return import_module("torch.nn.attention.flex_attention")


def flex_operator_module() -> ModuleType:
    """Where the operators under it are defined, the module."""
    return import_module("torch._higher_order_ops.flex_attention")


def active_modes() -> list[TorchDispatchMode]:
    """The dispatch modes of this thread, outermost first; autograd's threads inherit those of their backward call."""
    return _get_current_dispatch_mode_stack()


def without_modes():
    """A context in which no dispatch mode of this thread is active."""
    return _disable_current_modes()


def inside_functorch() -> bool:
    """True inside torch.func.grad, vmap, jvp and the like."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def never_a_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: called by the eager part of compiled code, the function runs as it is; inlined, it is traced."""
    torch._dynamo.eval_frame.skip_code(function.__code__)
    return function


@never_a_frame
def graph_break(why: str) -> None:
    """Stops Dynamo's trace of the frame here; does nothing in eager code."""
    torch._dynamo.graph_break(msg=why)


@contextmanager
def no_saved_tensor_hooks() -> Iterator[None]:
    """A context in which no saved-tensor hook of the caller (checkpointing, offload) is active.

    They are taken off and put back: torch's own switch refuses where there are some.
    """
    hooks = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def create_joint_graph(
    score_mod: Callable[..., Tensor], index_values: tuple[Tensor, ...], buffers: tuple[Tensor, ...]
) -> tuple[Callable[..., Tensor], Any]:
    """torch's trace of a score_mod's gradient, for its backward operator."""
    return _create_fw_bw_graph(score_mod, index_values, buffers)


def inductor_compile(graph: torch.fx.GraphModule, arguments: list[Any]) -> Callable[..., Any]:
    """A graph of operators, compiled."""
    return torch._inductor.compile(graph, arguments)


@cache
def selective_checkpoint_options() -> dict[str, Any]:
    """For torch.utils.checkpoint: what a policy saves is left where it is, as in every torch before 2.15."""
    known = "respect_saved_tensors_hooks" in signature(checkpoint).parameters
    return {"respect_saved_tensors_hooks": False} if known else {}


def record_memory_history() -> None:
    """Lets torch keep every allocation on a GPU, with its stack, from now on."""
    torch.cuda.memory._record_memory_history()


def write_memory_snapshot(path: Path) -> None:
    """Writes what was kept, for pytorch.org/memory_viz. A pickle, which flexcp never reads."""
    torch.cuda.memory._dump_snapshot(str(path))


with torch._C._AutoDispatchBelowAutograd():
    _BELOW_AUTOGRAD = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


def below_autograd():
    """A context for the implementation of an operator: as called with no mode active and without autocast.

    Below a dispatch mode, the dispatcher also leaves out vmap, which the kernels use.
    """
    return torch._C._ForceDispatchKeyGuard(*_BELOW_AUTOGRAD)


def past_autograd():
    """A context in which an operator's autograd rule calls the operator itself."""
    return torch._C._AutoDispatchBelowAutograd()


@contextmanager
def autograd_enabled() -> Iterator[None]:
    """Lets autograd record inside a dispatch rule, which runs below the autograd keys and so with them excluded."""
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def over_pairs(function: Callable[..., Tensor], with_score: bool, num_buffers: int = 0) -> Callable[..., Tensor]:
    """Lifts a mask_mod or score_mod, written for scalars, to vectors b [B], h [H], q_idx [L], kv_idx [N].

    Args:
        with_score: True for a score_mod, whose first argument becomes the scores [B, H, L, N].
        num_buffers: captured tensors that follow the indices, passed whole.
    Returns:
        a function that gives [B, H, L, N].
    """
    prefix = (0,) if with_score else ()
    suffix = (None,) * num_buffers
    for dims in ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)):
        function = torch.vmap(function, in_dims=prefix + dims + suffix)

    def lifted(*args: Tensor) -> Tensor:
        # Table look-ups by a scalar tensor, `table[q_idx]`, only work under vmap as index operations.
        with TransformGetItemToIndex():
            return function(*args)

    return lifted


def set_timeouts(seconds: float) -> None:
    """Seconds after which a collective of any group that there is now gives up; groups do not inherit them."""
    for group in distributed_c10d._world.pg_map:
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def spin(seconds: float) -> None:
    """Keeps the current CUDA stream busy for so long, with one thread of one block."""
    if seconds > 0:
        torch.cuda._sleep(int(seconds * _cycles_per_s(torch.cuda.current_device())))


@cache
def _cycles_per_s(device: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    begin.record()
    torch.cuda._sleep(50_000_000)
    end.record()
    end.synchronize()
    return 50_000_000 / begin.elapsed_time(end) * 1e3


def is_alone(x: Tensor) -> bool:
    """Whether nothing but the autograd function that was given this gradient holds it, or any view of it.

    To be called by a function that backward calls with it, as `_least_references` measures it.
    """
    return all(count <= least for count, least in zip(_references(x), _least_references()))


def _references(x: Tensor) -> tuple[int, int]:
    return sys.getrefcount(x), torch._C._storage_Use_Count(x.untyped_storage()._cdata)


@cache
def _least_references() -> tuple[int, int]:
    """What `_references` finds two calls below a backward whose gradient nobody has kept."""
    found = []

    def asked(gradient: Tensor) -> None:
        ask(gradient)

    def ask(gradient: Tensor) -> None:
        found.append(_references(gradient))

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            asked(gradient)
            return torch.ones_like(gradient)

    with torch.enable_grad():
        Probe.apply(Probe.apply(torch.ones(1, requires_grad=True))).backward()
    return found[-1]
