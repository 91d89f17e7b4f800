"""A simulated rank allocates what a real one does, and says what it does not measure."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import flexcp
from flexcp import masks
from flexcp.leanlayer import Lean, make_lean
from flexcp.loss import chunked_loss
from flexcp.models import Llama3Config, build
from flexcp.offload import Store
from flexcp.simulate import simulate
from tests.live_memory import LiveMemory

CONFIG = Llama3Config(
    vocab_size=128, dim=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=192, head_dim=16, init_std=0.2
)
S = 1500


def plain_window(b, h, q, kv):
    return (q >= kv) & (q - kv < 200)


def bytes_of_a_step(comm: str, lean: Lean | None, fsdp: bool, mask: str) -> tuple[int, int]:
    """The most bytes alive in one step of this rank, and what they come to afterwards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    function = {"plain": plain_window, "documents": masks.causal() & masks.document(torch.arange(S) // 400)}[mask]
    text = torch.randint(128, (1, S + 1), generator=torch.Generator().manual_seed(0))
    with LiveMemory() as memory:
        model = build(CONFIG, seed=0)
        if lean is not None:
            make_lean(model.layers, lean, Store("cpu"))
        if fsdp:
            for module in (*model.layers, model):
                fully_shard(module, mesh=mesh)
        plan = flexcp.plan(function, S, mesh, comm=comm, balance="head_tail")
        tokens, labels = plan.shard(text[:, :-1], pad=0), plan.shard(text[:, 1:], pad=-100)

        def head(x: Tensor, norm: nn.Module, weight: Tensor) -> Tensor:
            return chunked_loss(x, weight, labels, norm=norm, norm_parameters=list(norm.parameters()), chunk=50)

        memory.restart()
        with flexcp.context_parallel(plan):
            model(tokens, plan.positions, plan.block_mask, head=head).backward()
    gc.collect()
    return memory.peak_bytes, memory.live_bytes


@pytest.mark.parametrize(
    ("comm", "lean", "fsdp", "mask"),
    [
        ("gather", None, True, "documents"),
        ("exchange", Lean(tile=100, head_groups=2, every=2), True, "documents"),
        pytest.param("exchange", Lean(tile=100, keep_attention=False), False, "plain", marks=pytest.mark.slow),
        pytest.param("ring", None, False, "plain", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_simulated_rank_allocates_what_a_real_one_does(ranks, comm: str, lean, fsdp: bool, mask: str) -> None:
    real = ranks(2).run(bytes_of_a_step, comm, lean, fsdp, mask)
    for rank, (peak, live) in enumerate(real):
        simulate(rank, 2, 450)
        try:
            got_peak, got_live = bytes_of_a_step(comm, lean, fsdp, mask)
        finally:
            dist.destroy_process_group()
        print(f"rank {rank}: peak {peak:,} bytes, simulated {got_peak:,} ({got_peak / peak - 1:+.2%})")
        assert abs(got_peak / peak - 1) < 0.03
        assert abs(got_live / live - 1) < 0.03
    assert not dist.is_initialized()


def test_the_group_counts_what_it_would_receive() -> None:
    simulate(1, 4, 100.0)
    try:
        group = dist.group.WORLD
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)
        x = torch.arange(4.0)
        dist.all_gather([out := torch.empty(4) for _ in range(4)], x)
        assert torch.equal(out, x)
        assert group.received_bytes == 3 * 16
        uneven = torch.empty(5)
        dist.all_to_all_single(uneven, x, [2, 1, 1, 1], [1, 1, 1, 1])
        assert uneven.tolist() == [0, 1, 2, 3, 0]
        assert group.received_bytes == 3 * 16 + 4 * 4
        dist.reduce_scatter(part := torch.empty(1), list(x.split(1)))
        assert part.item() == 1.0
    finally:
        dist.destroy_process_group()
    with pytest.raises(ValueError, match="ranks 0 to 3, and no rank 4"):
        simulate(4, 4, 100.0)
    with pytest.raises(ValueError, match="more than 0 GB/s"):
        simulate(0, 4, 0)
