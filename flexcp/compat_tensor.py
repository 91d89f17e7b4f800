"""Private names of torch.distributed.tensor, apart from `compat`, which planning may import."""

from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as _local_shape_and_offset


def offset_of_local(x: DTensor) -> tuple[int, ...]:
    """Where this rank's part of a DTensor begins in the whole, in each dimension."""
    return tuple(_local_shape_and_offset(x.shape, x.device_mesh, x.placements)[1])
