"""Which part of a tensor a rank holds, and how its bits are named and filled, whatever kind of tensor it is.

Plain tensors are whole on every rank. Of a DTensor a rank holds a box. Either may be a subclass that keeps several
tensors, as torchao's 8-bit optimizer states do (codes, scales, a table): these are its parts, and no float but they
are what a checkpoint keeps, so that a state comes back bit for bit.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from flexcp.compat_torchao import torchao
from flexcp.errors import UserError

WHOLE = ""  # the name of the only part of a tensor that has no others


@dataclass(frozen=True)
class Box:
    """The block start[d] .. start[d] + shape[d] - 1 of a tensor, in each of its dimensions."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def within(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape has such a block."""
        ends = zip(self.start, self.shape, shape, strict=False)
        return len(self.start) == len(self.shape) == len(shape) and all(a >= 0 and a + n <= size for a, n, size in ends)

    def meet(self, other: "Box") -> "Box | None":
        """What two boxes of one tensor have in common; None where that is nothing.

        >>> Box((0, 0), (4, 4)).meet(Box((2, 3), (4, 4)))
        Box(start=(2, 3), shape=(2, 1))
        """
        start = tuple(map(max, self.start, other.start))
        ends = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.shape, other.start, other.shape))
        shape = tuple(end - first for end, first in zip(ends, start))
        return Box(start, shape) if all(size > 0 for size in shape) else None

    def slices(self, inside: "Box") -> tuple[slice, ...]:
        """This box as an index into a tensor that holds the box `inside`."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.start, inside.start, self.shape))


def box_of(tensor: Tensor) -> Box:
    """The block of a tensor that this rank holds.

    Raises:
        UserError: a DTensor that is a sum still to be taken, or whose shard is no block.
    """
    if not isinstance(tensor, DTensor):
        return Box((0,) * tensor.ndim, tuple(tensor.shape))
    mesh, start, shape = tensor.device_mesh, [0] * tensor.ndim, list(tensor.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank outside the mesh of its own tensor"
    # FSDP2 divides what tensor parallelism has divided before, and writes itself first: as a strided shard.
    for strided in (False, True):
        for axis, placement in enumerate(tensor.placements):
            if placement.is_partial():
                raise UserError(f"a tensor {list(tensor.shape)} placed {placement} is no state to be saved")
            dim = getattr(placement, "dim", None)
            if dim is None or hasattr(placement, "split_factor") != strided:
                continue
            chunk = -(-shape[dim] // mesh.size(axis))
            first = min(coordinate[axis] * chunk, shape[dim])
            start[dim], shape[dim] = start[dim] + first, min(chunk, shape[dim] - first)
    box = Box(tuple(start), tuple(shape))
    local = tuple(tensor.to_local().shape)
    if local != box.shape and math.prod(local) + box.numel:
        raise UserError(
            f"a tensor {list(tensor.shape)} placed {tensor.placements} holds {list(local)} here, and not the block "
            f"{list(box.shape)} that a checkpoint would expect: use a sharding of equal consecutive blocks"
        )
    return box


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part, without the wrappers that hold one tensor of the same values and nothing else."""
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    while (inner := _only_inner(tensor)) is not None:
        tensor = inner
    return tensor


def _only_inner(tensor: Tensor) -> Tensor | None:
    if not _is_wrapper(tensor):
        return None
    names = tensor.__tensor_flatten__()[0]
    inner = getattr(tensor, names[0])
    same = len(names) == 1 and inner.shape == tensor.shape and inner.dtype == tensor.dtype
    return inner if same else None


def _is_wrapper(tensor: Tensor) -> bool:
    return type(tensor) not in (Tensor, torch.nn.Parameter) and hasattr(tensor, "__tensor_flatten__")


@dataclass(frozen=True)
class Encoding:
    """What the parts of a tensor are: a subclass by name, and its attributes."""

    kind: str
    attributes: tuple[Any, ...]

    @staticmethod
    def of(local: Tensor) -> "Encoding | None":
        """None for a tensor that is its values."""
        if not _is_wrapper(local):
            return None
        attributes = (str(x) if isinstance(x, torch.dtype) else x for x in local.__tensor_flatten__()[1])
        return Encoding(type(local).__name__, tuple(attributes))

    def decode(self, parts: dict[str, Tensor]) -> Tensor:
        """The values, as floats.

        Raises:
            UserError: a kind that this version does not know.
        """
        states = torchao("optim.subclass_8bit").OptimState8bit, torchao("optim.subclass_fp8").OptimStateFp8
        known = {cls.__name__: cls for cls in states}
        if self.kind not in known:
            raise UserError(f"the checkpoint has tensors of the kind {self.kind!r}, and known are {', '.join(known)}")
        attributes = [dtype_of(x) if isinstance(x, str) else x for x in self.attributes]
        return known[self.kind].__tensor_unflatten__(parts, attributes).dequantize()


def parts_of(local: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a local tensor consists of, by name: itself, or what a subclass keeps."""
    if not _is_wrapper(local):
        yield WHOLE, local
        return
    for name in local.__tensor_flatten__()[0]:
        yield name, getattr(local, name)


def dtype_of(text: str) -> torch.dtype:
    """The dtype of a name such as "torch.float32" or "float32".

    Raises:
        UserError: there is none.
    """
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"the checkpoint has a tensor of the dtype {text!r}, which torch does not know")
    return dtype
