"""Gradients over the ranks: their sums, their global norm, and its bound.

A parameter that FSDP2 divides comes out of backward with its gradient summed and divided. All others (plain ones on
every rank, and those that only tensor parallelism divides) hold the gradient of this rank's rows, and are summed here.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flexcp.mesh import FSDP_AXIS

_BUCKET_BYTES = 32 * 1024 * 1024


def gradient_buckets(sizes_bytes: list[int], limit_bytes: int = _BUCKET_BYTES) -> list[list[int]]:
    """Groups indices, in order, so that no group of more than one exceeds the limit.

    >>> gradient_buckets([4, 4, 9, 1], limit_bytes=8)
    [[0, 1], [2], [3]]
    """
    buckets: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes_bytes):
        if not buckets or size > room:
            buckets.append([])
            room = limit_bytes
        buckets[-1].append(index)
        room -= size
    return buckets


def is_summed_in_backward(param: Tensor) -> bool:
    """Whether FSDP2 divides this parameter and so sums its gradient itself."""
    return isinstance(param, DTensor) and FSDP_AXIS in (param.device_mesh.mesh_dim_names or ())


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, or a plain tensor itself; writing into it writes into x."""
    with torch.no_grad():
        return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def sum_gradients(params: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Replaces each gradient that FSDP2 has not summed already by its sum over the group, in place.

    Every rank holds the gradient of its own rows and tokens, of every such parameter: the sum is the gradient of the
    step, not to be divided by anything. It goes in flat buckets, since many small messages are slow. A parameter
    without a gradient here (its rows did not use it) counts as zero, so that all ranks send the same.

    Args:
        params: in the same order on every rank.
        group: `Mesh.gradient_group`; None for one rank.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for param in params:
        if not param.requires_grad:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if is_summed_in_backward(param):
            continue
        if isinstance(param, DTensor) and param.grad.placements != param.placements:
            # Tensor parallelism leaves parts of a sum where each of its ranks has seen other rows.
            param.grad = param.grad.redistribute(placements=param.placements)
        by_dtype.setdefault(param.dtype, []).append(local(param.grad))
    if group is None or dist.get_world_size(group) == 1:
        return
    for dtype, grads in by_dtype.items():
        # bf16 has 8 bits: its sum over ranks is taken in fp32.
        wide = torch.promote_types(dtype, torch.float32)
        for bucket in gradient_buckets([grad.numel() * wide.itemsize for grad in grads]):
            flat = torch.cat([grads[index].flatten().to(wide) for index in bucket])
            dist.all_reduce(flat, group=group)
            pieces = flat.split([grads[index].numel() for index in bucket])
            for index, piece in zip(bucket, pieces):
                grads[index].copy_(piece.view_as(grads[index]))


class GlobalNorm:
    """The 2-norm of tensors that may be plain, or DTensors on several meshes: each element of the whole counts once.

    What a rank holds of a DTensor is counted by every rank along the axes that divide it, and those sums are added
    over these axes; along an axis of copies nothing is added. torch's own clip_grad_norm_ refuses such a mixture.
    """

    def __init__(self) -> None:
        self._squares: dict[tuple[DeviceMesh, tuple[int, ...]] | None, Tensor] = {}

    @torch.no_grad()
    def add(self, tensors: Iterable[Tensor]) -> None:
        """Counts tensors, in the same order on every rank; a DTensor must hold no unfinished sums.

        Raises:
            ValueError: one does.
        """
        groups: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
        for x in tensors:
            key = None
            if isinstance(x, DTensor):
                if any(placement.is_partial() for placement in x.placements):
                    raise ValueError(f"the norm of a tensor placed as {x.placements} is not known before it is summed")
                axes = tuple(axis for axis, placement in enumerate(x.placements) if not placement.is_replicate())
                key = x.device_mesh, axes
            groups.setdefault(key, []).append(local(x))
        for key, parts in groups.items():
            square = torch.nn.utils.get_total_norm(parts).double().square()
            before = self._squares.get(key)
            self._squares[key] = square if before is None else before + square

    @torch.no_grad()
    def total(self) -> Tensor:
        """The norm of everything counted, fp64, the same on every rank. A collective."""
        total: Tensor | None = None
        for key, square in self._squares.items():
            mesh, axes = (None, ()) if key is None else key
            square = square.clone()
            for axis in axes:
                assert mesh is not None
                dist.all_reduce(square, group=mesh.get_group(axis))
            total = square if total is None else total + square
        return torch.zeros((), dtype=torch.float64) if total is None else total.sqrt()


@torch.no_grad()
def clip(params: list[nn.Parameter], limit: float | None) -> Tensor:
    """Scales all gradients down where their global norm is above the limit. A collective.

    Args:
        params: with their final gradients; those without one are left out, which must be the same ones on every rank.
        limit: None clips nothing.

    Returns:
        The norm before, fp64.
    """
    grads = [param.grad for param in params if param.grad is not None]
    norm = GlobalNorm()
    norm.add(grads)
    total = norm.total()
    if limit is not None:
        factor = (limit / (total + 1e-6)).clamp(max=1.0)
        for grad in grads:
            part = local(grad)
            part.mul_(factor.to(part.dtype))
    return total
