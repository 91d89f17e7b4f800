"""What one rank's attention costs: `scripts/bench attention`.

On one GPU it stands for each rank in turn: the real executor with its real kernels and buffers, nothing on a wire
(`flexcp.inturn`). Beside each schedule stand torch's own flex context parallelism (its mask builder and its kernel on
its own rows of the same sequence), and cuDNN and FlashAttention-2 on the whole sequence, divided by cp.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexcp
from flexcp import attention as executor
from flexcp import kernel, masks
from flexcp.inturn import Replay, in_turn
from flexcp.kernel import Score

NO_SCORE = Score(None)


@dataclass(frozen=True)
class Case:
    """A sequence and what it sees.

    Attributes:
        mask: by its mask_mod.
        pairs: visible ones, of (query, key).
        causal: as torch's SDPA knows it.
    """

    name: str
    mask: masks.Mask
    pairs: int
    causal: bool = False


@dataclass
class Row:
    """What was measured of the slowest rank of a schedule, in ms and MiB; errors relative to the largest value."""

    name: str
    forward: float | None = None
    backward: float | None = None
    memory: float | None = None
    arrived: float | None = None
    exposed: float | None = None
    errors: dict[str, float] = field(default_factory=dict)


def lengths_of_documents(seq_len: int, seed: int = 0) -> list[int]:
    """Long-tailed: half are shorter than seq_len / 64, some nearly half the sequence."""
    generator = torch.Generator().manual_seed(seed)
    lengths: list[int] = []
    while sum(lengths) < seq_len:
        draw = float(torch.randn((), generator=generator).exp().pow(1.3)) * seq_len / 64
        lengths.append(max(16, min(int(draw), seq_len // 2, seq_len - sum(lengths))))
    lengths[-1] -= sum(lengths) - seq_len
    return [n for n in lengths if n > 0]


MASKS = ("causal", "window", "documents-causal", "documents-full", "prefix")


def cases(seq_len: int, names: tuple[str, ...]) -> list[Case]:
    window, prefix = min(4096, seq_len // 4), seq_len // 4
    lengths = lengths_of_documents(seq_len)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    triangle = lambda n: n * (n + 1) // 2  # noqa: E731
    every = {
        "causal": Case("causal", masks.causal(), triangle(seq_len), causal=True),
        "window": Case(
            f"causal window of {window:,}", masks.sliding_window(window), triangle(seq_len) - triangle(seq_len - window)
        ),
        "documents-causal": Case(
            "causal documents", masks.causal() & masks.document(ids), sum(triangle(n) for n in lengths)
        ),
        "documents-full": Case("whole documents", masks.document(ids), sum(n * n for n in lengths)),
        "prefix": Case(f"prefix of {prefix:,}", masks.prefix_lm(prefix), triangle(seq_len) + triangle(prefix - 1)),
    }
    return [every[name] for name in names]


class Bench:
    """One sequence of random q, k, v and dout on one device.

    Args:
        heads: (query heads, KV heads, head dim).
    """

    def __init__(self, seq_len: int, cp: int, heads: tuple[int, int, int], device: str, repeat: int) -> None:
        torch.manual_seed(0)
        self.seq_len, self.cp, self.device, self.repeat = seq_len, cp, device, repeat
        self.heads, self.groups, self.dim = heads
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        make = lambda h: torch.randn(1, h, seq_len, self.dim, device=device, dtype=dtype)  # noqa: E731
        self.q, self.k, self.v, self.dout = make(self.heads), make(self.groups), make(self.groups), make(self.heads)
        self.scale = self.dim**-0.5

    def plans(self, case: Case, cp: int, **how) -> list[flexcp.Plan]:
        mask = case.mask.to(self.device)
        return [flexcp.plan(mask, self.seq_len, cp, rank=rank, device=self.device, **how) for rank in range(cp)]

    def one_device(self, case: Case) -> tuple[Row, dict[str, Tensor]]:
        """The kernel alone on the whole sequence, and its results as the reference of every schedule."""
        (plan,) = self.plans(case, 1)
        (stage,) = plan.schedules["mask"].stages
        q, k, v, dout = (plan.shard(x, dim=2) for x in (self.q, self.k, self.v, self.dout))
        ahead = partial(kernel.forward, q, k, v, stage, NO_SCORE, self.scale)
        out, lse = ahead()
        out = out.to(q.dtype)
        back = partial(kernel.backward, q, k, v, out, lse, dout, None, stage, NO_SCORE, self.scale)
        results = {key: x[:, :, : self.seq_len] for key, x in zip(self._like(), (out, *back()[:3]))}
        few = max(3, self.repeat // 4)
        return Row("one device", self.ms(ahead, few), self.ms(back, few)), results

    def schedule(self, name: str, case: Case, reference: dict[str, Tensor], **how) -> Row:
        """The slowest rank of one schedule, alone, with what the others had sent it."""
        plans = self.plans(case, self.cp, **how)
        forwards, backwards, shards = {}, {}, {}
        results = {key: torch.zeros_like(x) for key, x in self._like().items()}

        def rank(link, received) -> None:
            plan = plans[link.rank]
            schedule = plan.schedules["mask"]
            q, k, v, dout = (plan.shard(x, dim=2) for x in (self.q, self.k, self.v, self.dout))
            out, lse = executor.forward(q, k, v, schedule, NO_SCORE, self.scale, link)
            forwards[link.rank] = list(received)
            received.clear()
            out = out.to(q.dtype)
            grads = executor.backward(q, k, v, out, lse, dout, None, schedule, NO_SCORE, self.scale, link)
            backwards[link.rank] = list(received)
            shards[link.rank] = q, k, v, dout, out, lse
            rows, real = plan.positions[0], plan.valid.flatten()
            for key, x in zip(results, (out, *grads[:3])):
                results[key][:, :, rows[real]] = x[:, :, real].to(results[key].dtype)

        in_turn(len(plans), rank)
        row = Row(name)
        for key, x in results.items():
            right = reference[key].float()
            row.errors[key] = float((x.float() - right).abs().max() / right.abs().max())

        def one_forward(r: int) -> None:
            q, k, v, *_ = shards[r]
            link = Replay(len(plans), r, forwards[r])
            executor.forward(q, k, v, plans[r].schedules["mask"], NO_SCORE, self.scale, link)

        def one_backward(r: int) -> None:
            q, k, v, dout, out, lse = shards[r]
            link = Replay(len(plans), r, backwards[r])
            executor.backward(q, k, v, out, lse, dout, None, plans[r].schedules["mask"], NO_SCORE, self.scale, link)

        few = max(1, self.repeat // 7)
        slowest = lambda call: max(shards, key=lambda rank: self.ms(partial(call, rank), few))  # noqa: E731
        slow = {"f": slowest(one_forward), "b": slowest(one_backward)}
        row.forward = self.ms(partial(one_forward, slow["f"]), self.repeat)
        before = self._restart_peak()
        row.backward = self.ms(partial(one_backward, slow["b"]), self.repeat)
        row.memory = (self._peak() - before) / 2**20
        kept = forwards[slow["f"]]
        row.arrived = sum(x.numel() * x.element_size() for x in kept if x is not None) / 2**20
        return row

    def torchs(self, case: Case) -> Row:
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
        times = []
        for rank in sorted({0, self.cp // 2, self.cp - 1}):
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.cp)
            mesh = DeviceMesh(self.device, list(range(self.cp)))
            block_mask = torchs._create_cp_block_mask(mask, 1, 1, self.seq_len, self.seq_len, mesh, balancer)
            dist.destroy_process_group()
            mine = order[rank * local : (rank + 1) * local]
            leaves = [self.q[:, :, mine].contiguous().requires_grad_(), *(x.detach().requires_grad_() for x in (k, v))]
            dout = self.dout[:, :, mine].contiguous()
            call = lambda: compiled(*leaves, block_mask=block_mask, enable_gqa=True)  # noqa: E731, B023
            out = call()
            back = partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
            times.append((self.ms(call, self.repeat), self.ms(back, self.repeat)))
        return Row("torch flex CP", max(f for f, _ in times), max(b for _, b in times))

    def others(self, case: Case) -> dict[str, Callable[[], Row]]:
        """What stands beside flexcp, by its title."""
        found: dict[str, Callable[[], Row]] = {"torch flex CP": partial(self.torchs, case)}
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
        length, mask = self.seq_len, case.mask.to(self.device)
        whole = create_block_mask(mask, None, None, length, length, device=self.device, _compile=True)
        return _PTRRLoadBalancer(whole, self.cp)

    def sdpa(self, name: str, backend: SDPBackend) -> Row:
        """Causal attention of the whole sequence, in time divided by cp."""
        leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
        with sdpa_kernel(backend):
            call = partial(torch.nn.functional.scaled_dot_product_attention, *leaves, is_causal=True, enable_gqa=True)
            out = call()
            back = partial(torch.autograd.grad, out, leaves, self.dout, retain_graph=True)
            few = max(3, self.repeat // 4)
            return Row(name, self.ms(call, few) / self.cp, self.ms(back, few) / self.cp)

    def ms(self, function: Callable[[], object], repeat: int) -> float:
        """The median time of a call, in milliseconds."""
        for _ in range(min(2, repeat - 1)):
            function()
        if self.device == "cpu":
            times = []
            for _ in range(repeat):
                begun = time.perf_counter()
                function()
                times.append((time.perf_counter() - begun) * 1e3)
            return sorted(times)[repeat // 2]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeat)]
        for begin, end in events:
            begin.record()
            function()
            end.record()
        torch.cuda.synchronize()
        return sorted(begin.elapsed_time(end) for begin, end in events)[repeat // 2]

    def _like(self) -> dict[str, Tensor]:
        return {"out": self.q, "dq": self.q, "dk": self.k, "dv": self.v}

    def _restart_peak(self) -> int:
        if self.device == "cpu":
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _peak(self) -> int:
        return 0 if self.device == "cpu" else torch.cuda.max_memory_allocated()


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
    """
    bench = Bench(seq_len, cp, heads, device, repeat)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    console = Console(width=150)
    console.print(
        f"{seq_len:,} tokens, cp {cp}, {heads[0]}:{heads[1]} heads, D {heads[2]}, {bench.q.dtype}; "
        f"{name}, torch {torch.__version__}; median of {repeat}"
    )
    print_tables(bench, mask, schedules, others, console.print)


def print_tables(
    bench: Bench, names: tuple[str, ...], schedules: tuple[str, ...], others: bool, say: Callable[[Any], None]
) -> None:
    """A table a mask, each line measured in turn."""
    for case in cases(bench.seq_len, names):
        one, reference = bench.one_device(case)
        rows = [Row("one device / cp", one.forward / bench.cp, one.backward / bench.cp)]
        ours = partial(bench.schedule, case=case, reference=reference)
        wanted = {schedule: partial(ours, schedule, **SCHEDULES[schedule]) for schedule in schedules}
        if others and bench.device == "cuda":
            wanted |= bench.others(case)
        for title, measure in wanted.items():
            begun = time.perf_counter()
            try:
                rows.append(measure())
            except Exception as error:  # the same one on every rank: a table with a hole says more than none
                say(f"{title}: {type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")
            if bench.device == "cuda":
                torch.cuda.empty_cache()
            say(f"{case.name}, {title}: {time.perf_counter() - begun:.0f} s")
        again, _ = bench.one_device(case)  # the clocks may have moved in between
        rows.append(Row("one device / cp, again", again.forward / bench.cp, again.backward / bench.cp))
        say(table(case, rows, 4 * bench.heads * bench.dim * case.pairs / bench.cp / 1e9))


def table(case: Case, rows: list[Row], gflops: float) -> Table:
    """gflops: of one rank's forward."""
    drawn = Table(title=f"{case.name}: {case.pairs:,} visible pairs")
    drawn.add_column("slowest rank", no_wrap=True)
    times = ("fwd ms", "TFLOP/s", "of one", "bwd ms", "TFLOP/s ", "of one ")
    for column in (*times, "MiB bwd", "MiB in", "exposed", "max error of out, dq, dk, dv"):
        drawn.add_column(column, justify="right")
    ones = [row for row in rows if row.name.startswith("one device")]
    best = min(row.forward for row in ones), min(row.backward for row in ones)
    for row in rows:
        cells = []
        for ms, whole, factor in ((row.forward, best[0], 1.0), (row.backward, best[1], 2.5)):
            cells += [f"{ms:.2f}", f"{factor * gflops / ms:.0f}", f"{whole / ms:.3f}"]
        cells += ["" if x is None else f"{x:,.0f}" for x in (row.memory, row.arrived)]
        cells.append("" if row.exposed is None else f"{row.exposed:.1%}")
        drawn.add_row(row.name, *cells, " ".join(f"{x:.1e}" for x in row.errors.values()))
    return drawn
