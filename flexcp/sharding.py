"""Cutting whole-sequence tensors into a rank's rows, and putting them together again."""

import torch
import torch.nn.functional as F
from torch import Tensor

from flexcp.comm import Link
from flexcp.layout import Layout


def shard(x: Tensor, layout: Layout, rank: int, dim: int, pad: float | int | bool | None) -> Tensor:
    """See `flexcp.Plan.shard`."""
    dim = _dim(x, dim)
    if x.shape[dim] != layout.seq_len:
        raise ValueError(
            f"shard takes the whole sequence: dim {dim} of {tuple(x.shape)} has {x.shape[dim]} rows, "
            f"but the plan's seq_len is {layout.seq_len}"
        )
    missing = layout.padded_len - layout.seq_len
    if missing and pad is None and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(
            f"{layout.seq_len} tokens over {layout.cp_size} ranks leave {missing} padded rows, and what stands in them "
            f"matters for {x.dtype}; pass pad= (a token id, an ignored label, a position)"
        )
    positions = layout.positions(rank).to(x.device)
    rows = x.index_select(dim, positions.clamp(max=layout.seq_len - 1))
    if pad is not None and torch.tensor(pad, dtype=x.dtype).item() != pad and pad == pad:
        raise ValueError(f"pad={pad!r} cannot be held by {x.dtype}; pass a value that can, or another dtype")
    real = int((positions < layout.seq_len).sum())
    if real == layout.local_len:
        return rows
    padding = (positions >= layout.seq_len).view(-1, *[1] * (x.dim() - dim - 1))
    return torch.where(padding, torch.tensor(0 if pad is None else pad, dtype=x.dtype, device=x.device), rows)


def unshard(x: Tensor, layout: Layout, link: Link, dim: int, grad: str | None) -> Tensor:
    """See `flexcp.Plan.unshard`."""
    dim = _dim(x, dim)
    if x.shape[dim] != layout.local_len:
        raise ValueError(
            f"unshard takes this rank's rows: dim {dim} of {tuple(x.shape)} has {x.shape[dim]}, "
            f"but the plan's local_len is {layout.local_len}"
        )
    if grad not in (None, "replicated", "partial"):
        raise ValueError(f"grad is 'replicated' or 'partial', got {grad!r}")
    if x.requires_grad and torch.is_grad_enabled():
        if grad is None:
            raise ValueError(
                "unshard was given a tensor that requires grad, and its gradient depends on the losses: pass "
                "grad='replicated' (the same loss on every rank) or 'partial' (the ranks' losses add up), or detach it"
            )
        return _Unshard.apply(x, layout, link, dim, grad)
    return _gather_rows(x, layout, link, dim)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layout: Layout, link: Link, dim: int, grad: str) -> Tensor:
        ctx.layout, ctx.link, ctx.dim, ctx.grad = layout, link, dim, grad
        return _gather_rows(x, layout, link, dim)

    @staticmethod
    def backward(ctx, dx: Tensor):
        layout, link, dim = ctx.layout, ctx.link, ctx.dim
        if ctx.grad == "replicated":
            return shard(dx, layout, link.rank, dim, 0), None, None, None, None
        rows = F.pad(dx.movedim(dim, 0), [0, 0] * (dx.dim() - 1) + [0, layout.padded_len - layout.seq_len])
        permuted = rows[layout.permutation().to(dx.device)].unflatten(0, (layout.cp_size, layout.local_len))
        return link.reduce_scatter(permuted).movedim(0, dim), None, None, None, None


def _gather_rows(x: Tensor, layout: Layout, link: Link, dim: int) -> Tensor:
    rows = link.all_gather(x.movedim(dim, 0)).flatten(0, 1)
    order = layout.restoration()[: layout.seq_len].to(x.device)
    return rows[order].movedim(0, dim).contiguous()


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim {dim} does not exist in a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()
