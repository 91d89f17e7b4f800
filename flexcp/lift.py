"""Masks and scores as functions of local indices whose captured tensors are inputs.

What a mask_mod or score_mod captures changes from batch to batch; a compiled program does not. So the function is
traced once on scalars, and every tensor that it captured becomes an input of the traced one.

FLASH generates its code from fewer operators than Triton does (torch 2.11): it has no minimum or maximum, and cannot
read a tensor at a constant index, as a captured 0-d tensor is. `for_flash` says the same in what it has.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from flexcp import compat

aten = torch.ops.aten


@dataclass(frozen=True)
class Function:
    """A mask_mod or score_mod with every tensor it reads as an input.

    Attributes:
        call: (*indices, *tensors) -> result; a score_mod's first index is the score.
        tensors: in order.
        code: what tells programs apart.
        num_indices: 4 (b, h, q_idx, kv_idx), or 5 with the score.
        reads_indices: whether it reads b, h, q_idx or kv_idx.
        batch: the length of the tables which stand for 0-d tensors; None: nothing stands for them.
    """

    call: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    code: Any
    num_indices: int
    reads_indices: bool = True
    batch: int | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What `call` takes after the indices."""
        return tuple(x.expand(self.batch) if self.batch and x.dim() == 0 else x for x in self.tensors)


def _unchanged(s: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return s


NO_SCORE = Function(_unchanged, (), "", 5, reads_indices=False)


def lift(function: Callable[..., Tensor], num_indices: int, tensors: tuple[Tensor, ...], device: torch.device):
    """Traces a function on scalars.

    Args:
        function: (*indices, *tensors) -> result; it may capture more tensors.
        num_indices: 4 for a mask_mod, 5 for a score_mod.
        tensors: inputs already, handed through.
    Returns:
        a `Function` whose tensors are the given ones and then the captured ones.
    """
    index = scalars(num_indices, device)
    with torch.no_grad(), compat.TransformGetItemToIndex():
        graph_module = make_fx(function)(*index, *tensors)
    graph = graph_module.graph
    last_input = [node for node in graph.nodes if node.op == "placeholder"][-1]
    captured: list[Tensor] = []
    for node in list(graph.nodes):
        if node.op == "get_attr":
            with graph.inserting_after(last_input):
                last_input = graph.placeholder(f"captured_{len(captured)}")
            captured.append(getattr(graph_module, node.target))
            node.replace_all_uses_with(last_input)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph_module.recompile()
    indices = [node for node in graph.nodes if node.op == "placeholder"][num_indices - 4 : num_indices]
    reads_indices = any(node.users for node in indices)
    return Function(graph_module, (*tensors, *captured), graph_module.code, num_indices, reads_indices)


def scalars(num_indices: int, device: torch.device) -> list[Tensor]:
    """Example values of (score,) b, h, q_idx, kv_idx."""
    index = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(4)]
    return index if num_indices == 4 else [torch.zeros((), device=device), *index]


def for_flash(function: Function, batch: int) -> Function:
    """The same function in the operators that FLASH's code generator has.

    A captured 0-d tensor is read as a table of the batch rows, all of which equal it: `Function.inputs` gives that.
    """
    if function is NO_SCORE:
        return function
    flat = tuple(x.dim() == 0 for x in function.tensors)
    restated = restate(function.call)
    batch_index = function.num_indices - 4

    def call(*args: Tensor) -> Tensor:
        indices, given = args[: function.num_indices], args[function.num_indices :]
        b = indices[batch_index]
        values = (aten.index.Tensor(x, [b]) if is_flat else x for x, is_flat in zip(given, flat))
        return restated(*indices, *values)

    return replace(function, call=call, code=(function.code, flat), batch=batch)


def restate(graph_module: Any) -> Callable[..., Any]:
    """A traced function that, traced again, uses no operator which FLASH lacks."""
    return lambda *args: _Restated(graph_module).run(*args)


class _Restated(torch.fx.Interpreter):
    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if target is aten.minimum.default:
            a, b = args
            return torch.where(a < b, a, b)
        if target is aten.maximum.default:
            a, b = args
            return torch.where(a > b, a, b)
        if target in (aten.clamp.default, aten.clamp.Tensor, aten.clamp_min.default, aten.clamp_max.default):
            return _clamped(target, args, kwargs)
        return super().call_function(target, args, kwargs)


def _clamped(target: Any, args: tuple, kwargs: dict) -> Tensor:
    x, *bounds = args
    if target is aten.clamp_max.default:
        bounds = [None, *bounds]
    low, high = (*bounds, None, None)[:2]
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    if low is not None:
        x = torch.where(x < low, low, x)
    if high is not None:
        x = torch.where(x > high, high, x)
    return x
