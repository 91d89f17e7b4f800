"""What one rank's attention costs: `scripts/bench attention`.

On one GPU it stands for each rank in turn: the real executor with its real kernels and buffers, nothing on a wire
(`flexcp.inturn`). Beside each schedule stand torch's own flex context parallelism (its mask builder and its kernel on
its own rows of the same sequence), and the kernel, cuDNN and FlashAttention-2 on the whole sequence, divided by cp.
flexcp's schedules and the kernel alone are called in turn, in a new order each round, so that none of them always has
the GPU after a rest; the others have rounds of their own.
"""

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from bench_cases import MASKS, Case, cases
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexcp
from flexcp import attention as executor
from flexcp import kernel, kernel_gpu
from flexcp.inturn import Replay, in_turn
from flexcp.kernel import Score

NO_SCORE = Score(None)


@dataclass
class Contender:
    """What one rank does, and what was measured of it.

    Attributes:
        forward, backward: one call each, inside the context that `inside` makes.
        share: the time of a call is divided by this.
        memory, arrived: MiB on top in backward, and received in forward.
        exposed: the share of a call in which the GPU did nothing but communicate.
        errors: of each result, relative to the largest value.
        ms: medians, by "forward" and "backward".
    """

    name: str
    forward: Callable[[], object]
    backward: Callable[[], object]
    share: int = 1
    inside: Callable[[], AbstractContextManager] = nullcontext
    memory: float | None = None
    arrived: float | None = None
    exposed: float | None = None
    errors: dict[str, float] = field(default_factory=dict)
    ms: dict[str, float] = field(default_factory=dict)


WAYS = ("forward", "backward")


class Bench:
    """One sequence of random q, k, v and dout on one device.

    Args:
        heads: (query heads, KV heads, head dim).
        median: as in `cases`.
    """

    def __init__(
        self, seq_len: int, cp: int, heads: tuple[int, int, int], device: str, repeat: int, median: int = 0
    ) -> None:
        torch.manual_seed(0)
        self.median = median
        self.seq_len, self.cp, self.device, self.repeat = seq_len, cp, device, repeat
        self.heads, self.groups, self.dim = heads
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        make = lambda h: torch.randn(1, h, seq_len, self.dim, device=device, dtype=dtype)  # noqa: E731
        self.q, self.k, self.v, self.dout = make(self.heads), make(self.groups), make(self.groups), make(self.heads)
        self.scale = self.dim**-0.5

    def plans(self, case: Case, cp: int, **how) -> list[flexcp.Plan]:
        mask = case.mask.to(self.device)
        return [flexcp.plan(mask, self.seq_len, cp, rank=rank, device=self.device, **how) for rank in range(cp)]

    def one_device(self, case: Case) -> tuple[Contender, dict[str, Tensor]]:
        """The kernel alone on the whole sequence, and its results as the reference of every schedule."""
        (plan,) = self.plans(case, 1)
        (stage,) = plan.schedules["mask"].stages
        q, k, v, dout = (plan.shard(x, dim=2) for x in (self.q, self.k, self.v, self.dout))
        ahead = partial(kernel.forward, q, k, v, stage, NO_SCORE, self.scale)
        out, lse = ahead()
        out = out.to(q.dtype)
        back = partial(kernel.backward, q, k, v, out, lse, dout, None, stage, NO_SCORE, self.scale)
        results = {key: x[:, :, : self.seq_len] for key, x in zip(self._like(), (out, *back()[:3]))}
        return Contender("one device / cp", ahead, back, self.cp), results

    def schedule(self, name: str, case: Case, reference: dict[str, Tensor], **how) -> Contender:
        """The slowest rank of one schedule, alone, with what the others had sent it."""
        plans = self.plans(case, self.cp, **how)
        calls: dict[str, dict[int, Callable[[], object]]] = {way: {} for way in WAYS}
        arrived: dict[int, float] = {}
        results = {key: torch.zeros_like(x) for key, x in self._like().items()}

        def rank(link, received) -> None:
            plan = plans[link.rank]
            schedule = plan.schedules["mask"]
            replay = partial(Replay, len(plans), link.rank)
            ahead = partial(executor.forward, *(plan.shard(x, dim=2) for x in (self.q, self.k, self.v)))
            dout = plan.shard(self.dout, dim=2)
            out, lse = ahead(schedule, NO_SCORE, self.scale, link)
            sent, out = list(received), out.to(self.q.dtype)
            received.clear()
            back = partial(executor.backward, *ahead.args, out, lse, dout, None)
            grads = back(schedule, NO_SCORE, self.scale, link)
            sent_back = list(received)
            arrived[link.rank] = sum(x.nbytes for x in sent if x is not None) / 2**20
            for way, call, parts in zip(WAYS, (ahead, back), (sent, sent_back)):
                calls[way][link.rank] = lambda call=call, parts=parts: call(
                    schedule, NO_SCORE, self.scale, replay(parts)
                )
            rows, real = plan.positions[0], plan.valid.flatten()
            for key, x in zip(results, (out, *grads[:3])):
                results[key][:, :, rows[real]] = x[:, :, real].to(results[key].dtype)

        in_turn(len(plans), rank)
        slowest = {way: max(calls[way], key=lambda rank: self.ms(calls[way][rank], 3)) for way in WAYS}
        found = Contender(name, *(calls[way][slowest[way]] for way in WAYS), arrived=arrived[slowest["forward"]])
        found.memory = self._memory(found.backward)
        for key, x in results.items():
            right = reference[key].float()
            found.errors[key] = float((x.float() - right).abs().max() / right.abs().max())
        return found

    def torchs(self, case: Case) -> Contender:
        """torch's flex context parallelism: its balancer, its BlockMask and its compiled kernel; its slowest rank."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
        from torch.testing._internal.distributed.fake_pg import FakeStore

        torchs._compiled_create_block_mask = create_block_mask  # the same mask; compiling it takes 34 s each
        mask = case.mask.to(self.device)
        local = self.seq_len // self.cp
        balancer = self._torchs_balancer(case)
        order = balancer._generate_indices()[0].to(self.device)
        k, v = self.k[:, :, order].contiguous(), self.v[:, :, order].contiguous()
        torch._dynamo.reset()
        torch._functorch.config.donated_buffer = False  # or a forward could have one backward only
        compiled = torch.compile(flex_attention, fullgraph=True)
        calls = []
        for rank in sorted({0, self.cp // 2, self.cp - 1}):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.cp)
            mesh = DeviceMesh(self.device, list(range(self.cp)))
            block_mask = torchs._create_cp_block_mask(mask, 1, 1, self.seq_len, self.seq_len, mesh, balancer)
            dist.destroy_process_group()
            mine = order[rank * local : (rank + 1) * local]
            leaves = [self.q[:, :, mine].contiguous().requires_grad_(), *(x.detach().requires_grad_() for x in (k, v))]
            dout = self.dout[:, :, mine].contiguous()
            call = partial(compiled, *leaves, block_mask=block_mask, enable_gqa=True)
            back = partial(torch.autograd.grad, call(), leaves, dout, retain_graph=True)
            calls.append((call, back))
        return Contender("torch flex CP", *(max(some, key=lambda call: self.ms(call, 3)) for some in zip(*calls)))

    def others(self, case: Case) -> dict[str, Callable[[], Contender]]:
        """What stands beside flexcp, by its title."""
        found: dict[str, Callable[[], Contender]] = {"torch flex CP": partial(self.torchs, case)}
        if case.causal:
            for title, backend in (
                ("cuDNN / cp", SDPBackend.CUDNN_ATTENTION),
                ("FA2 / cp", SDPBackend.FLASH_ATTENTION),
            ):
                found[title] = partial(self.sdpa, title, backend)
        return found

    def _torchs_balancer(self, case: Case) -> Any:
        from torch.distributed.tensor.experimental._context_parallel._load_balancer import (
            _HeadTailLoadBalancer,
            _PTRRLoadBalancer,
        )

        if case.causal:
            return _HeadTailLoadBalancer(self.seq_len, self.cp, self.device)
        (plan,) = self.plans(case, 1)  # its block mask is torch's, which takes 34 s to compile
        return _PTRRLoadBalancer(plan.schedules["mask"].stages[0].block_mask, self.cp)

    def sdpa(self, name: str, backend: SDPBackend) -> Contender:
        """Causal attention of the whole sequence, in time divided by cp."""
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        inside = partial(sdpa_kernel, backend)
        call = partial(torch.nn.functional.scaled_dot_product_attention, *leaves, is_causal=True, enable_gqa=True)
        with inside():
            back = partial(torch.autograd.grad, call(), leaves, self.dout, retain_graph=True)
        return Contender(name, call, back, self.cp, inside)

    def race(self, contenders: list[Contender], rounds: int) -> None:
        """Calls all of them, forward and then backward, round after round, and sets their medians."""
        shuffle = random.Random(0).shuffle  # the same on every rank
        for way in WAYS:
            taken: dict[str, list[Callable[[], float]]] = {each.name: [] for each in contenders}
            for _ in range(rounds + 1):
                order = list(contenders)
                shuffle(order)
                self.line_up()
                for each in order:
                    with each.inside():
                        taken[each.name].append(self._timed(getattr(each, way)))
            for each in contenders:
                each.ms[way] = self.agreed(_median(taken[each.name][1:])) / each.share

    def line_up(self) -> None:
        """Before each round; where there are several ranks, they wait for one another."""

    def agreed(self, value: float) -> float:
        """The largest of the ranks'."""
        return value

    def ms(self, function: Callable[[], object], repeat: int) -> float:
        """The median time of a call, in milliseconds."""
        return self.agreed(_median([self._timed(function) for _ in range(repeat + 1)][1:]))

    def _timed(self, function: Callable[[], object]) -> Callable[[], float]:
        """Calls it; what is returned waits for the end and gives the milliseconds."""
        if self.device == "cpu":
            begun = time.perf_counter()
            function()
            ms = (time.perf_counter() - begun) * 1e3
            return lambda: ms
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()

        def taken() -> float:
            end.synchronize()
            return begin.elapsed_time(end)

        return taken

    def _memory(self, function: Callable[[], object]) -> float | None:
        """MiB that a call takes on top, at most."""
        if self.device == "cpu":
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return self.agreed((torch.cuda.max_memory_allocated() - before) / 2**20)

    def _like(self) -> dict[str, Tensor]:
        return {"out": self.q, "dq": self.q, "dk": self.k, "dv": self.v}


def _median(times: list[Callable[[], float]]) -> float:
    return statistics.median(taken() for taken in times)


SCHEDULES: dict[str, dict] = {
    "gather": {"comm": "gather", "head_groups": 1},
    "gather-grouped": {"comm": "gather", "head_groups": 8},
    "ring": {"comm": "ring"},
    "exchange": {"comm": "exchange", "head_groups": 1},
    "exchange-grouped": {"comm": "exchange", "head_groups": 8},
    "ulysses": {"comm": "ulysses"},
}


def attention(
    seq_len: int = 131_072,
    cp: int = 8,
    heads: tuple[int, int, int] = (32, 8, 128),
    mask: tuple[str, ...] = MASKS,
    schedules: tuple[str, ...] = tuple(SCHEDULES),
    others: bool = True,
    device: str = "cuda",
    repeat: int = 20,
    median: int = 0,
    triton: bool = False,
) -> None:
    """One table a mask: every schedule of flexcp, its slowest rank, beside torch's flex CP, cuDNN and FlashAttention-2.

    Args:
        seq_len: tokens.
        cp: ranks.
        heads: query heads, KV heads, head dim.
        mask: which of the five.
        schedules: which of flexcp's.
        others: measure torch's own ones, too (a GPU only).
        device: cuda, or cpu to see that it runs.
        repeat: calls, of which the median counts.
        median: length of documents, in tokens; 0: seq_len / 64.
        triton: as if FLASH were not installed.
    """
    if triton:
        kernel_gpu.flash_is_available = lambda device: False
    bench = Bench(seq_len, cp, heads, device, repeat, median)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    console = Console(width=170)
    console.print(
        f"{seq_len:,} tokens, cp {cp}, {heads[0]}:{heads[1]} heads, D {heads[2]}, {bench.q.dtype}; "
        f"{name}, torch {torch.__version__}, {_kernel(device)}; "
        f"median of {repeat} calls, torch's of {max(1, repeat // 4)}"
    )
    print_tables(bench, mask, schedules, others, console.print)


def _kernel(device: str) -> str:
    if device == "cpu":
        return "eager"
    return "FLASH" if kernel_gpu.flash_is_available(torch.device(device)) else "Triton"


def print_tables(
    bench: Bench, names: tuple[str, ...], schedules: tuple[str, ...], others: bool, say: Callable[[Any], None]
) -> None:
    """A table a mask, of which flexcp's part is measured first."""
    for case in cases(bench.seq_len, names, bench.median):
        one, reference = bench.one_device(case)
        ours = partial(bench.schedule, case=case, reference=reference)
        ready = [one, *_ready({name: partial(ours, name, **SCHEDULES[name]) for name in schedules}, say)]
        bench.race(ready, bench.repeat)
        if others and bench.device == "cuda":
            beside = _ready(bench.others(case), say)
            bench.race(beside, max(1, bench.repeat // 4))
            ready += beside
        say(table(case, ready, 4 * bench.heads * bench.dim * case.pairs / bench.cp / 1e9))


def _ready(wanted: dict[str, Callable[[], Contender]], say: Callable[[Any], None]) -> list[Contender]:
    found = []
    for title, prepare in wanted.items():
        begun = time.perf_counter()
        try:
            found.append(prepare())
        except Exception as error:  # the same one on every rank: a table with a hole says more than none
            say(f"{title}: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say(f"{title}: ready in {time.perf_counter() - begun:.0f} s")
    return found


def table(case: Case, rows: list[Contender], gflops: float) -> Table:
    """The first row is what the others are compared with; gflops: of one rank's forward."""
    drawn = Table(title=f"{case.name}: {case.pairs:,} visible pairs")
    drawn.add_column("slowest rank", no_wrap=True)
    times = ("fwd ms", "TFLOP/s", "of one", "bwd ms", "TFLOP/s ", "of one ", "both ms", "of one  ")
    for column in (*times, "MiB bwd", "MiB in", "exposed", "max error of out, dq, dk, dv"):
        drawn.add_column(column, justify="right")
    one = rows[0].ms
    for row in rows:
        cells = []
        for way, factor in zip(WAYS, (1.0, 2.5)):
            ms = row.ms[way]
            cells += [f"{ms:.2f}", f"{factor * gflops / ms:.0f}", f"{one[way] / ms:.3f}"]
        both = sum(row.ms.values())
        cells += [f"{both:.2f}", f"{sum(one.values()) / both:.3f}"]
        cells += ["" if x is None else f"{x:,.0f}" for x in (row.memory, row.arrived)]
        cells.append("" if row.exposed is None else f"{row.exposed:.1%}")
        drawn.add_row(row.name, *cells, " ".join(f"{x:.1e}" for x in row.errors.values()))
    return drawn
