"""How long something held the work up, on a CPU and on a GPU, without holding it up any longer."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Adds up spans of time.

    On a CPU, seconds in which this thread was inside. On a GPU, seconds in which the current stream was: an event
    before and one after, which nobody waits for until `take`. A wait for a collective costs the host nothing there, and
    the stream just as long as the message is late.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts what happens inside."""
        if self.on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._spans.append((begin, end))
            return
        began = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """The seconds since the last `take`. Waits for the stream; at the end of a step that has ended anyway."""
        for begin, end in self._spans:
            end.synchronize()
            self._seconds += begin.elapsed_time(end) / 1000
        seconds, self._seconds, self._spans = self._seconds, 0.0, []
        return seconds
