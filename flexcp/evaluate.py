"""Held-out loss and accuracy, as a whole and by place: by position in the document, or by any other number per token.

Sums are kept per bucket over all batches and ranks, and divided once at the end: every token counts the same,
whichever batch, rank or bucket it lies in.
"""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flexcp
from flexcp.data import IGNORE, Batch
from flexcp.mesh import Mesh


@dataclass(frozen=True)
class Bucket:
    """Tokens whose number lies in first .. last; over all batches and ranks."""

    first: int
    last: int
    tokens: int  # that have a label
    loss: float  # cross entropy in nats, their mean; NaN without tokens
    accuracy: float  # the share whose label has the largest logit; NaN without tokens


@dataclass(frozen=True)
class Evaluation:
    """What a model does with tokens it has not been trained on."""

    tokens: int
    loss: float
    accuracy: float
    buckets: tuple[Bucket, ...]

    def __str__(self) -> str:
        parts = "; ".join(f"{b.first}-{b.last}: {b.loss:.4f}" for b in self.buckets if b.tokens)
        return f"loss {self.loss:.5f}, accuracy {self.accuracy:.4f} over {self.tokens:,} tokens; by position {parts}"


def bucket_edges(longest: int, smallest: int = 64) -> list[int]:
    """Where buckets begin, each twice as long as the ones before it: 0, 64, 128, 256, ... below `longest`.

    >>> bucket_edges(1000)
    [0, 64, 128, 256, 512]
    """
    edges = [0]
    while (edge := max(smallest, 2 * edges[-1])) < longest:
        edges.append(edge)
    return edges


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Batch, Tensor | None]],
    make_plan: Callable[[Batch], flexcp.Plan],
    mesh: Mesh | None = None,
    edges: list[int] | None = None,
    chunk: int = 0,
) -> Evaluation:
    """Evaluates on this rank's share of each batch; to be called on every rank of the group.

    Args:
        model: called as model(tokens, positions, block_mask=...).
        batches: each with a number per token, [B, S] int64, by which tokens are put into buckets; None: the
            position in the document.
        make_plan: the plan of a batch.
        mesh: the grid of the ranks, over which the sums are taken; None for one rank.
        edges: where buckets begin, ascending; None: `bucket_edges` of the first batch's length.
        chunk: tokens at a time whose logits exist; 0: all. Otherwise model takes `head` as `Llama3.forward` does.

    Returns:
        The same on every rank.
    """
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    sums: Tensor | None = None
    for batch, numbers in batches:
        plan = make_plan(batch)
        edges = edges or bucket_edges(batch.tokens.shape[1])
        if sums is None:
            sums = torch.zeros(3, len(edges), dtype=torch.float64, device=device)
        mine = [
            plan.shard(column.to(device), dim=1, pad=pad)
            for column, pad in (
                (batch.tokens, 0),
                (batch.labels, IGNORE),
                (batch.positions, 0),
                (batch.positions if numbers is None else numbers, 0),
            )
        ]
        tokens, labels, positions, places = mine
        if mesh is not None:
            labels, places = mesh.own_tokens(labels), mesh.own_tokens(places)
        counted = labels != IGNORE
        with flexcp.context_parallel(plan):
            if chunk:
                head = functools.partial(_by_chunks, labels, chunk)
                losses, hits = model(tokens, positions, block_mask=plan.block_mask, head=head)
            else:
                logits = model(tokens, positions, block_mask=plan.block_mask)
                losses, hits = _losses_and_hits(logits[counted], labels[counted])
        bounds = torch.tensor(edges[1:], dtype=places.dtype, device=device)
        bucket = torch.bucketize(places[counted], bounds, right=True)
        for row, values in enumerate((torch.ones_like(losses), losses, hits)):
            sums[row].scatter_add_(0, bucket, values)
    if sums is None or edges is None:
        raise ValueError("evaluate was given no batch")
    if mesh is not None and mesh.loss_group is not None:
        dist.all_reduce(sums, group=mesh.loss_group)
    model.train(training)
    counts, losses, hits = sums.tolist()
    ends = [*(edge - 1 for edge in edges[1:]), max(edges[-1], batch.tokens.shape[1] - 1)]
    buckets = tuple(
        Bucket(first, last, int(n), _share(loss, n), _share(hit, n))
        for first, last, n, loss, hit in zip(edges, ends, counts, losses, hits)
    )
    total = sum(counts)
    return Evaluation(int(total), _share(sum(losses), total), _share(sum(hits), total), buckets)


def _by_chunks(labels: Tensor, chunk: int, x: Tensor, norm: nn.Module, weight: Tensor) -> tuple[Tensor, Tensor]:
    counted = labels != IGNORE
    pieces = zip(x[counted].split(chunk), labels[counted].split(chunk))
    parts = [_losses_and_hits(F.linear(norm(x), weight), labels) for x, labels in pieces]
    losses, hits = zip(*parts)
    return torch.cat(losses), torch.cat(hits)


def _losses_and_hits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row, float64 [N]: the cross entropy, and 1 where the label has the largest logit."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, reduction="none").double(), (logits.argmax(-1) == labels).double()


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
