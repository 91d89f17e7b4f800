"""`flexcp.plan`: what each layout and kind of communication would cost for a mask, without a process group.

flexcp.plan --mask "causal & document:lengths.txt" --seq-len 1M --cp 8 --model llama3-8b
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table as RichTable
from torch import Tensor

from flexcp import balance, cost, masks
from flexcp.blocksource import block_source
from flexcp.errors import UserError
from flexcp.fit import show as show_fit
from flexcp.group import ulysses_ranks
from flexcp.layout import Layout, contiguous
from flexcp.memory import Setup
from flexcp.memoryadvice import Limits
from flexcp.models import get_config
from flexcp.planner import KINDS, named, of_stages
from flexcp.table import Table, table_of
from flexcp.usermask import load_mask

# Indices of tokens are int32 in the kernels; and so many blocks make tables of 2 GiB for each head.
_MOST_TOKENS, _MOST_BLOCKS = 2**31 - 1, 1 << 17
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Returns its exit code: 0, or 2 after one sentence for a wrong use."""
    args = _parser().parse_args(argv)
    try:
        check_numbers(args)
        if args.memory:
            show_memory(args)
        if args.mask is None:
            if not args.memory:
                raise UserError("--mask says what is to be planned, and --memory asks for the memory: give one of them")
            return 0
        report = make_report(args)
        if args.png is not None:
            draw(args, report)
    except ValueError as error:
        print(f"flexcp.plan: error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({name: value for name, value in report.items() if not name.startswith("_")}, indent=1))
    else:
        show(report, Console(width=None if sys.stdout.isatty() else 140))
    return 0


def check_numbers(args: argparse.Namespace) -> None:
    """Raises UserError for numbers that nothing can be planned with, and a picture of an unknown kind."""
    if args.cp < 1 or args.block_size < 1:
        raise UserError(f"--cp and --block-size are at least 1, got {args.cp} and {args.block_size}")
    if args.link_gb_s is not None and not 0 < args.link_gb_s < math.inf:
        raise UserError(f"--link-gb-s is a finite number above 0, got {args.link_gb_s}")
    for flag, gib in (("--device-gib", args.device_gib), ("--host-gib", args.host_gib)):
        if not 0 <= gib < math.inf:
            raise UserError(f"{flag} is a finite number, at least 0, got {gib}")
    if args.memory and args.json:
        raise UserError("--memory prints tables, which --json has no place for: leave one of them off")
    if args.png is not None and args.png.suffix not in (".png", ".svg"):
        raise UserError(f"--png writes .png or .svg, got {args.png.name!r}")


def show_memory(args: argparse.Namespace) -> None:
    """Prints what a rank of a full fine-tuning in bf16 needs, and what would fit (--memory)."""
    setup = Setup(
        get_config(args.model),
        parse_size(args.seq_len),
        cp=args.cp,
        element_bytes=2,
        optimizer="adamw8bit",
        step_in_backward=True,
    )
    limits = Limits(int(args.device_gib * 2**30), int(args.host_gib * 2**30))
    show_fit(setup, args.model, limits, Console(width=None if sys.stdout.isatty() else 120))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("flexcp.plan", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--mask",
        action="append",
        help="an expression over the mask library; document:FILE takes document lengths from a text file, from its "
        "beginning again where they do not fill the sequence; or module:function. Once for each mask of the model",
    )
    parser.add_argument("--seq-len", required=True, help="tokens; 128K is 131072, 1M is 1048576")
    parser.add_argument("--cp", type=int, required=True, help="ranks of the group")
    parser.add_argument("--model", default="llama3-8b", help="whose attention: heads, KV heads, head_dim, layers")
    parser.add_argument("--block-size", type=int, default=128, help="tokens in a block")
    parser.add_argument("--device", default="h200", help="whose measured rates (flexcp/devices/)")
    parser.add_argument("--kernel", default="flash", help="which kernel's rates")
    parser.add_argument("--link-gb-s", type=float, help="10^9 bytes a second that a rank receives; default: nominal")
    parser.add_argument("--json", action="store_true", help="print JSON in place of the table")
    parser.add_argument(
        "--memory",
        action="store_true",
        help="what one rank needs in memory for a full fine-tuning in bf16 with 8-bit AdamW stepped in backward, what "
        "options would fit, and how long a sequence may become; flexcp.train --dry-run says it of any run",
    )
    parser.add_argument("--device-gib", type=float, default=139.0, help="GiB of one rank's device, for --memory")
    parser.add_argument("--host-gib", type=float, default=0.0, help="GiB of the host for one rank, for --memory")
    parser.add_argument("--png", type=Path, help="draw the first mask with the owners of the chosen plan (.png, .svg)")
    return parser


def make_report(args: argparse.Namespace) -> dict:
    """Everything that is shown; keys that begin with _ are for drawing only.

    Raises:
        ValueError: what is wrong with the arguments.
    """
    seq_len = parse_size(args.seq_len)
    if seq_len > _MOST_BLOCKS * args.block_size:
        raise UserError(
            f"--seq-len {seq_len} in blocks of {args.block_size} makes more than {_MOST_BLOCKS} blocks, whose table "
            "would not fit: pass a larger --block-size"
        )
    if args.cp > (blocks := -(-seq_len // args.block_size)):
        raise UserError(
            f"--seq-len {seq_len} has {blocks} block(s) of {args.block_size} tokens, and --cp {args.cp} ranks cannot "
            "all have one: lower --cp or --block-size"
        )
    config = get_config(args.model)
    shape = cost.Shape(config.num_heads, config.num_kv_heads, config.head_dim)
    model = cost.CostModel(shape, cost.calibrated(args.device, args.kernel, seq_len, args.link_gb_s))
    made = [read_mask(text, seq_len) for text in args.mask]
    start = time.perf_counter()
    blocks = args.block_size, args.block_size
    tables = [table_of(source_of(mask, seq_len, blocks, config.num_heads), torch.device("cpu")) for mask in made]
    layout, kind, groups, sharing = balance.choose_sharing("auto", seq_len, args.cp, blocks, lambda: tables, model)
    planning_s = time.perf_counter() - start
    chosen = layout, named(kind, sharing, args.cp)
    rows = []
    for one, comm, ulysses in every_plan(seq_len, args.cp, args.block_size, tables, model, chosen[0]):
        row = _row(balance.evaluate(one, of_stages(comm), tables, model, ulysses), tables, model, ulysses)
        rows.append(row | {"comm": comm, "chosen": (one, comm) == chosen})
    return {
        "mask": args.mask,
        "seq_len": seq_len,
        "cp": args.cp,
        "model": args.model,
        "num_layers": config.num_layers,
        "device": args.device,
        "kernel": args.kernel,
        "forward_tflops": model.device.forward_tflops,
        "backward_tflops": model.device.backward_tflops,
        "link_gb_s": model.device.bytes_per_s(args.cp) / 1e9,
        "planning_s": planning_s,
        "chosen": {"layout": layout.name, "comm": chosen[1], "head_groups": groups, "ulysses": sharing},
        "plans": rows,
        "_mask": made[0],
        "_layout": layout.divided(sharing),
    }


def every_plan(
    seq_len: int, cp: int, block_size: int, tables: Sequence[Table], model: cost.CostModel, chosen: Layout
) -> Iterator[tuple[Layout, str, int]]:
    """Layout, comm and ranks that share heads: none, all, and as many as by default beside another kind."""
    weights = balance.work_weights(tables, model)
    shared = ulysses_ranks("ulysses+gather", None, cp, model.one.num_kv_heads)
    for ulysses in sorted({1, shared, cp}):
        few, align = cp // ulysses, math.lcm(block_size, ulysses)
        if model.one.num_heads % ulysses:
            continue
        if few == 1 < cp:
            yield contiguous(seq_len, 1, align), "ulysses", ulysses
            continue
        layouts = balance.candidates(seq_len, few, align, tables, weights)
        if chosen.cp_size == few and chosen not in layouts:
            layouts.append(chosen)
        for layout, kind in itertools.product(layouts, KINDS):
            yield layout, named(kind, ulysses, cp), ulysses


def _row(candidate: balance.Candidate, tables: Sequence[Table], model: cost.CostModel, ulysses: int) -> dict:
    heads, layout = model.one.num_kv_heads, candidate.layout
    whole = max(1, layout.seq_len * heads * len(tables))
    local_heads = max(1, heads // ulysses)
    # Beside what its stages receive: with ulysses, the other ranks' rows of its own heads.
    swapped = layout.local_len * (ulysses - 1) // ulysses * local_heads
    buffer = balance.buffer_rows(layout, candidate.comm, tables, heads) if layout.cp_size > 1 else 0
    return {
        "layout": layout.name,
        "ulysses": ulysses,
        "work_max_over_mean": float(candidate.pairs.max() / max(1.0, candidate.pairs.mean())),
        "received_bytes_max": int(candidate.cost.kv_bytes.max() + candidate.cost.switched_bytes),
        "received_bytes_mean": float(candidate.cost.kv_bytes.mean() + candidate.cost.switched_bytes),
        "fraction_of_all_kv": float((candidate.kv_rows.mean() + swapped * len(tables)) / whole),
        "kv_buffer_bytes": (buffer * local_heads // heads + swapped) * model.kv_row_bytes(),
        "forward_ms": candidate.cost.forward_s * 1e3,
        "backward_ms": candidate.cost.backward_s * 1e3,
    }


def source_of(mask: Callable, seq_len: int, blocks: tuple[int, int], num_heads: int):
    """The mask's blocks; a plain function that tells heads apart gets the model's."""
    try:
        return block_source(mask, seq_len, blocks)
    except ValueError as error:
        if "heads=" not in str(error):
            raise
        return block_source(mask, seq_len, blocks, heads=num_heads)


def read_mask(text: str, seq_len: int) -> Callable:
    """The mask of one --mask value."""
    files = re.findall(r"\bdocument:([^\s&|^~()]+)", text)
    if not files:
        source = load_mask(text)
        mask = source.make(torch.zeros(1, seq_len, dtype=torch.int64))
        if source.varies(seq_len):
            how = "write document:FILE" if source.function is None else "name a function that takes seq_len alone"
            raise UserError(f"--mask {text!r} needs the lengths of the documents, which a plan is made for: {how}")
        return mask
    bound = {f"lengths_{i}": read_documents(Path(name), seq_len) for i, name in enumerate(files)}
    for name, file in zip(bound, files):
        text = text.replace(f"document:{file}", f"document({name})", 1)
    return masks.parse(text, seq_len=seq_len, **bound)


def read_documents(path: Path, seq_len: int) -> Tensor:
    """The document of each token, [seq_len] int64, from a file of lengths in tokens, separated by white space."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--mask names the document lengths {path}, which cannot be read: {error}") from None
    wrong = next((word for word in words if not word.isdecimal() or int(word) < 1), None)
    if wrong is not None or not words:
        what = "nothing" if wrong is None else repr(wrong[:40])
        raise UserError(f"{path} holds document lengths, whole numbers of tokens above 0, but has {what}")
    lengths = torch.tensor([min(int(word), seq_len) for word in words])
    lengths = lengths.repeat(-(-seq_len // int(lengths.sum())))
    # Documents past the end are not needed, and neither is a table of their tokens.
    needed = int(torch.searchsorted(lengths.cumsum(0), seq_len)) + 1
    return torch.arange(needed).repeat_interleave(lengths[:needed])[:seq_len]


def parse_size(text: str) -> int:
    """Tokens from 131072, 128K or 1M.

    >>> parse_size("128K"), parse_size("1M"), parse_size("57826")
    (131072, 1048576, 57826)
    """
    found = re.fullmatch(r"(\d+)([KM]?)", text.strip().upper())
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if size < 1:
        raise UserError(f"--seq-len is a number of tokens such as 131072, 128K or 1M, got {text!r}")
    if size > _MOST_TOKENS:
        raise UserError(f"--seq-len is at most {_MOST_TOKENS} tokens, got {text!r}")
    return size


def show(report: dict, console: Console) -> None:
    """Prints the report as a table."""
    device = f"{report['forward_tflops']:g}/{report['backward_tflops']:g} TFLOP/s ({report['kernel']})"
    console.print(
        f"{', '.join(report['mask'])}: {report['seq_len']:,} tokens over {report['cp']} ranks, one layer of "
        f"{report['model']} on {report['device']}: {device}, {report['link_gb_s']:g} GB/s per rank",
        markup=False,
        highlight=False,
    )
    table = RichTable("", "layout", "comm")
    names = ("work max/mean", "received/rank", "of all KV", "KV buffer", "forward ms", "backward ms")
    for name in names:
        table.add_column(name, justify="right")
    for row in report["plans"]:
        table.add_row(
            "->" if row["chosen"] else "",
            row["layout"],
            row["comm"],
            f"{row['work_max_over_mean']:.3f}",
            human(row["received_bytes_max"]),
            f"{row['fraction_of_all_kv']:.1%}",
            human(row["kv_buffer_bytes"]),
            f"{row['forward_ms']:.2f}",
            f"{row['backward_ms']:.2f}",
            style="bold" if row["chosen"] else None,
        )
    console.print(table)
    chosen = report["chosen"]
    console.print(
        f"-> {chosen['layout']} over {chosen['comm']} in {chosen['head_groups']} head groups, chosen in "
        f"{report['planning_s']:.2f} s; received: the most of any rank, bf16; of all KV: the mean; ms: slowest rank",
        markup=False,
        highlight=False,
    )


def human(size: float) -> str:
    """Bytes for people: 1.5 MiB."""
    power = min(4, int(math.log(size, 1024))) if size >= 1 else 0
    return f"{size / 1024**power:.{1 if power else 0}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def draw(args: argparse.Namespace, report: dict) -> None:
    """Writes the picture of --png."""
    layout = report["_layout"]
    drawing = masks.draw(report["_mask"], layout.seq_len, layout)
    try:
        drawing.save(args.png, cell=max(1, 768 // len(drawing.classes)))
    except OSError as error:
        raise UserError(f"--png {args.png} cannot be written: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
