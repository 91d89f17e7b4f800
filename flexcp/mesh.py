"""The ranks as a grid: which of them share parameters, rows of data, one sequence, one matrix.

    dp_replicate x dp_shard x cp x tp

cp and dp_shard ranks divide the parameters among themselves (FSDP2, over both together: to a parameter it is the same
whether a rank has other rows or other tokens of a row). dp_replicate ranks hold copies of that (HSDP). tp ranks divide
the matrices of each layer. tp is innermost, so that its ranks are neighbours on the fastest links; then cp.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flexcp.errors import UserError

AXES = ("dp_replicate", "dp_shard", "cp", "tp")
FSDP_AXIS = "fsdp"  # of a mesh that divides parameters: dp_shard x cp


@dataclass(frozen=True)
class Degrees:
    """How many ranks each axis has."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        """Ranks of the whole grid."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks with rows of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Ranks among which a parameter is divided."""
        return self.dp_shard * self.cp

    def __str__(self) -> str:
        return " ".join(f"--{axis.replace('_', '-')} {getattr(self, axis)}" for axis in AXES)


def resolve(dp_replicate: int, dp_shard: int, cp: int, tp: int, num_ranks: int | None) -> Degrees:
    """The grid that was asked for, where one axis may be -1: the rest of the ranks.

    >>> print(resolve(1, -1, 2, 1, num_ranks=8))
    --dp-replicate 1 --dp-shard 4 --cp 2 --tp 1

    Args:
        num_ranks: that have been started; None where nobody has, so that the grid says how many to start.

    Raises:
        UserError: no grid of so many ranks.
    """
    given = dict(zip(AXES, (dp_replicate, dp_shard, cp, tp)))
    flags = {axis: f"--{axis.replace('_', '-')}" for axis in AXES}
    for axis, value in given.items():
        if value < 1 and value != -1:
            raise UserError(f"{flags[axis]} is {value}, and must be at least 1, or -1 for the rest of the ranks")
    rest = [axis for axis, value in given.items() if value == -1]
    if len(rest) > 1:
        raise UserError(f"{' and '.join(flags[axis] for axis in rest)} are both -1: only one can be the rest")
    known = math.prod(value for value in given.values() if value != -1)
    told = " ".join(f"{flags[axis]} {value}" for axis, value in given.items())
    if rest:
        if num_ranks is None:
            raise UserError(
                f"{flags[rest[0]]} is -1, the rest of the ranks, and no ranks have been started: start them with "
                "torchrun, or name a number"
            )
        if num_ranks % known:
            raise UserError(
                f"{told}: the other axes multiply to {known}, which does not divide the {num_ranks} ranks that were "
                f"started: start a multiple of {known} ranks"
            )
        given[rest[0]] = num_ranks // known
    grid = Degrees(**given)
    if num_ranks is not None and grid.size != num_ranks:
        more = f"pass --dp-shard {num_ranks // known * given['dp_shard']}, or " if num_ranks % known == 0 else ""
        raise UserError(
            f"{told} is a grid of {grid.size} ranks, and {num_ranks} were started: {more}start {grid.size} rank(s)"
        )
    return grid


class Mesh:
    """This rank's place in the grid, and its groups.

    Attributes:
        degrees: the grid.
        device_type: "cpu" or "cuda".
        rank, tp_rank: this rank's number among all, and along tp.
        data_rank: which share of a step's rows this rank has, of `degrees.dp`; the same for all its cp and tp ranks.
        cp: the ranks that share a sequence, for `flexcp.plan`; None for one.
        tp: the ranks that share a matrix; None for one.
        sharding: what `fully_shard` takes: a mesh of one dimension, or of two with dp_replicate; None where
            parameters are not divided.
        loss_group: the ranks whose losses add up to the step's, which is all of them; None for one.
        gradient_group: those whose gradients of a whole parameter, or of the same part by tp, add up: dp x cp; None
            for one.
    """

    def __init__(self, degrees: Degrees, device_type: str) -> None:
        """A collective: to be called on all `degrees.size` ranks, after init_process_group where they are several."""
        self.degrees, self.device_type = degrees, device_type
        self.rank = dist.get_rank() if degrees.size > 1 else 0
        self.tp_rank = self.rank % degrees.tp
        self.data_rank = self.rank // (degrees.cp * degrees.tp)
        self.cp: DeviceMesh | None = None
        self.tp: DeviceMesh | None = None
        self.sharding: DeviceMesh | None = None
        self.loss_group: dist.ProcessGroup | None = None
        self.gradient_group: dist.ProcessGroup | None = None
        if degrees.size == 1:
            return
        # Two views of one grid: FSDP2 wants the axes of its shards and of tp from one mesh, with dp_shard and cp as
        # one axis, and a sequence is divided along cp alone.
        tensors = self._grid({"dp_replicate": degrees.dp_replicate, FSDP_AXIS: degrees.fsdp, "tp": degrees.tp})
        if degrees.tp > 1:
            self.tp = tensors["tp"]
        if degrees.fsdp > 1:
            self.sharding = tensors["dp_replicate", FSDP_AXIS] if degrees.dp_replicate > 1 else tensors[FSDP_AXIS]
        if degrees.cp > 1:
            self.cp = self._grid({"dp": degrees.dp, "cp": degrees.cp, "tp": degrees.tp})["cp"]
        self.loss_group = dist.group.WORLD
        if degrees.dp * degrees.cp > 1:
            self.gradient_group = self._grid({"rows": degrees.dp * degrees.cp, "tp": degrees.tp}).get_group("rows")

    def _grid(self, sizes: dict[str, int]) -> DeviceMesh:
        return init_device_mesh(self.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @property
    def for_plan(self) -> DeviceMesh | int:
        """What `flexcp.plan` takes for its mesh."""
        return 1 if self.cp is None else self.cp

    def own_tokens(self, x: Tensor, dim: int = 1) -> Tensor:
        """Of a cp rank's tokens, those that this tp rank has between attention and MLP, and of which it has logits.

        Args:
            x: size L along dim, which `degrees.tp` must divide.
        """
        return x if self.tp is None else x.chunk(self.degrees.tp, dim)[self.tp_rank]

    def default_device(self) -> torch.device:
        """Of this rank, where nobody has said another: the current one of the mesh's type."""
        return torch.device(self.device_type)
