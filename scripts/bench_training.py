"""Training as users start it, on N GPUs of this host or on gloo ranks of its CPU: `scripts/bench training`.

python scripts/bench_training.py equal --grid 1 cp2 cp2:ring -- --model llama3-debug --steps 200
python scripts/bench_training.py throughput --grid cp8 -- --model llama3-8b --dtype bfloat16 --seq-len 131072
python scripts/bench_training.py longest --grid cp8 -- --model llama3-8b --dtype bfloat16 --mask "sliding_window(4096)"

What follows `--` goes to flexcp.train as it is. A grid is written cp4xdp2: so many ranks of each axis (cp, dp, rep,
tp), 1 for one rank alone, and after a colon how keys travel (cp2:ring). All that is shown comes from the metrics.jsonl
and config.yaml that a run has left in `--out`, beside what it printed.
"""

import multiprocessing as mp
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import tyro
from bench_runs import GIB, Run, Runs, grid_flags
from rich.console import Console
from rich.table import Table

from flexcp import launch
from flexcp.commandline import parse
from flexcp.errors import UserError
from flexcp.fit import limits_of, setup_of
from flexcp.memory import Setup
from flexcp.memoryadvice import Limits, advise, flags, longest
from flexcp.train import grid_of

LIMITS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}  # of a loss, relative


@dataclass(frozen=True)
class Equal(Runs):
    """The losses of the same steps on several grids, beside those of the first; fails where they differ too much."""

    limit: float | None = None
    """Of the relative difference; by default 1e-4 in float32 and 2e-2 in bfloat16."""

    rows: int = 20
    """Steps that are printed; all are compared."""

    def run(self, given: list[str]) -> int:
        ends, runs = time.monotonic() + self.limit_s, dict[str, Run]()
        for grid in self.grid:
            runs[grid] = self.train(grid, given + grid_flags(grid), ends)
            print(f"{grid}: {runs[grid].failure or 'trained'}, {runs[grid].seconds:.0f} s", flush=True)
        steps = parse(given).steps
        losses = {grid: [record["loss"] for record in run.records] for grid, run in runs.items()}
        differences = [(max(row) - min(row)) / abs(row[0]) for row in zip(*losses.values())]
        table = Table(title="loss of each step")
        for name in ("step", *self.grid, "largest rel. difference"):
            table.add_column(name, justify="right", no_wrap=True)
        shown = set(range(0, len(differences), -(-steps // self.rows))) | {len(differences) - 1}
        for step, (row, gap) in enumerate(zip(zip(*losses.values()), differences)):
            if step in shown:
                table.add_row(str(step + 1), *(f"{loss:.6f}" for loss in row), f"{gap:.1e}")
        Console(width=max(100, 24 + 14 * len(self.grid))).print(table)
        limit = self.limit if self.limit is not None else LIMITS[parse(given).dtype]
        whole = len(differences) == steps and not any(run.failure for run in runs.values())
        worst = max(differences, default=float("inf"))
        equal = whole and worst <= limit
        print(
            f"{'Equal' if equal else 'NOT EQUAL'}: {len(differences)} of {steps} steps, {worst:.1e} (limit {limit:.0e})"
        )
        return 0 if equal else 1


@dataclass(frozen=True)
class Throughput(Runs):
    """Seconds a step, tokens a second, MFU and memory of each grid."""

    skip: int = 1
    """First steps that do not count, since they compile; the median of the others is shown."""

    def run(self, given: list[str]) -> int:
        ends, failures = time.monotonic() + self.limit_s, []
        table = Table(title=shlex.join(given))
        for name in ("grid", "steps", "s/step", "tokens/s", "a device", "MFU", "MFU, S x S", "waits", "data+plan"):
            table.add_column(name, justify="right")
        for name in ("peak GiB", "predicted", "off by", "losses"):
            table.add_column(name, justify="right", no_wrap=True)
        for grid in self.grid:
            run = self.train(grid, given + grid_flags(grid), ends)
            print(f"{grid}: {run.failure or 'trained'}, {run.seconds:.0f} s", flush=True)
            failures += [grid] if run.failure else []
            if run.records:
                table.add_row(grid, *self.cells(run))
        Console(width=150).print(table)
        print("waits: attention's exposed communication, of the step; peak: of any rank; predicted: an upper bound")
        return 1 if failures else 0

    def cells(self, run: Run) -> list[str]:
        counted = run.records[self.skip :] or run.records
        mean = {name: statistics.median(record[name] or 0.0 for record in counted) for name in _NUMBERS}
        peak, predicted = max(record["memory_bytes"] for record in run.records), run.predicted(self.device)
        return [
            f"{len(counted)}",
            f"{mean['step_s']:.3f}",
            f"{mean['tokens_per_s']:,.0f}",
            f"{mean['tokens_per_s_per_device']:,.0f}",
            *(f"{mean[name]:.1%}" if mean[name] else "-" for name in ("mfu", "mfu_full")),
            f"{mean['comm_wait_s'] / mean['step_s']:.1%}",
            f"{(mean['data_s'] + mean['plan_s']) / mean['step_s']:.1%}",
            f"{peak / GIB:.2f}",
            f"{predicted / GIB:.2f}",
            f"{predicted / peak - 1:+.1%}" if self.device == "cuda" else "-",  # a CPU's peak is all that is resident
            f"{run.records[0]['loss']:.3f} -> {run.records[-1]['loss']:.3f}",
        ]


_NUMBERS = ("step_s", "tokens_per_s", "tokens_per_s_per_device", "mfu", "mfu_full", "comm_wait_s", "data_s", "plan_s")


@dataclass(frozen=True)
class Longest(Runs):
    """The longest sequence that trains: the planner's answer first, then longer or shorter ones.

    Each length is tried with the options that the planner would turn on for it, even where it says that none do.
    """

    steps: int = 2
    """Of each trial; the optimizer's states are there from the end of the first."""

    tries: int = 6
    """Lengths, at most."""

    most: int = 1 << 30
    """A length that is not gone beyond."""

    def run(self, given: list[str]) -> int:
        ends, (grid,) = time.monotonic() + self.limit_s, self.grid[-1:]
        argv = given + grid_flags(grid)
        with mp.get_context("spawn").Pool(1) as pool:  # what looks at a GPU also takes memory of it
            setup, limits, answer = pool.apply(planned, (argv, self.device))
        print(
            f"planner: {answer:,} tokens; {limits.device / GIB:.1f} GiB a device, {limits.host / GIB:.1f} on the host"
        )

        def fits(seq_len: int) -> bool | None:
            chosen = flags(setup, advise(replace(setup, seq_len=seq_len), limits).setup)
            more = ["--seq-len", str(seq_len), "--steps", str(self.steps), "--memory", "unchecked"]
            run = self.train(f"{grid}-{seq_len}", [*argv, *more, *shlex.split(chosen)], ends)
            line = f"{seq_len:,} tokens ({chosen or 'as given'}): {run.failure or 'trains'}, {run.seconds:.0f} s"
            if not run.failure:
                peak, predicted = run.records[-1]["memory_bytes"], run.predicted(self.device)
                line += f", {run.records[-1]['step_s']:.2f} s/step, peak {peak / GIB:.2f} GiB of {predicted / GIB:.2f}"
            print(line, flush=True)
            return True if not run.failure else False if run.failure == "out of memory" else None

        unit = 256 * setup.cp
        low, high = search(min(answer, self.most) or unit, unit, fits, self.tries, self.most)
        print(f"longest that trains: {low:,} tokens; shortest that does not: {f'{high:,}' if high else 'not reached'}")
        return 0 if low else 1


def planned(argv: list[str], device: str) -> tuple[Setup, Limits, int]:
    """What the run's memory depends on, what there is, and the planner's longest sequence."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    config = parse(argv)
    grid = grid_of(config, None)
    place = launch.pick_device(launch.World(0, grid.size, 0, grid.size))
    setup, limits = setup_of(config, grid, place), limits_of(place, grid.size)
    return setup, limits, longest(setup, limits)[0]


def search(first: int, unit: int, fits: Callable[[int], bool | None], tries: int, most: int) -> tuple[int, int | None]:
    """The longest of the tried lengths that fits and the shortest that does not (None: all did), multiples of unit.

    >>> search(1000, 10, lambda n: n <= 1200, 20, 10_000)
    (1200, 1210)
    """
    low, high, length = 0, None, max(unit, first // unit * unit)
    for _ in range(tries):
        outcome = fits(length)
        if outcome is None:  # neither: it failed for another reason
            break
        low, high = (length, high) if outcome else (low, length)
        wanted = low * 9 // 8 + unit if high is None else high * 8 // 9 if not low else (low + high) // 2
        length = min(wanted, most) // unit * unit
        if length in (0, low, high):
            break
    return low, high


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    at = argv.index("--") if "--" in argv else len(argv)
    commands = {"equal": Equal, "throughput": Throughput, "longest": Longest}
    command: Runs = tyro.extras.subcommand_cli_from_dict(commands, args=argv[:at], prog="scripts/bench training")
    try:
        return command.run(argv[at + 1 :])
    except UserError as error:
        print(f"bench training: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
