"""One record a step: JSON lines in a file, a table or plain lines on the terminal, and whatever else was asked for."""

import dataclasses
import json
import math
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from flexcp.evaluate import Evaluation
from flexcp.loggers import Sink
from flexcp.meter import Record

RECORDS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"


class Reporter:
    """Writes records to `OUT/metrics.jsonl` and shows them; to be entered on rank 0 only.

    A terminal gets a progress bar below one line a step, anything else plain lines.

    Args:
        out: folder for metrics.jsonl; None writes no file.
        steps: of the run.
        log_every: steps between shown lines; the file has every step.
        quiet: show nothing.
        done: the step from which the run goes on; the files keep what they have of steps up to it. 0 begins them anew.
        sinks: that get every record, too.
    """

    def __init__(
        self,
        out: Path | None,
        steps: int,
        log_every: int = 1,
        quiet: bool = False,
        done: int = 0,
        sinks: list[Sink] | None = None,
    ) -> None:
        self.out, self.steps, self.log_every, self.quiet, self.done = out, steps, log_every, quiet, done
        self.sinks = sinks or []
        self._file = None
        self._progress: Progress | None = None

    def __enter__(self) -> "Reporter":
        if self.out is not None:
            for name in (RECORDS, EVALUATIONS):
                _cut(self.out / name, self.done)
            self._file = open(self.out / RECORDS, "a", encoding="utf-8")
        console = Console()
        if console.is_terminal and not self.quiet:
            columns = TextColumn("step {task.completed}/{task.total}"), BarColumn(), TimeRemainingColumn()
            self._progress = Progress(*columns, console=console)
            self._task = self._progress.add_task("train", total=self.steps, completed=self.done)
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._file is not None:
            self._file.close()
        for sink in self.sinks:
            sink.close(failed=kind is not None)

    def add(self, record: Record) -> None:
        """Takes one step's record; the file has it when this returns."""
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        for sink in self.sinks:
            sink.add(record["step"], {name: x for name, x in record.items() if name != "step" and x is not None})
        if self._progress is not None:
            self._progress.update(self._task, completed=record["step"])
        if self.quiet or not (record["step"] % self.log_every == 0 or record["step"] in (self.done + 1, self.steps)):
            return
        line = (
            f"step {record['step']:>{len(str(self.steps))}}/{self.steps}  loss {record['loss']:.5f}  "
            f"grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}  {record['tokens_per_s']:,.0f} tokens/s  "
            f"{record['memory_bytes'] / 2**20:,.0f} MiB"
        )
        if record["mfu"] is not None:
            line += f"  MFU {record['mfu']:.1%}"
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
            with open(self.out / EVALUATIONS, "a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")
        for sink in self.sinks:
            sink.add(step, {"eval_loss": result.loss, "eval_accuracy": result.accuracy})
        if self.quiet:
            return
        line = f"step {step}/{self.steps}  held out: {result}"
        if self._progress is not None:
            self._progress.console.print(line, highlight=False)
        else:
            print(line, flush=True)


def _cut(path: Path, done: int) -> None:
    """Keeps the lines of steps up to `done`; a run that was killed has written more, and perhaps half a line."""
    kept = []
    if done and path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                fields: Any = json.loads(line)
            except ValueError:
                continue
            if isinstance(fields, dict) and fields.get("step", done + 1) <= done:
                kept.append(line + "\n")
    if kept:
        path.write_text("".join(kept), encoding="utf-8")
    else:
        path.unlink(missing_ok=True)
