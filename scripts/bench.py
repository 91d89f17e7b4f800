"""Measurements that docs/benchmarks.md quotes.

scripts/bench blockmask [--device cuda]    one rank's BlockMask, at growing lengths
scripts/bench attention                    one GPU stands for each rank in turn (bench_attention.py)
scripts/bench fp8                          a layer's products in bf16 and fp8 (bench_fp8.py)
scripts/bench plan                         how long planning takes, and what layouts cost (bench_plan.py)
scripts/bench training COMMAND             the trainer on N ranks: equal, throughput, longest (bench_training.py)
"""

import multiprocessing as mp
import sys
import time
from pathlib import Path

import bench_training
import torch
import tyro
from bench_attention import attention
from bench_fp8 import fp8
from bench_plan import plan
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flexcp import masks
from flexcp.blockmask import local_block_mask
from flexcp.blocksource import block_source
from flexcp.layout import head_tail


def documents(seq_len: int) -> Tensor:
    """Ids of packed documents of 100 to 40,000 tokens, seeded."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(100, 40_000, (seq_len // 5_000 + 2,), generator=generator)
    lengths[-1] = seq_len
    return torch.repeat_interleave(torch.arange(lengths.numel()), lengths)[:seq_len]


def _restart_peak(device: str) -> int:
    """Forgets the highest memory so far; returns what is in use now, in bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else _status_bytes("VmHWM")


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _ours(seq_len: int, block: int, cp: int, device: str) -> tuple[float, int, int]:
    mask = (masks.causal() & masks.document(documents(seq_len))).to(device)
    layout, source = head_tail(seq_len, cp, block), block_source(mask, seq_len, (block, block), device=device)
    q_start = layout.starts(cp - 1, block).to(device)
    kv_start = torch.cat([layout.starts(rank, block) for rank in range(cp)]).to(device)
    before = _restart_peak(device)
    # The second of two on a GPU, whose first call loads the library.
    for _ in range(2 if device == "cuda" else 1):
        begun = time.perf_counter()
        classes, mask_mod = source.classes(q_start, kv_start), source.local_mask_mod(q_start, kv_start)
        local_block_mask(classes, source.block_size, mask_mod)
        if device == "cuda":
            torch.cuda.synchronize()
        took = time.perf_counter() - begun
    return took, _peak_bytes(device) - before, q_start.numel() * kv_start.numel()


def _torchs(seq_len: int, block: int, cp: int, device: str) -> tuple[float, int, int]:
    mask = (masks.causal() & masks.document(documents(seq_len))).to(device)
    before, begun = _restart_peak(device), time.perf_counter()
    create_block_mask(mask, None, None, seq_len, seq_len, device=device, BLOCK_SIZE=block)
    return time.perf_counter() - begun, _peak_bytes(device) - before, (seq_len // block) ** 2


def _alone(function, *args) -> tuple[float, int, int]:
    """In a process of its own, so that its peak memory is its own."""
    with mp.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def blockmask(device: str = "cpu") -> None:
    """One rank's BlockMask of causal & document, at growing lengths, with torch's create_block_mask beside it.

    Args:
        device: cpu or cuda.
    """
    table = Table(title=f"causal & document: BlockMask of the last of cp ranks ({device}, head_tail)")
    for name in ("S", "B", "cp", "rows x columns", "flexcp s", "extra MiB", "torch s", "extra MiB "):
        table.add_column(name, justify="right", no_wrap=True)
    for seq_len, block, cp in (
        (8_192, 128, 8),
        (16_384, 128, 8),
        (131_072, 128, 8),
        (524_288, 128, 8),
        (1_048_576, 128, 8),
        (1_048_576, 128, 64),
        (16_777_216, 512, 64),
    ):
        took, extra, blocks = _alone(_ours, seq_len, block, cp, device)
        whole = ["-", "-"]
        if seq_len <= 16_384:  # about 10 bytes for every pair of tokens
            torch_took, torch_extra, _ = _alone(_torchs, seq_len, block, cp, device)
            whole = [f"{torch_took:.3f}", f"{torch_extra / 2**20:.0f}"]
        table.add_row(f"{seq_len:,}", str(block), str(cp), f"{blocks:,}", f"{took:.3f}", f"{extra / 2**20:.0f}", *whole)
    Console(width=100).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["training"]:  # its own arguments go to the trainer
        sys.exit(bench_training.main(sys.argv[2:]))
    commands = {"blockmask": blockmask, "attention": attention, "fp8": fp8, "plan": plan}
    tyro.extras.subcommand_cli_from_dict(commands)
