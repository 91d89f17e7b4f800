"""One call of attention over a plan, by whichever door it came: checked, and handed to the executor.

Both doors speak as torch's operators do: lse is a logarithm to the base 2. So they give the same numbers bit for bit.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexcp import attention
from flexcp.kernel import Score, accumulation_dtype
from flexcp.tokens import Token

if TYPE_CHECKING:
    from flexcp.api import Plan

LN2 = math.log(2.0)
# Others would be truncated, or lose their imaginary part, on their way through the accumulation dtype.
_DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64


def forward(
    q: Tensor, k: Tensor, v: Tensor, token: Token, plan: "Plan", score: Score, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's rows over the whole sequence.

    Args:
        q: [B, H, L, D]; k: [B, G, L, D]; v: [B, G, L, Dv], this rank's shards, which fit each other (`check_together`).
    Returns:
        out [B, H, L, Dv] in the dtype of q; lse [B, H, L] to the base 2 in the accumulation dtype.
    Raises:
        ValueError: the shapes or dtypes do not fit the plan.
    """
    _check_plan(q, k, v, plan, token)
    out, lse = attention.forward(q, k, v, token.schedule, score, scale, plan.link)
    return out.to(q.dtype), lse / LN2


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    token: Token,
    plan: "Plan",
    score: Score,
    scale: float,
    sum_captured: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """The gradients of `forward`.

    Args:
        lse, dlse: to the base 2, and the gradient of that.
        sum_captured: sum the gradients of the score's tensors over the ranks.
    Returns:
        dq, dk, dv in the inputs' dtypes, and per tensor of the score a gradient or None.
    """
    dtype = accumulation_dtype(q.dtype)
    dq, dk, dv, dbuffers = attention.backward(
        q,
        k,
        v,
        out,
        lse.to(dtype) * LN2,
        torch.zeros_like(out) if dout is None else dout,
        None if dlse is None else dlse.to(dtype) / LN2,
        token.schedule,
        score,
        scale,
        plan.link,
    )
    if sum_captured:
        dbuffers = [None if grad is None else plan.link.all_reduce(grad) for grad in dbuffers]
    grads = [None if grad is None else grad.to(buffer.dtype) for grad, buffer in zip(dbuffers, score.buffers)]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), grads


def check_together(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises where q, k and v do not fit each other.

    Raises:
        TypeError: a DTensor or another subclass.
        ValueError: shapes, dtypes or devices that do not fit.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if type(x) not in (Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name} is a {type(x).__name__}, but sharded attention needs plain local tensors; "
                "call .to_local() first"
            )
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    shapes = lambda: f"q {tuple(q_shape)}, k {tuple(k_shape)} and v {tuple(v_shape)}"  # noqa: E731 (every call comes by)
    if not len(q_shape) == len(k_shape) == len(v_shape) == 4:
        raise ValueError(f"attention takes q [B, H, L, D], k [B, G, L, D] and v [B, G, L, Dv], but got {shapes()}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}; cast them to one dtype")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q, k and v are {q.dtype}; cast them to one of {', '.join(map(str, _DTYPES))}")
    if not (q.numel() and k.numel() and v.numel()):
        raise ValueError(f"attention needs at least one row, head and dim of each, but got {shapes()}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v are on {q.device}, {k.device} and {v.device}; move them to one device")
    if not q_shape[0] == k_shape[0] == v_shape[0]:
        raise ValueError(f"q, k and v have {q_shape[0]}, {k_shape[0]} and {v_shape[0]} batch rows; make them equal")
    if k_shape[1] != v_shape[1] or q_shape[1] % k_shape[1] or q_shape[3] != k_shape[3]:
        raise ValueError(
            f"{shapes()} do not fit: k and v need equally many heads, q a multiple of them, and q and k one head dim"
        )


def _check_plan(q: Tensor, k: Tensor, v: Tensor, plan: "Plan", token: Token) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[2] != plan.local_len:
            raise ValueError(
                f"{name} has {x.shape[2]} rows, but this rank's shard of the {plan.seq_len} tokens has "
                f"{plan.local_len}; shard the inputs with plan.shard (or wrap attention that is not sharded in "
                "`with flexcp.bypass():`)"
            )
    if q.device.type != plan.device.type:
        raise ValueError(
            f"q is on {q.device}, but the plan's tables are on {plan.device}; pass flexcp.plan device={q.device}"
        )
    source = token.schedule.source
    for what, given, known in (
        ("batch rows", q.shape[0], source.batch),
        ("query heads", q.shape[1], token.schedule.mask_heads),
    ):
        if known not in (1, given):
            raise ValueError(f"q has {given} {what}, but the plan's mask is made for {known}")
