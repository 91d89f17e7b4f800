"""What a run did, event by event: a trace of some steps for each rank, and a snapshot of a GPU's memory."""

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from flexcp import compat
from flexcp.errors import UserError

TRACES, SNAPSHOTS = "profile", "memory"


def steps_of(text: str | None) -> tuple[int, int] | None:
    """The first step of --profile START:STOP and the one after its last.

    Raises:
        UserError: no two numbers, or no step between them.
    """
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    if not (colon and start.isdigit() and stop.isdigit() and 1 <= int(start) < int(stop)):
        raise UserError(
            f"--profile is {text!r}, and must be START:STOP, from 1, STOP not included: 3:5 is steps 3 and 4"
        )
    return int(start), int(stop)


class Profiler:
    """Watches a run; to be told when each step begins and when it has ended. Every rank writes files of its own.

    Args:
        out: the run's folder, if something is to be written: OUT/profile/rank-N.json (for chrome://tracing or
            Perfetto) and OUT/memory/rank-N.pickle (for pytorch.org/memory_viz).
        rank: of this process.
        steps: the first one to trace, from 1, and the one after the last; None: no trace.
        snapshot_step: after which the memory's history, from the first step on, is written; 0: none.
    """

    def __init__(self, out: Path | None, rank: int, steps: tuple[int, int] | None, snapshot_step: int) -> None:
        self.out, self.rank, self.steps, self.snapshot_step = out, rank, steps, snapshot_step
        self._profile: profile | None = None
        self.written: list[Path] = []
        if snapshot_step:
            compat.record_memory_history()

    def begin(self, step: int) -> None:
        """Before a step, from 1."""
        if self.steps is not None and self._profile is None and self.steps[0] <= step < self.steps[1]:
            kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            # Without acc_events, torch 2.11 warns that events of earlier cycles are lost; there is one cycle here.
            self._profile = profile(activities=kinds, record_shapes=True, acc_events=True)
            self._profile.start()

    def end(self, step: int) -> None:
        """After a step."""
        if self._profile is not None and self.steps is not None and step + 1 >= self.steps[1]:
            self._finish()
        if self.snapshot_step and step == self.snapshot_step:
            path = self._path(SNAPSHOTS, "pickle")
            compat.write_memory_snapshot(path)
            self.written.append(path)

    def close(self) -> None:
        """After the last step: writes the trace of a run that ended before STOP."""
        if self._profile is not None:
            self._finish()

    def _finish(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        path = self._path(TRACES, "json")
        self._profile.export_chrome_trace(str(path))
        self.written.append(path)
        self._profile, self.steps = None, None

    def _path(self, folder: str, suffix: str) -> Path:
        assert self.out is not None
        (self.out / folder).mkdir(exist_ok=True)
        return self.out / folder / f"rank-{self.rank}.{suffix}"
