"""Attention on real ranks, with a real network: every schedule of flexcp beside torch's own.

torchrun --nproc-per-node 2 scripts/bench_ranks.py --seq-len 131072 --mask causal window
torchrun --nproc-per-node 2 scripts/bench_ranks.py --device cpu --seq-len 512 --heads 4 2 16 --repeat 1

Forward and backward go through the public call. A time is the slowest rank's median; `of one` is the time of FLASH
alone on one GPU, divided by the ranks, over it. `exposed` is the share of a forward and backward in which
a rank's GPU did nothing but communicate, from the profiler's trace.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
import tyro
from bench_attention import SCHEDULES, Bench, Contender, print_tables
from bench_cases import MASKS, Case
from rich.console import Console
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexcp


class RankBench(Bench):
    """One rank of a group; every rank draws the same sequence and takes its rows."""

    def __init__(self, mesh: DeviceMesh, seq_len: int, heads: tuple[int, int, int], repeat: int) -> None:
        super().__init__(seq_len, mesh.size(), heads, mesh.device_type, repeat)
        self.mesh = mesh

    def schedule(self, name: str, case: Case, reference: dict[str, Tensor], **how) -> Contender:
        plan = flexcp.plan(case.mask.to(self.device), self.seq_len, self.mesh, **how)
        q, k, v = (plan.shard(x, dim=2).requires_grad_() for x in (self.q, self.k, self.v))
        dout = plan.shard(self.dout, dim=2)
        inside = partial(flexcp.context_parallel, plan)
        call = partial(flex_attention, q, k, v, block_mask=plan.block_mask, enable_gqa=True)
        with inside():
            row = self._contender(name, call, (q, k, v), dout, inside)
            got = (call().detach(), *row.backward())
        rows, real = plan.positions[0], plan.valid.flatten()
        for (key, whole), mine in zip(reference.items(), got):
            difference = (mine[:, :, real].float() - whole[:, :, rows[real]].float()).abs().max()
            row.errors[key] = self.agreed(float(difference)) / float(whole.float().abs().max())
        return row

    def torchs_flex(self, case: Case) -> Contender:
        """torch's flex context parallelism: keys and values gathered, its compiled kernel, gradients scattered."""
        from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
        from torch.distributed.tensor.experimental._context_parallel._cp_custom_ops import flex_cp_allgather

        torchs._compiled_create_block_mask = create_block_mask  # the same mask; compiling it takes 34 s
        torch._functorch.config.donated_buffer = False  # or a forward could have one backward only
        mask = case.mask.to(self.device)
        balancer = self._torchs_balancer(case)
        order = balancer._generate_indices()[0].to(self.device)
        block_mask = torchs._create_cp_block_mask(mask, 1, 1, self.seq_len, self.seq_len, self.mesh, balancer)
        local = self.seq_len // self.cp
        mine = order[self.mesh.get_local_rank() * local :][:local]
        q, k, v = (x[:, :, mine].contiguous().requires_grad_() for x in (self.q, self.k, self.v))
        dout = self.dout[:, :, mine].contiguous()
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, fullgraph=True)
        group = self.mesh.get_group().group_name

        def call() -> Tensor:
            keys, values = flex_cp_allgather(k, v, 2, group)
            return compiled(q, keys, values, block_mask=block_mask, enable_gqa=True)

        return self._contender("torch flex CP", call, (q, k, v), dout)

    def torchs_ring(self, name: str, backend: SDPBackend) -> Contender:
        """torch's ring over scaled_dot_product_attention; causal only, no grouped heads."""
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        repeat = self.heads // self.groups
        q, dout = self.q.clone(), self.dout.clone()
        k, v = (x.repeat_interleave(repeat, 1) for x in (self.k, self.v))
        buffers = [q, k, v, dout]
        set_rotate_method("alltoall")
        with context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[2] * 4):  # they are whole again afterwards
            *leaves, dout = (x.clone() for x in (q, k, v, dout))

        @contextmanager
        def inside() -> Iterator[None]:
            with context_parallel(self.mesh), sdpa_kernel(backend):
                yield

        leaves = [x.requires_grad_() for x in leaves]
        call = partial(torch.nn.functional.scaled_dot_product_attention, *leaves, is_causal=True)
        with inside():
            return self._contender(name, call, leaves, dout, inside)

    def others(self, case: Case) -> dict[str, Callable[[], Contender]]:
        found: dict[str, Callable[[], Contender]] = {"torch flex CP": partial(self.torchs_flex, case)}
        if case.causal:
            for name, backend in (("FA2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
                title = f"torch ring, {name}"
                found[title] = partial(self.torchs_ring, title, backend)
        return found

    def line_up(self) -> None:
        dist.barrier()

    def agreed(self, value: float) -> float:
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.item()

    def _contender(
        self,
        name: str,
        call: Callable[[], Tensor],
        leaves: Iterable[Tensor],
        dout: Tensor,
        inside: Callable[[], AbstractContextManager] = nullcontext,
    ) -> Contender:
        back = partial(torch.autograd.grad, call(), tuple(leaves), dout, retain_graph=True)
        found = Contender(name, call, back, inside=inside, memory=self._memory(back))
        if self.device == "cuda":
            found.exposed = self.agreed(exposed(lambda: (call(), back())))
        return found


def exposed(function: Callable[[], object]) -> float:
    """The share of a call in which the GPU did nothing but communicate."""
    from torch.profiler import ProfilerActivity, profile

    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        function()
        torch.cuda.synchronize()
    device = [e for e in trace.events() if str(e.device_type).endswith("CUDA")]
    spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for event in device:
        spans["nccl" in event.name.lower()].append((event.time_range.start, event.time_range.end))
    return exposed_share(spans[True], spans[False])


def exposed_share(moving: list[tuple[float, float]], computing: list[tuple[float, float]]) -> float:
    """Of the time from the first to the last of all spans, the part with something moving and nothing computing.

    >>> exposed_share([(0, 2), (5, 6)], [(1, 4), (8, 10)])
    0.2
    """
    every = sorted({edge for span in (*moving, *computing) for edge in span})
    inside = lambda spans, at: any(start <= at < end for start, end in spans)  # noqa: E731
    alone = sum(end - start for start, end in pairwise(every) if inside(moving, start) and not inside(computing, start))
    return alone / (every[-1] - every[0]) if every else 0.0


def main(
    seq_len: int = 131_072,
    heads: tuple[int, int, int] = (32, 8, 128),
    mask: tuple[str, ...] = MASKS,
    schedules: tuple[str, ...] = tuple(SCHEDULES),
    others: bool = True,
    device: str = "cuda",
    repeat: int = 20,
) -> None:
    """Run it under torchrun; rank 0 prints.

    Args:
        seq_len: tokens of the whole sequence.
        heads: query heads, KV heads, head dim.
        mask: which of the five.
        schedules: which of flexcp's.
        others: measure torch's own ones, too (GPUs only).
        device: cuda, or cpu to see that it runs.
        repeat: calls, of which the median counts.
    """
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    else:
        torch.set_num_threads(1)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))
    bench = RankBench(mesh, seq_len, heads, repeat)
    say = Console(width=160).print if mesh.get_rank() == 0 else lambda *_: None
    print_tables(bench, mask, schedules, others, say)
    dist.destroy_process_group()


if __name__ == "__main__":
    tyro.cli(main)
