"""One step's gradients: the rows divided over ranks and micro-batches, each weighed so that they add up.

The loss of a step is the mean over all labels of all its rows, wherever they lie. Every rank knows the whole batch
and so their number N, and what it computes is its part of a sum: (sum of its labels' losses) / N. Summed over
micro-batches, cp and dp, in whatever order, that is the mean, and the gradients likewise. A mean of means would weigh
a label by how many others happen to lie in its row, rank or micro-batch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flexcp
from flexcp.batch import IGNORE, Batch
from flexcp.loss import chunked_loss
from flexcp.mesh import Mesh


class StepLoss(NamedTuple):
    """The loss of a step.

    Attributes:
        loss: the mean cross entropy over all labels, in nats.
        num_labels: of the whole step.
        own: this rank's part of the mean; the sum over the ranks of `Mesh.loss_group` is `loss`.
    """

    loss: float
    num_labels: int
    own: float


@dataclass(frozen=True)
class LossOptions:
    """How logits become a loss.

    Attributes:
        chunk: tokens at a time whose logits exist; 0: all.
        z: factor of the z-loss (`flexcp.loss`).
    """

    chunk: int = 0
    z: float = 0.0


PLAIN_LOSS = LossOptions()


def accumulate(
    model: nn.Module,
    batch: Batch,
    plans: Callable[[Batch], flexcp.Plan],
    mesh: Mesh,
    grad_accum: int = 1,
    loss: LossOptions = PLAIN_LOSS,
) -> StepLoss:
    """Adds this rank's part of the gradient of the step's mean loss to the parameters.

    Args:
        batch: all rows of the step, the same on every rank.
        plans: from a micro-batch to its plan; they may differ within a step.
        grad_accum: the most micro-batches into which this rank's rows are divided; where that does not divide them,
            the last has fewer rows.
        loss: how the logits become a loss.
    """
    num_labels = batch.num_labels
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for micro in micro_batches(batch, mesh, grad_accum):
        total += forward_backward(model, micro, plans(micro), mesh, num_labels, loss)
    own = float(total)
    return StepLoss(reduced(own, dist.ReduceOp.SUM, mesh.loss_group), num_labels, own)


def micro_batches(batch: Batch, mesh: Mesh, grad_accum: int) -> list[Batch]:
    """This rank's rows of a step in at most `grad_accum` pieces, the last perhaps with fewer rows."""
    mine = own_rows(batch, mesh)
    return mine.split(-(-mine.num_rows // grad_accum))


def own_rows(batch: Batch, mesh: Mesh) -> Batch:
    """The rows of this rank, and of all ranks with which it shares sequences.

    Raises:
        ValueError: the rows are no multiple of the data parallel ranks.
    """
    rows, rest = divmod(batch.num_rows, mesh.degrees.dp)
    if rest:
        raise ValueError(f"{batch.num_rows} rows cannot be divided equally over {mesh.degrees.dp} data parallel ranks")
    return batch.rows(mesh.data_rank * rows, (mesh.data_rank + 1) * rows)


def forward_backward(
    model: nn.Module, batch: Batch, plan: flexcp.Plan, mesh: Mesh, num_labels: int, loss: LossOptions = PLAIN_LOSS
) -> Tensor:
    """Forward and backward of one micro-batch.

    A rank all of whose labels are ignored contributes 0 and takes part in the communication.

    Args:
        num_labels: of the whole step.
        loss: how the logits become a loss.

    Returns:
        This rank's part of the step's mean loss, a scalar.
    """
    device = next(model.parameters()).device
    tokens = plan.shard(batch.tokens.to(device), dim=1, pad=0)
    labels = plan.shard(batch.labels.to(device), dim=1, pad=IGNORE)
    positions = plan.shard(batch.positions.to(device), dim=1, pad=0)
    with flexcp.context_parallel(plan):
        if loss == PLAIN_LOSS:
            logits = model(tokens, positions, block_mask=plan.block_mask)
            labels = mesh.own_tokens(labels)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
            part = total / max(1, num_labels)
        else:
            head = functools.partial(_loss_of, labels, loss, max(1, num_labels))
            part = model(tokens, positions, block_mask=plan.block_mask, head=head)
        part.backward()
    return part.detach()


def _loss_of(labels: Tensor, loss: LossOptions, divide_by: int, x: Tensor, norm: nn.Module, weight: Tensor) -> Tensor:
    more = {"norm": norm, "norm_parameters": list(norm.parameters())}
    return chunked_loss(x, weight, labels, chunk=loss.chunk, divide_by=divide_by, z_loss=loss.z, **more)


def reduced(value: float | Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> float:
    """A number of each rank, combined over the group in float64, where counts up to 2^53 are exact."""
    if group is not None:
        on_gpu = dist.get_backend(group) == "nccl"
        value = torch.as_tensor(value, dtype=torch.float64, device="cuda" if on_gpu else "cpu")
        dist.all_reduce(value, op, group=group)
    return float(value)
