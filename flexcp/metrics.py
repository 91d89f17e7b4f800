"""One record a step: JSON lines in a file, a table or plain lines on the terminal."""

import dataclasses
import json
import math
import resource
import sys
from pathlib import Path
from types import TracebackType
from typing import TypedDict

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flexcp.evaluate import Evaluation


class Record(TypedDict):
    """What a step leaves behind. Numbers are those of the whole group and the same at any group size."""

    step: int  # from 1
    loss: float  # cross entropy in nats, the mean over all tokens that have a label
    tokens: int  # tokens that have a label in this step; padding is not counted, and nothing twice
    tokens_seen: int  # their sum so far
    tokens_per_s: float  # tokens / step_s
    grad_norm: float  # of the summed gradients, before clipping
    lr: float
    memory_bytes: int  # the largest peak of any rank: resident on a CPU, allocated on a GPU
    step_s: float  # wall-clock seconds, data and plan included


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


class Reporter:
    """Writes records to `OUT/metrics.jsonl` and shows them; to be entered on rank 0 only.

    A terminal gets a progress bar below one line a step, anything else plain lines.

    Args:
        out: folder for metrics.jsonl, which is begun anew; None writes no file.
        steps: of the run.
        log_every: steps between shown lines; the file has every step.
        quiet: show nothing.
    """

    def __init__(self, out: Path | None, steps: int, log_every: int = 1, quiet: bool = False) -> None:
        self.out, self.steps, self.log_every, self.quiet = out, steps, log_every, quiet
        self._file = None
        self._progress: Progress | None = None

    def __enter__(self) -> "Reporter":
        if self.out is not None:
            self._file = open(self.out / "metrics.jsonl", "w", encoding="utf-8")
            (self.out / "eval.jsonl").unlink(missing_ok=True)
        console = Console()
        if console.is_terminal and not self.quiet:
            columns = TextColumn("step {task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn()
            self._progress = Progress(*columns, console=console)
            self._task = self._progress.add_task("train", total=self.steps)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()

    def add(self, record: Record) -> None:
        """Takes one step's record; the file has it when this returns."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        if self._progress is not None:
            self._progress.update(self._task, completed=record["step"])
        if self.quiet or not (record["step"] % self.log_every == 0 or record["step"] in (1, self.steps)):
            return
        line = (
            f"step {record['step']:>{len(str(self.steps))}}/{self.steps}  loss {record['loss']:.5f}  "
            f"grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  {record['tokens_per_s']:,.0f} tokens/s  "
            f"{record['memory_bytes'] / 2**20:,.0f} MiB"
        )
        if self._progress is not None:
            self._progress.console.print(line, highlight=False)
        else:
            print(line, flush=True)

    def add_evaluation(self, step: int, result: Evaluation) -> None:
        """Takes the held-out loss after a step (from 1): a line in `OUT/eval.jsonl`, and one that is shown.

        A bucket without tokens has no loss: its numbers are null.
        """
        if self.out is not None:
            fields = {"step": step, **dataclasses.asdict(result)}
            for part in (fields, *fields["buckets"]):
                part.update({name: None for name in ("loss", "accuracy") if math.isnan(part[name])})
            with open(self.out / "eval.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")
        if self.quiet:
            return
        line = f"step {step}/{self.steps}  held out: {result}"
        if self._progress is not None:
            self._progress.console.print(line, highlight=False)
        else:
            print(line, flush=True)
