"""What a step cost, measured on every rank and told to all: one message a step."""

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypedDict

import torch
import torch.distributed as dist

import flexcp
from flexcp.batch import IGNORE, Batch
from flexcp.config import TrainConfig
from flexcp.flops import VisiblePairs, peak_tflops, step_flops
from flexcp.mesh import Mesh
from flexcp.packing import Reader
from flexcp.plans import Plans
from flexcp.step import StepLoss
from flexcp.stopwatch import Stopwatch


class Record(TypedDict):
    """What a step leaves behind. All but times and memory is the same on any number of ranks, save the loss of one."""

    step: int  # from 1
    loss: float  # cross entropy in nats, the mean over all tokens that have a label
    loss_max: float  # the largest mean over the labels of one rank
    tokens: int  # tokens that have a label in this step; padding is not counted, and nothing twice
    tokens_seen: int  # their sum so far
    tokens_per_s: float  # tokens of documents, with a label or not and without padding, over all ranks, / step_s
    tokens_per_s_per_device: float
    tflops_per_device: float  # 10^12 operations a second, on the pairs that the mask lets see each other (`flops`)
    mfu: float | None  # that over the device's nominal peak; None where the peak is not known, as on a CPU
    tflops_per_device_full: float  # as the field counts: all S x S pairs, and padding too
    mfu_full: float | None
    grad_norm: float  # of the summed gradients, before clipping
    lr: float
    memory_bytes: int  # the largest peak of any rank: resident on a CPU, allocated on a GPU
    step_s: float  # wall-clock seconds of the slowest rank, data and plan included, saving and evaluation not
    data_s: float  # of it, of the slowest rank in that: reading and packing documents
    plan_s: float  # and planning
    comm_wait_s: float  # and waiting for keys, values and their gradients: attention's exposed communication
    save_s: float  # in which the checkpoint before this step held the slowest rank up


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


class Meter:
    """Stands between the training loop and what it asks for, and takes the time; callable in the place of `plans`.

    Communication of FSDP2 and of tensor parallelism happens inside torch and is not in `comm_wait_s`; the profiler's
    trace shows it.

    Args:
        plans: from a micro-batch to its plan.
        tokens_seen: before the first step.
    """

    def __init__(
        self, config: TrainConfig, mesh: Mesh, device: torch.device, plans: Plans, tokens_seen: int = 0
    ) -> None:
        self.config, self.mesh, self.device, self.plans = config, mesh, device, plans
        self.model = config.model_config()
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = peak_tflops(name, config.torch_dtype) if name else None
        self.tokens_seen, self.trouble = tokens_seen, False
        self._pairs_of, self._waits = VisiblePairs(), Stopwatch(device)
        self._begin()

    def _begin(self) -> None:
        self._began = time.perf_counter()
        self._seconds = {"data": 0.0, "plan": 0.0}
        self._pairs, self._tokens, self._labels = 0.0, 0, 0

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._seconds[what] += time.perf_counter() - began

    def next(self, reader: Reader) -> Batch:
        """The next step's rows; the step's time begins here."""
        self._waits.take()  # of an evaluation
        self._begin()
        before = reader.counts["padding"]
        with self._timed("data"):
            batch = reader.next()
        self._tokens = batch.tokens.numel() - (reader.counts["padding"] - before)
        return batch

    def __call__(self, batch: Batch) -> flexcp.Plan:
        """The plan of a micro-batch."""
        with self._timed("plan"):
            plan = self.plans(batch)
        plan.link.counters.waits = self._waits
        self._pairs += self._pairs_of(plan) * batch.num_rows
        labels = self.mesh.own_tokens(plan.shard(batch.labels, dim=1, pad=IGNORE))
        self._labels += int((labels != IGNORE).sum())
        return plan

    def record(
        self, step: int, loss: StepLoss, grad_norm: float, lr: float, save_s: float = 0.0, trouble: bool = False
    ) -> Record:
        """The record of a step, from 1, that is done. A collective.

        Args:
            save_s: seconds in which a checkpoint held this rank up, before this step.
            trouble: this rank has seen a save fail; `self.trouble` then is True on every rank.
        """
        step_s = time.perf_counter() - self._began
        own_mean = loss.own * loss.num_labels / self._labels if self._labels else -math.inf
        mine = (
            *(self._pairs, own_mean, step_s, self._seconds["data"], self._seconds["plan"]),
            *(self._waits.take(), save_s, peak_memory_bytes(self.device), float(trouble)),
        )
        every = self._everyones(mine)
        largest = every.max(0).values.tolist()
        config, model, ranks = self.config, self.model, self.mesh.degrees.size
        # tp ranks compute some of the heads each, and have counted the pairs of all.
        pairs = float(every[:, 0].sum()) * model.num_heads / self.mesh.degrees.tp
        step_s = largest[2]
        whole = config.batch * config.seq_len
        flops = step_flops(model, self._tokens, pairs)
        flops_full = step_flops(model, whole, float(whole) * config.seq_len * model.num_heads)
        rate, rate_full = (each / step_s / ranks / 1e12 for each in (flops, flops_full))
        self.trouble = bool(largest[8])
        self.tokens_seen += loss.num_labels
        return Record(
            step=step,
            loss=loss.loss,
            loss_max=largest[1] if math.isfinite(largest[1]) else loss.loss,
            tokens=loss.num_labels,
            tokens_seen=self.tokens_seen,
            tokens_per_s=self._tokens / step_s,
            tokens_per_s_per_device=self._tokens / step_s / ranks,
            tflops_per_device=rate,
            mfu=rate / self.peak if self.peak else None,
            tflops_per_device_full=rate_full,
            mfu_full=rate_full / self.peak if self.peak else None,
            grad_norm=grad_norm,
            lr=lr,
            memory_bytes=int(largest[7]),
            step_s=step_s,
            data_s=largest[3],
            plan_s=largest[4],
            comm_wait_s=largest[5],
            save_s=largest[6],
        )

    def _everyones(self, mine: tuple[float, ...]) -> torch.Tensor:
        """Numbers of every rank, float64 [ranks, numbers], in which counts up to 2^53 are exact."""
        row = torch.tensor(mine, dtype=torch.float64, device=self.device)
        if self.mesh.degrees.size == 1:
            return row[None]
        rows = [torch.empty_like(row) for _ in range(self.mesh.degrees.size)]
        dist.all_gather(rows, row)
        return torch.stack(rows).cpu()
