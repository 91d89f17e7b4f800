"""The loss by chunks of tokens: the logits of a sequence, 1.7 MB per token in fp32 and backward, never exist.

A chunk's logits are turned into its loss and straight into its gradients, while they are there: no second product with
the head in backward. What is kept until then is the gradient of the residual stream, which backward begins with anyway,
and that of the head, summed in fp32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from flexcp.batch import IGNORE
from flexcp.tiling import GradientSums, hand_over, tiles

DEFAULT_CHUNK = 2048


def chunked_loss(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    norm: Callable[[Tensor], Tensor] | None = None,
    norm_parameters: Sequence[Tensor] = (),
    chunk: int = DEFAULT_CHUNK,
    divide_by: float = 1.0,
    z_loss: float = 0.0,
    ignore: int = IGNORE,
) -> Tensor:
    """The sum over tokens of cross entropy + z_loss * lse^2, divided by a number.

    The sum and not the mean, since what it is to be divided by is the number of labels in the whole step, over all
    ranks and micro-batches, and not that of this rank.

    >>> x, weight = torch.randn(1, 5, 8), torch.randn(11, 8)
    >>> labels = torch.tensor([[3, -100, 0, 10, 3]])
    >>> whole = F.cross_entropy((x @ weight.T)[0], labels[0], reduction="sum")
    >>> torch.allclose(chunked_loss(x, weight, labels, chunk=2), whole)
    True

    Args:
        x: [B, S, C], the residual stream before `norm`.
        weight: [V, C] of the head; the embedding's where they are tied.
        labels: [B, S] int64, 0 .. V - 1 or `ignore`.
        norm: the token-wise function between x and the head; it reads norm_parameters.
        chunk: tokens at a time, which need about 8 * V bytes each in bf16, 12 * V in fp32; 0: all.
        divide_by: the number of labels of the step.
        z_loss: factor on the square of the logarithm of the softmax's denominator, which holds it near 0.
        ignore: the label that counts nothing, not in the z-loss either.
    Returns:
        a scalar, fp32 (fp64 for fp64 inputs). Its gradients are exact; the head's is summed in fp32 over chunks and
        rounded once.
    Raises:
        ValueError: the shapes do not fit, or the head is divided by tensor parallelism.
    """
    if isinstance(weight, DTensor):
        raise ValueError("the loss by chunks needs the whole head, but tensor parallelism divides it: leave one off")
    if x.shape[:-1] != labels.shape or x.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"labels must be [B, S], x [B, S, C] and the head [V, C], not {list(labels.shape)}, {list(x.shape)} and "
            f"{list(weight.shape)}"
        )
    if chunk < 0 or not divide_by > 0:
        raise ValueError(f"chunk is at least 0 and divide_by more than 0, got {chunk} and {divide_by}")
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, *norm_parameters))
    settings = _Settings(norm, chunk, divide_by, z_loss, ignore, needs_grad)
    return _ChunkedLoss.apply(settings, x, weight, labels, *norm_parameters)


class _Settings:
    def __init__(self, norm, chunk: int, divide_by: float, z_loss: float, ignore: int, needs_grad: bool) -> None:
        self.norm, self.chunk, self.divide_by = norm, chunk, divide_by
        self.z_loss, self.ignore, self.needs_grad = z_loss, ignore, needs_grad


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: _Settings, x: Tensor, weight: Tensor, labels: Tensor, *parameters: Tensor):
        wide = torch.promote_types(x.dtype, torch.float32)
        rows_x, rows_labels = x.detach().flatten(0, -2), labels.flatten()
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        sums = GradientSums([weight, *parameters])
        dx = x.new_empty(x.shape) if settings.needs_grad else None
        for rows in tiles(rows_labels.numel(), settings.chunk):
            with torch.set_grad_enabled(settings.needs_grad):
                leaf = rows_x[rows].requires_grad_(settings.needs_grad)
                hidden = leaf if settings.norm is None else settings.norm(leaf)
            features = hidden.detach()
            logits = F.linear(features, weight).to(wide)
            part, dlogits = _loss_and_gradient(logits, rows_labels[rows], settings)
            total += part
            del logits
            if dlogits is None or dx is None:
                continue
            dlogits = dlogits.to(weight.dtype)
            dweight = dlogits.T @ features
            dfeatures = dlogits @ weight
            del dlogits
            if settings.norm is None:
                dx.view(rows_x.shape)[rows] = dfeatures
                sums.add([dweight])
            else:
                wanted = [leaf, *(p for p in parameters if p.requires_grad)]
                dleaf, *dparameters = torch.autograd.grad(hidden, wanted, dfeatures)
                found = iter(dparameters)
                dx.view(rows_x.shape)[rows] = dleaf
                sums.add([dweight, *(next(found) if p.requires_grad else None for p in parameters)])
        ctx.grads = None if dx is None else (dx, *sums.collect())
        return total.to(wide)

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple:
        if ctx.grads is None:
            raise RuntimeError("backward through a loss by chunks a second time: its gradients are gone; run it again")
        grads, ctx.grads = ctx.grads, None
        # In place: they are nobody else's, and that of x is as large as the residual stream.
        dx, dweight, *dparameters = (None if grad is None else grad.mul_(dtotal.to(grad.dtype)) for grad in grads)
        needs = ctx.needs_input_grad
        return None, hand_over(dx) if needs[1] else None, dweight if needs[2] else None, None, *dparameters


def _loss_and_gradient(logits: Tensor, labels: Tensor, settings: _Settings) -> tuple[Tensor, Tensor | None]:
    """A chunk's share of the loss, fp64, and the gradient of its logits, in their place.

    Args:
        logits: [T, V]; overwritten.
    """
    counted = labels != settings.ignore
    # A label that is neither a class nor `ignore` stays what it is, and gather refuses it.
    classes = torch.where(counted, labels, 0)[:, None]
    lse = torch.logsumexp(logits, dim=-1)
    losses = lse - logits.gather(1, classes)[:, 0] + settings.z_loss * lse.square()
    total = torch.where(counted, losses, 0).sum(dtype=torch.float64) / settings.divide_by
    if not settings.needs_grad:
        return total, None
    gradient = logits.sub_(lse[:, None]).exp_()
    gradient *= (1 + 2 * settings.z_loss * lse)[:, None]
    gradient.scatter_add_(1, classes, gradient.new_full((1, 1), -1.0).expand_as(classes))
    gradient *= (counted.to(gradient.dtype) / settings.divide_by)[:, None]
    return total, gradient
