"""The compiled kernel: torch's flex_attention operators, forward and backward, on FLASH or Triton.

A *program* is one operator compiled for one backend, one mask code, one score code, and the shapes, strides and dtypes
of its inputs. Whatever masks and scores capture are inputs, too (`lift`), so that new documents or a new layout are new
data for an old program. The operators are traced with make_fx and handed to inductor, since Dynamo does not take the
backward operator by itself (torch 2.11). The unfused path, which would materialise all scores, is never taken.

FLASH (FlashAttention-4) is the faster one and knows less; where it cannot do what a call needs, Triton does it.
"""

import importlib.util
import math
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask

from flexcp import compat
from flexcp.blocksource import row_positions
from flexcp.lift import NO_SCORE, Function, for_flash, lift, restate, scalars
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


def forward(
    q: Tensor, k: Tensor, v: Tensor, stage: Stage, score: "Score", scale: float, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """See `flexcp.kernel.forward`; out comes rounded to q's dtype, lse is fp32."""

    def attend_on(backend: str) -> tuple[Tensor, Tensor]:
        mask, modified = _functions(stage, score, q, backend)

        def attend(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
            block_mask, score_tensors, mask_tensors = _arguments(stage, tensors, modified, mask)
            options = _options(modified, backend)
            out, lse, _ = compat.flex_operator(
                q, k, v, modified.call, block_mask, scale, options, score_tensors, mask_tensors
            )
            return out, lse * _lse_unit(backend)

        arguments = (q, k, v, *_block_tensors(stage), *modified.inputs, *mask.inputs)
        key = ("forward", backend, mask.code, modified.code, scale, stage.block_mask.BLOCK_SIZE)
        return _run(key, lambda: attend, arguments)

    return _on_best(_backends(q, backend), attend_on)


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
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """See `flexcp.kernel.backward`; dq, dk and dv come in the inputs' dtype."""
    given = () if dlse is None else (dlse,)

    def pull_back_on(backend: str) -> tuple[Tensor, ...]:
        mask, modified = _functions(stage, score, q, backend)
        needs_grad = (*score.needs_grad, *[False] * (len(modified.tensors) - len(score.needs_grad)))
        unit = _lse_unit(backend)

        def pull_back(joint, q, k, v, out, lse, dout, *tensors: Tensor):
            dlse = None if backend == "FLASH" else torch.zeros_like(lse)
            if given:
                dlse, tensors = tensors[0] * unit, tensors[1:]
            block_mask, score_tensors, mask_tensors = _arguments(stage, tensors, modified, mask)
            options = _options(modified, backend)
            dq, dk, dv, dbuffers = compat.flex_backward_operator(
                q,
                k,
                v,
                out,
                lse / unit,
                dout,
                dlse,
                modified.call,
                joint,
                block_mask,
                scale,
                options,
                score_tensors,
                mask_tensors,
            )
            return (dq, dk, dv, *[grad.float() for grad, needed in zip(dbuffers, needs_grad) if needed])

        def make() -> Callable[..., Any]:
            joint = _joint_graph(modified, needs_grad, q)
            return partial(pull_back, restate(joint) if backend == "FLASH" else joint)

        arguments = (q, k, v, out, lse, dout, *given, *_block_tensors(stage), *modified.inputs, *mask.inputs)
        key = ("backward", backend, mask.code, modified.code, needs_grad, bool(given), scale)
        return _run((*key, stage.block_mask.BLOCK_SIZE), make, arguments)

    backends = _backends(q, backend, lambda: _backward_refusal(q, k, stage, score, dlse))
    dq, dk, dv, *rest = _on_best(backends, pull_back_on)
    grads = iter(rest)
    return dq, dk, dv, [next(grads) if needed else None for needed in score.needs_grad]


def _lse_unit(backend: str) -> float:
    """What one unit of the operators' own lse is as a natural logarithm: Triton's has the base 2."""
    return 1.0 if backend == "FLASH" else _LN2


@cache
def flash_is_available(device: torch.device) -> bool:
    """Whether FlashAttention-4 is installed and made for this GPU (Hopper or Blackwell)."""
    try:
        installed = importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:
        installed = False
    return installed and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _backends(q: Tensor, wanted: str, refuse: Callable[[], str | None] = lambda: None) -> tuple[str, ...]:
    """In the order in which they are tried.

    Args:
        refuse: says why FLASH would not do, whatever the device; None: it would.
    """
    if wanted != "auto":
        return (wanted.upper(),)
    if q.dtype not in (torch.float16, torch.bfloat16) or not flash_is_available(q.device):
        return ("TRITON",)
    refusal = refuse()
    if refusal is not None:
        _warn_once(f"flexcp: Triton runs attention, slower, since FLASH {refusal}")
        return ("TRITON",)
    return ("FLASH", "TRITON")


def _on_best(backends: tuple[str, ...], call: Callable[[str], Any]) -> Any:
    *better, last = backends
    for backend in better:
        try:
            return call(backend)
        except _CannotCompile as error:
            _warn_once(f"flexcp: {last} runs attention, slower, since {error}")
    return call(last)


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def _backward_refusal(q: Tensor, k: Tensor, stage: Stage, score: "Score", dlse: Tensor | None) -> str | None:
    """Why FLASH (flash-attn-4 4.0.0b8, torch 2.11) would not do a backward."""
    if dlse is not None:
        return "has no gradient through lse"
    if any(score.needs_grad):
        return "has no gradient of tensors that a score_mod captures"
    if torch.are_deterministic_algorithms_enabled():
        return "adds up dq in no fixed order, and deterministic algorithms were asked for"
    if q.shape[1] != k.shape[1] and _functions(stage, score, q, "FLASH")[1].reads_indices:
        # Measured on an H200: it divides q_idx by the query heads of a KV head, as if they were packed.
        return "gives a score_mod wrong indices in backward where query heads share a KV head"
    return None


# By stage: its lifted mask_mod, for each backend, and the tables that lead a score to global indices. Lifting costs
# milliseconds, and a stage is called again by every layer.
_lifted: "weakref.WeakKeyDictionary[BlockMask, dict[Any, Any]]" = weakref.WeakKeyDictionary()


def _functions(stage: Stage, score: "Score", q: Tensor, backend: str) -> tuple[Function, Function]:
    """The stage's mask and the score, both in local indices."""
    kept = _lifted.setdefault(stage.block_mask, {})
    mask = _kept(kept, (backend, q.shape[0]), lambda: lift(stage.block_mask.mask_mod, 4, (), q.device), backend, q)
    if score.function is None:
        return mask, NO_SCORE
    if "tables" not in kept:
        # Padding is hidden, but asked for all the same, and a score's tables end with the sequence.
        starts, last = zip((stage.q_start, stage.kv_start), stage.block_mask.BLOCK_SIZE), stage.seq_len - 1
        kept["tables"] = tuple(row_positions(start, size).clamp_(max=last).to(torch.int32) for start, size in starts)
    tensors = (*(x.detach() for x in score.buffers), *kept["tables"])
    function = _in_local_indices(score)
    key = (score.identity, *((x.shape, x.dtype) for x in tensors))
    if backend == "TRITON":
        # As it is, and not traced: the gradient of `table[index]` must be torch's own for scores, which knows scatter.
        return mask, Function(function, tensors, key, 5)
    modified = _kept(kept, (backend, q.shape[0], key), lambda: lift(function, 5, tensors, q.device), backend, q)
    return mask, replace(modified, tensors=(*tensors, *modified.tensors[len(tensors) :]))


def _kept(kept: dict[Any, Any], key: tuple, make: Callable[[], Function], backend: str, q: Tensor) -> Function:
    if key not in kept:
        kept[key] = for_flash(make(), q.shape[0]) if backend == "FLASH" else make()
    return kept[key]


def _in_local_indices(score: "Score") -> Callable[..., Tensor]:
    function, count = score.function, len(score.buffers)
    assert function is not None

    def in_local_indices(s, b, h, q_idx, kv_idx, *tensors):
        q_position, kv_position = tensors[count:]
        return function(s, b, h, q_position[q_idx], kv_position[kv_idx], *tensors[:count])

    return in_local_indices


def _joint_graph(score: Function, needs_grad: tuple[bool, ...], q: Tensor) -> Any:
    """The gradient of the score_mod, traced with no saved-tensor hook active."""
    _, *index = scalars(5, q.device)
    buffers = tuple(x.detach().requires_grad_(needed) for x, needed in zip(score.inputs, needs_grad))
    with compat.autograd_enabled(), compat.TransformGetItemToIndex(), compat.no_saved_tensor_hooks():
        _, joint = compat.create_joint_graph(score.call, (q.new_zeros((), requires_grad=True), *index), buffers)
    return joint


def _block_tensors(stage: Stage) -> tuple[Tensor, ...]:
    return tuple(getattr(stage.block_mask, name) for name in _TENSORS)


def _arguments(stage: Stage, tensors: tuple[Tensor, ...], score: Function, mask: Function):
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


def _options(score: Function, backend: str) -> dict[str, Any]:
    # Triton pipelines the loads of a score's tables, too, and with its usual three stages they overflow shared memory.
    pipelining = {"num_stages": 1} if score.tensors else {}
    return pipelining | {
        "BACKEND": backend,
        "PRESCALE_QK": False,
        "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False,
        "WRITE_DQ": True,
        "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": False,
    }


class _CannotCompile(RuntimeError):
    """The backend refused the program; its own error is the cause."""


_programs: dict[tuple, Callable[..., Any] | _CannotCompile] = {}


def _run(key: tuple, make: Callable[[], Callable[..., Any]], arguments: tuple[Tensor, ...]) -> Any:
    """Runs the program of this key and these shapes; makes its function and compiles it at its first call."""
    key = (*key, *((x.shape, x.stride(), x.dtype, x.device) for x in arguments))
    program = _programs.get(key)
    if program is None:
        program = _programs[key] = _compile(make(), arguments) if key[1] != "FLASH" else _try(make, arguments)
    if isinstance(program, _CannotCompile):
        raise program
    return program(*arguments)


def _try(make: Callable[[], Callable[..., Any]], arguments: tuple[Tensor, ...]) -> Callable[..., Any] | _CannotCompile:
    """A FLASH program, or why there is none; it finishes its build in its first call."""
    try:
        program = _compile(make(), arguments)
        program(*arguments)
    except Exception as error:
        if any(isinstance(x, torch.OutOfMemoryError) for x in _chain(error)):
            raise
        first = _chain(error)[-1]
        text = f"{type(first).__name__}: {(str(first).strip() or '-').splitlines()[0][:200]}"
        refusal = _CannotCompile(f"FLASH cannot run this mask or score: {text}")
        refusal.__cause__ = error
        return refusal
    return program


def _chain(error: BaseException) -> list[BaseException]:
    """An error and what led to it, the first cause last; what the compiler wraps around it prints whole graphs."""
    chain = [error]
    while (earlier := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(earlier)
    return chain


def _compile(function: Callable[..., Any], arguments: tuple[Tensor, ...]) -> Callable[..., Any]:
    """Traces the function with fake inputs and compiles the graph."""
    with compat.without_modes(), compat.no_saved_tensor_hooks(), torch.no_grad():
        graph = make_fx(function, tracing_mode="fake")(*arguments)
        return compat.inductor_compile(graph, list(arguments))
