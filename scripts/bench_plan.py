"""How long planning takes, and what the layouts cost: `scripts/bench plan`."""

import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import flexcp
from flexcp import balance, masks
from flexcp.blocksource import block_source
from flexcp.cost import CostModel, Device
from flexcp.table import table_of


def long_tailed(seq_len: int, median: float, sigma: float, seed: int) -> Tensor:
    """Documents of log-normal lengths, at most 131,072, that fill the sequence: the id of each token."""
    lengths, generator = [], np.random.default_rng(seed)
    while (left := seq_len - sum(lengths)) > 0:
        lengths.append(min(left, 1 << 17, max(1, int(generator.lognormal(np.log(median), sigma)))))
    return torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))


def documents(seq_len: int, median: float, sigma: float, seed: int = 0) -> masks.Mask:
    """Packed documents, causal within each."""
    return masks.causal() & masks.document(long_tailed(seq_len, median, sigma, seed))


def _times(function: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Seconds on the clock and of this process, the least of each."""
    taken = []
    for _ in range(repeat):
        clock, own = time.perf_counter(), time.process_time()
        function()
        taken.append((time.perf_counter() - clock, time.process_time() - own))
    return min(wall for wall, _ in taken), min(cpu for _, cpu in taken)


def plan(repeat: int = 5) -> None:
    """How long planning takes, and what each layout costs at 524,288 tokens on 64 ranks.

    Args:
        repeat: of which the fastest counts.
    """
    torch.set_num_threads(1)
    console = Console(width=120)
    table = Table(title="planning, one rank's: layout, communication and block masks (CPU, one thread)")
    for name in ("mask", "tokens", "cp", "", "s", "CPU s"):
        table.add_column(name, justify="right", no_wrap=True)
    for seq_len, cp in ((131_072, 8), (1 << 20, 64)):
        every = {
            "causal": masks.causal(),
            "causal & sliding_window(4096)": masks.causal() & masks.sliding_window(4096),
            "causal & document": documents(seq_len, 8000, 1.5),
        }
        for name, mask in every.items():
            wall, cpu = _times(lambda: flexcp.plan(mask, seq_len, cp, rank=cp // 3), repeat)  # noqa: B023
            table.add_row(name, f"{seq_len:,}", str(cp), "", f"{wall:.3f}", f"{cpu:.3f}")
        first = flexcp.plan(every["causal & document"], seq_len, cp, rank=cp // 3)
        packings = [documents(seq_len, 8000, 1.5, seed) for seed in range(1, 6)]
        each = [_times(lambda: flexcp.plan(mask, seq_len, cp, rank=cp // 3, like=first), repeat) for mask in packings]  # noqa: B023
        wall, cpu = (max(times) for times in zip(*each))
        table.add_row("causal & document", f"{seq_len:,}", str(cp), "anew, worst of 5", f"{wall:.3f}", f"{cpu:.3f}")
    console.print(table)

    seq_len, cp = 1 << 19, 64
    judge = CostModel(device=Device(forward_tflops=500.0, link_gb_s=45.0, node_gb_s=45.0))
    table = Table(title="524,288 tokens, 64 ranks, exchange: mean share of all KV / max : mean work / ms forward")
    columns = {
        "causal": masks.causal(),
        "window 4K": masks.causal() & masks.sliding_window(4096),
        "documents": documents(seq_len, 60_000, 1.0),
        "short documents": documents(seq_len, 500, 1.2),
    }
    rows: dict[str, list[str]] = {}
    for mask in columns.values():
        seen = [table_of(block_source(mask, seq_len, (128, 128)), torch.device("cpu"))]
        auto, *_ = balance.choose("auto", "exchange", seq_len, cp, (128, 128), lambda: seen, judge)  # noqa: B023
        layouts = {name: balance.make(name, seq_len, cp, 128, seen) for name in balance.BALANCES[1:]} | {"auto": auto}
        for name, layout in layouts.items():
            found = balance.evaluate(layout, "exchange", seen, judge)
            share = found.kv_rows.mean() / judge.shape.num_kv_heads / seq_len
            load = found.pairs.max() / found.pairs.mean()
            rows.setdefault(name, []).append(f"{share:.3f} / {load:.2f} / {1e3 * found.cost.forward_s:.2f}")
    for name in ("layout", *columns):
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
