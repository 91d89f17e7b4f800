"""Private names of torch.distributed.tensor, apart from `compat`, which planning may import."""

import logging

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as _local_shape_and_offset


def offset_of_local(x: DTensor) -> tuple[int, ...]:
    """Where this rank's part of a DTensor begins in the whole, in each dimension."""
    return tuple(_local_shape_and_offset(x.shape, x.device_mesh, x.placements)[1])


def full_tensor(x: DTensor) -> Tensor:
    """The whole of a DTensor, on every rank. A collective."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it remarks that a tensor divided by FSDP2 and tp takes two gathers
    try:
        return x.full_tensor()
    finally:
        logger.setLevel(level)
