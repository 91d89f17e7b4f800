"""The demo: one model, one seed, one text, trained at cp 1, 2 and 4 through the trainer; scripts/demo runs it.

Each run is the command line that a user would type. The table is read back from the metrics that it wrote.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "runs" / "demo"
# The text is the engine's own source.
FLAGS = ["--model", "llama3-debug", "--seq-len", "2048", "--batch", "1", "--steps", "20", "--seed", "0"]
FLAGS += ["--dtype", "float32", "--data", str(ROOT / "flexcp")]
RUNS = {"cp 1": (1, "auto"), **{f"cp {cp}\n{comm}": (cp, comm) for cp in (2, 4) for comm in ("gather", "ring")}}
TOLERANCE = 1e-4


def train(cp: int, comm: str) -> list[float]:
    """The loss of each step; the trainer has refused any that is not finite."""
    out = OUT / f"cp-{cp}-{comm}"
    command = [sys.executable, "-m", "flexcp.train", *FLAGS, "--cp", str(cp), "--comm", comm, "--out", str(out)]
    # On the CPU everywhere, in fp32 as the limit of the comparison supposes: the trainer is not shown any GPU.
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}demo: this failed: {' '.join(command)}")
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def differences(losses: dict[str, list[float]]) -> list[float]:
    """Per step, the largest relative difference of any run to the first one."""
    first, *others = losses.values()
    return [max(abs(x - one) / abs(one) for x in more) for one, *more in zip(first, *others, strict=True)]


def table(losses: dict[str, list[float]], seconds: dict[str, float]) -> Table:
    """A row a step, a column a run."""
    result = Table(box=box.SIMPLE_HEAD, title="loss of each step", show_footer=True, pad_edge=False)
    result.add_column("step", "time", justify="right")
    for name in losses:
        result.add_column(name, f"{seconds[name]:.0f} s", justify="right")
    result.add_column("largest rel.\ndifference", justify="right")
    for step, (row, gap) in enumerate(zip(zip(*losses.values()), differences(losses)), start=1):
        result.add_row(str(step), *(f"{loss:.6f}" for loss in row), f"{gap:.1e}")
    return result


def verdict(losses: dict[str, list[float]]) -> tuple[bool, str]:
    """Whether the runs agree and learn, and the sentence that says so."""
    worst = max(differences(losses))
    agree = worst <= TOLERANCE
    early, late = ([sum(run[part]) / 5 for run in losses.values()] for part in (slice(5), slice(-5, None)))
    fall = all(after < before for before, after in zip(early, late))
    return agree and fall, (
        f"{'Agrees' if agree else 'DOES NOT AGREE'}: every loss is within {worst:.1e} of cp 1, relative "
        f"(limit {TOLERANCE:.0e}).\n"
        f"{'Falls' if fall else 'DOES NOT FALL'}: mean loss at cp 1, first five steps {early[0]:.3f}, "
        f"last five {late[0]:.3f}."
    )


def main() -> int:
    console = Console(highlight=False)
    losses, seconds = {}, {}
    for name, (cp, comm) in RUNS.items():
        words = " ".join(name.split())
        began = time.monotonic()
        with console.status(f"training {words}"):
            losses[name] = train(cp, comm)
        seconds[name] = time.monotonic() - began
        console.print(f"trained {words:<12} {seconds[name]:5.1f} s")
    console.print(table(losses, seconds))
    good, words = verdict(losses)
    console.print(words, soft_wrap=True)
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
