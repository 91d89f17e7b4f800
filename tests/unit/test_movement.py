"""What moves between ranks is held no longer than it is on its way, counted on one simulated rank of eight."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

import flexcp
from flexcp.simulate import simulate
from tests.live_memory import LiveMemory

CP, LENGTH, HEADS, DIM, BLOCK = 8, 4096, 4, 256, 32
SHARD = 2 * HEADS * LENGTH // CP * DIM * 4  # bytes of a rank's keys and values


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    simulate(3, CP, 450.0)
    yield init_device_mesh("cpu", (CP,), mesh_dim_names=("cp",))
    dist.destroy_process_group()


def two_blocks(b, h, q, kv):
    """Each block of queries sees two blocks, and those of a rank blocks of all ranks, 32 in all."""
    return kv // BLOCK % 64 == q // BLOCK * 4 % 64


@pytest.mark.parametrize(
    ("comm", "groups", "shards"),
    [
        # Keys and values of all, and their gradients: each 8. Then dq, the scores and keys of a tile, and the like.
        ("gather", 1, 8 + 8 + 4.5),
        # Of a group each: keys here and on their way, gradients here, leaving and arriving; what has been added up.
        ("gather", 4, 5 * 2 + 1 + 2),
        # Own blocks and received ones, twice: 3 and 3.
        ("exchange", 1, 3 + 3 + 4.5),
        # Keys own, here and on their way; gradients here, leaving, arriving and added up.
        ("ring", 1, 3 + 4 + 2.5),
        # q, out, dout, k and v; dq, dk and dv, as large together as 1.5 shards each, and scores.
        ("ulysses", 1, 5.5),
    ],
)
def test_backward_holds_what_it_computes_with_and_what_is_on_its_way(
    mesh: DeviceMesh, comm: str, groups: int, shards: float
) -> None:
    """References that outlived their use made it 32.5, 14.6, 15.0, 10.6 and 10.0."""
    plan = flexcp.plan(two_blocks, LENGTH, mesh, comm=comm, balance="contiguous", head_groups=groups, block_size=BLOCK)
    heads = HEADS if comm != "ulysses" else CP  # each rank computes one
    q, k, v = (torch.randn(1, heads, plan.local_len, DIM, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    with LiveMemory() as memory, flexcp.context_parallel(plan):
        out = flex_attention(q, k, v, block_mask=plan.block_mask)
        before = memory.live_bytes
        memory.restart()
        out.backward(dout)
    held = (memory.peak_bytes - before) / (SHARD * heads // HEADS)
    print(f"{comm} in {groups} groups: {held:.2f} shards")
    assert held <= shards
