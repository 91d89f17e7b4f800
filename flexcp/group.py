"""Which ranks a plan is for, and which of them share the heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from flexcp.comm import Link, joint_group


@dataclass(frozen=True)
class Ranks:
    """A rank's place in its group.

    Attributes:
        link: the connection to the group; None where the group does not exist.
        size, rank: of the group, and this rank in it.
        device: type of device that the group's ranks compute on.
        ulysses: ranks that share the heads, where the mesh says so.
    """

    link: Link | None
    size: int
    rank: int
    device: str
    ulysses: int | None = None


def ranks_of(mesh: DeviceMesh | int, rank: int | None) -> Ranks:
    """The ranks that `mesh` names; see `flexcp.plan`.

    Raises:
        ValueError, TypeError: one sentence.
    """
    if isinstance(mesh, DeviceMesh):
        if rank is not None:
            raise ValueError("rank is for a mesh given as a size; a DeviceMesh knows this process's rank")
        names = mesh.mesh_dim_names or ()
        if mesh.ndim != 1 and "cp" not in names:
            raise ValueError(
                f"the mesh has dimensions {names or mesh.ndim}, but one must be named 'cp'; slice or name it"
            )
        if "ulysses" in names and "cp" in names:
            return _of_two_axes(mesh, names)
        group = mesh.get_group("cp" if "cp" in names else 0)
        link = Link(group)
        return Ranks(link, link.size, link.rank, mesh.device_type)
    if isinstance(mesh, bool) or not isinstance(mesh, int):
        raise TypeError(f"mesh is a DeviceMesh or the size of the group, got {type(mesh).__name__}")
    if mesh < 1:
        raise ValueError(f"a group has at least 1 rank, got mesh={mesh}")
    rank = 0 if rank is None else rank
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ValueError(f"rank is a whole number, at least 0, got {rank!r}")
    if not 0 <= rank < mesh:
        raise ValueError(f"rank is at least 0 and below mesh={mesh}, got {rank}")
    return Ranks(Link(None) if mesh == 1 else None, mesh, rank, "cpu")


def _of_two_axes(mesh: DeviceMesh, names: tuple[str, ...]) -> Ranks:
    """All ranks along "cp" and "ulysses" together; those along "ulysses" follow one another."""
    if names.index("cp") > names.index("ulysses"):
        raise ValueError(f"the mesh has dimensions {names}, but 'cp' must stand before 'ulysses'; swap them")
    both = mesh["cp", "ulysses"]
    members = both.mesh.flatten().tolist()
    if members != sorted(members):
        raise ValueError(f"the ranks of the mesh along 'cp' and 'ulysses' are {members}, but must ascend; reorder them")
    axes = both.get_group("cp"), both.get_group("ulysses")
    link = Link(joint_group(axes[0], members))
    link.adopt(axes[1], axes[0])
    return Ranks(link, link.size, link.rank, mesh.device_type, len(both.mesh[0]))


def ulysses_ranks(comm: str, asked: int | None, size: int, num_kv_heads: int) -> int:
    """How many ranks share the heads; 1 where comm does not begin with "ulysses".

    Args:
        asked: by the user or the mesh; None: all for "ulysses" alone; else the greatest divisor of size, below itself
            where there is one, that also divides num_kv_heads.
    Raises:
        ValueError: one sentence.
    """
    if asked is not None and size % asked:
        raise ValueError(f"ulysses={asked} ranks are to share the heads, but do not divide the group of {size} ranks")
    if comm == "ulysses":
        if asked not in (None, size):
            raise ValueError(
                f"comm='ulysses' shares the heads among all {size} ranks, but ulysses={asked}; pass "
                "comm='ulysses+gather', 'ulysses+ring' or 'ulysses+exchange'"
            )
        return size
    if comm == "auto" or asked == 1:
        return asked or 1
    if not comm.startswith("ulysses"):
        if asked is not None:
            raise ValueError(
                f"ulysses={asked} ranks are to share the heads, but with comm={comm!r} none do; pass "
                f"comm='ulysses+{comm}'"
            )
        return 1
    fitting = [n for n in range(2, size) if size % n == 0 and num_kv_heads % n == 0]
    return asked or max(fitting, default=size)
