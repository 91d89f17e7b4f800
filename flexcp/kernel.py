"""One stage of attention on one device: compiled on a GPU (`kernel_gpu`), the reference on a CPU (`kernel_cpu`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexcp import kernel_cpu, kernel_gpu
from flexcp.planner import Stage


@dataclass(frozen=True)
class Score:
    """A score_mod in global indices with its captured tensors made explicit.

    Attributes:
        function: (score, b, h, q_idx, kv_idx, *buffers) -> score; None: the score is left alone.
        buffers: captured tensors (and numbers) in order.
        needs_grad: which of the buffers a gradient is wanted for.
    """

    function: Callable[..., Tensor] | None
    buffers: tuple[Any, ...] = ()
    needs_grad: tuple[bool, ...] = ()

    @property
    def identity(self) -> Any:
        """What tells this function from others, and from call to call stays: its code, where that says all of it.

        A captured score_mod arrives as a new graph each time, with the same code.
        """
        function = self.function
        if isinstance(function, torch.fx.GraphModule) and any(node.op == "get_attr" for node in function.graph.nodes):
            return function
        return getattr(function, "code", function)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for every input dtype but fp64, which stays."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def gradient_dtype(x: Tensor) -> torch.dtype:
    """Of the gradients that `backward` gives: on a GPU the kernels round them to the inputs' dtype."""
    return accumulation_dtype(x.dtype) if _on_cpu(x) else x.dtype


def forward(
    q: Tensor, k: Tensor, v: Tensor, stage: Stage, score: Score, scale: float, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Attention of local queries over the keys of one stage.

    Args:
        q: [B, H, L, D]; k: [B, G, N, D]; v: [B, G, N, Dv]; query head h reads KV head h // (H / G).
        stage: says which pairs are visible and where the rows stand globally; it must compute something.
        scale: factor on q @ k.
        backend: "flash", "triton" or "auto": the fastest that can do it. A CPU has one only.
    Returns:
        out [B, H, L, Dv] and lse [B, H, L] (natural logarithm), both in the accumulation dtype. A row that sees
        nothing gives out 0 and lse -inf.
    """
    if _on_cpu(q):
        return kernel_cpu.forward(q, k, v, stage, score, scale)
    return kernel_gpu.forward(q, k, v, stage, score, scale, backend)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    stage: Stage,
    score: Score,
    scale: float,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """Gradients of one stage's share of the attention.

    Args:
        out, lse: the *global* result over all stages, lse the natural logarithm in the accumulation dtype; with them
            the gradient of each stage is exact on its own, and the stages' gradients add up.
        dout: gradient of out; dlse: gradient of the natural-log lse, or None.
    Returns:
        dq, dk, dv in `gradient_dtype`, and a gradient per buffer (None where none is wanted) in the accumulation dtype.
    """
    if _on_cpu(q):
        return kernel_cpu.backward(q, k, v, out, lse, dout, dlse, stage, score, scale)
    return kernel_gpu.backward(q, k, v, out, lse, dout, dlse, stage, score, scale, backend)


def _on_cpu(q: Tensor) -> bool:
    if q.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"flexcp computes on CUDA devices and CPUs, but q is on {q.device}; move it to one of them"
        )
    return q.device.type == "cpu"
