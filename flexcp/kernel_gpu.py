"""The compiled kernel: torch's flex_attention operators, forward and backward, on Triton.

A *program* is one operator compiled for one mask code, one score code, and the shapes, strides and dtypes of its
inputs. Whatever masks and scores capture are inputs, too, so that new documents or a new layout are new data for an
old program. The operators are traced with make_fx and handed to inductor, since Dynamo does not take the backward
operator by itself (torch 2.11). The unfused path, which would materialise all scores, is never taken.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask

from flexcp import compat
from flexcp.planner import Stage

if TYPE_CHECKING:
    from flexcp.kernel import Score

_LN2 = math.log(2.0)

_TENSORS = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)


@dataclass(frozen=True)
class _Function:
    """A mask_mod or score_mod in local indices, with every tensor it reads as an input.

    Attributes:
        call: (*indices, *tensors) -> result; a score_mod's first index is the score.
        tensors: in order.
        code: what tells programs apart.
    """

    call: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    code: str


def forward(q: Tensor, k: Tensor, v: Tensor, stage: Stage, score: "Score", scale: float) -> tuple[Tensor, Tensor]:
    """See `flexcp.kernel.forward`; out comes rounded to q's dtype, lse is fp32."""
    mask, modified = _functions(stage, score, q)

    def attend(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        block_mask, score_tensors, mask_tensors = _arguments(stage, tensors, modified, mask)
        out, lse, _ = compat.flex_operator(
            q, k, v, modified.call, block_mask, scale, _options(modified), score_tensors, mask_tensors
        )
        return out, lse

    arguments = (q, k, v, *_block_tensors(stage), *modified.tensors, *mask.tensors)
    key = ("forward", mask.code, modified.code, scale, stage.block_mask.BLOCK_SIZE)
    out, lse = _run(key, lambda: attend, arguments)
    return out, lse * _LN2


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    stage: Stage,
    score: "Score",
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """See `flexcp.kernel.backward`; dq, dk and dv come rounded to the inputs' dtype, in fp32."""
    mask, modified = _functions(stage, score, q)
    needs_grad = (*score.needs_grad, *[False] * (len(modified.tensors) - len(score.needs_grad)))

    given = () if dlse is None else (dlse,)

    def pull_back(joint, q, k, v, out, lse, dout, *tensors: Tensor):
        dlse, tensors = (tensors[0], tensors[1:]) if given else (torch.zeros_like(lse), tensors)
        block_mask, score_tensors, mask_tensors = _arguments(stage, tensors, modified, mask)
        dq, dk, dv, dbuffers = compat.flex_backward_operator(
            q,
            k,
            v,
            out,
            lse,
            dout,
            dlse,
            modified.call,
            joint,
            block_mask,
            scale,
            _options(modified),
            score_tensors,
            mask_tensors,
        )
        return (dq, dk, dv, *[grad for grad, needed in zip(dbuffers, needs_grad) if needed])

    def make() -> Callable[..., Any]:
        return partial(pull_back, _joint_graph(modified, needs_grad, q))

    # The operators' own lse is a logarithm to the base 2.
    given = tuple(x * _LN2 for x in given)
    arguments = (q, k, v, out, lse / _LN2, dout, *given, *_block_tensors(stage), *modified.tensors, *mask.tensors)
    key = ("backward", mask.code, modified.code, needs_grad, bool(given), scale, stage.block_mask.BLOCK_SIZE)
    dq, dk, dv, *rest = _run(key, make, arguments)
    grads = iter(rest)
    return dq.float(), dk.float(), dv.float(), [next(grads).float() if needed else None for needed in score.needs_grad]


# By stage: its lifted mask_mod, and the tables that lead a score to global indices. Lifting costs milliseconds,
# and a stage is called again by every layer.
_lifted: "weakref.WeakKeyDictionary[BlockMask, tuple[_Function, tuple[Tensor, ...]]]" = weakref.WeakKeyDictionary()


def _functions(stage: Stage, score: "Score", q: Tensor) -> tuple[_Function, _Function]:
    """The stage's mask and the score, both in local indices."""
    if stage.block_mask not in _lifted:
        last = torch.tensor(stage.seq_len - 1, dtype=torch.int32, device=q.device)
        tables = stage.q_start.to(torch.int32), stage.kv_start.to(torch.int32), last
        _lifted[stage.block_mask] = _lift(stage.block_mask.mask_mod, q.device), tables
    mask, tables = _lifted[stage.block_mask]
    if score.function is None:
        return mask, _Function(_keep, (), "")
    function, count = score.function, len(score.buffers)
    q_size, kv_size = stage.block_mask.BLOCK_SIZE

    def in_local_indices(s, b, h, q_idx, kv_idx, *tensors):
        q_start, kv_start, last = tensors[count:]
        # Padding is hidden, but asked for all the same, and a score's tables end with the sequence.
        q_pos = torch.minimum(q_start[q_idx // q_size] + q_idx % q_size, last)
        kv_pos = torch.minimum(kv_start[kv_idx // kv_size] + kv_idx % kv_size, last)
        return function(s, b, h, q_pos, kv_pos, *tensors[:count])

    tensors = (*(x.detach() for x in score.buffers), *tables)
    code = getattr(function, "code", None) or f"{function!r} {id(function)}"
    return mask, _Function(in_local_indices, tensors, code)


def _keep(s, b, h, q_idx, kv_idx):
    return s


def _lift(mask_mod: Callable[..., Tensor], device: torch.device) -> _Function:
    """Traces a mask_mod on scalars and turns every tensor that it captured into an input."""
    index = [torch.zeros((), dtype=torch.int32, device=device) for _ in range(4)]
    with torch.no_grad(), compat.TransformGetItemToIndex():
        graph_module = make_fx(mask_mod)(*index)
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
    return _Function(graph_module, tuple(captured), graph_module.code)


def _joint_graph(score: _Function, needs_grad: tuple[bool, ...], q: Tensor) -> Any:
    """The gradient of the score_mod, traced with no saved-tensor hook active."""
    index = [torch.zeros((), dtype=torch.int32, device=q.device) for _ in range(4)]
    buffers = tuple(x.detach().requires_grad_(needed) for x, needed in zip(score.tensors, needs_grad))
    with compat.autograd_enabled(), compat.TransformGetItemToIndex(), compat.no_saved_tensor_hooks():
        _, joint = compat.create_joint_graph(score.call, (q.new_zeros((), requires_grad=True), *index), buffers)
    return joint


def _block_tensors(stage: Stage) -> tuple[Tensor, ...]:
    return tuple(getattr(stage.block_mask, name) for name in _TENSORS)


def _arguments(stage: Stage, tensors: tuple[Tensor, ...], score: _Function, mask: _Function):
    """Sorts a program's trailing inputs into the operator's block mask tuple, score tensors and mask tensors."""
    blocks, rest = tensors[: len(_TENSORS)], tensors[len(_TENSORS) :]
    block_mask = BlockMask(
        seq_lengths=stage.block_mask.seq_lengths,
        BLOCK_SIZE=stage.block_mask.BLOCK_SIZE,
        mask_mod=mask.call,
        **dict(zip(_TENSORS, blocks)),
    )
    count = len(score.tensors)
    return block_mask.as_tuple(), tuple(rest[:count]), tuple(rest[count:])


def _options(score: _Function) -> dict[str, Any]:
    # Triton pipelines the loads of a score's tables, too, and with its usual three stages they overflow shared memory.
    pipelining = {"num_stages": 1} if score.tensors else {}
    return pipelining | {
        "BACKEND": "TRITON",
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": False,
    }


_programs: dict[tuple, Callable[..., Any]] = {}


def _run(key: tuple, make: Callable[[], Callable[..., Any]], arguments: tuple[Tensor, ...]) -> Any:
    """Runs the program of this key and these shapes; makes its function and compiles it at its first call."""
    key = (*key, *((x.shape, x.stride(), x.dtype, x.device) for x in arguments))
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = _compile(make(), arguments)
    return program(*arguments)


def _compile(function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Traces the function with fake inputs and compiles the graph."""
    with compat.without_modes(), compat.no_saved_tensor_hooks(), torch.no_grad():
        graph = make_fx(function, tracing_mode="fake")(*arguments)
        return compat.inductor_compile(graph, list(arguments))
