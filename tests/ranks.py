"""Processes that stand for the ranks of a group, started once per world size and reused by every test."""

import importlib
import multiprocessing as mp
import socket
import time
import traceback
from multiprocessing.connection import wait
from typing import Any

TIMEOUT_S = 60.0
NCCL_TIMEOUT_S = 300.0  # kernels are compiled before the ranks meet
START_TIMEOUT_S = 300.0
# What ranks of the CPU import once for all; nothing that computes, which would start threads before a fork.
SHARED = ["pytest", "torch._inductor.compile_fx", "torch.export._trace", "torch.distributed.tensor.experimental"]
SHARED += ["flexcp.train"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Ranks:
    """`size` processes. `run` calls a module-level function on all of them and gathers what it returns.

    Args:
        backend: gloo, on the CPU; or nccl, with a GPU for each.
    """

    def __init__(self, size: int, backend: str = "gloo") -> None:
        self.size, self.backend = size, backend
        self.timeout_s = NCCL_TIMEOUT_S if backend == "nccl" else TIMEOUT_S
        self._start()

    def _start(self) -> None:
        context = _context(self.backend)
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, port, theirs, self.backend), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        for pipe in self.pipes:  # on a busy machine torch's import alone takes a while
            if not pipe.poll(START_TIMEOUT_S) or pipe.recv() != "ready":
                raise RankError(f"{self.size} ranks did not start within {START_TIMEOUT_S:.0f} s")

    def run(self, function: Any, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """What function(*args) returned on each rank.

        Raises:
            RankError: some rank raised, or did not answer in time; the processes are then started afresh, since the
                others may still wait for it.
        """
        outcomes = self.outcomes(function, *args, timeout_s=timeout_s)
        failed = [(rank, text) for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failed:
            raise RankError("\n".join(f"--- rank {rank}\n{text}" for rank, text in failed))
        return [value for _, value in outcomes]

    def outcomes(self, function: Any, *args: Any, timeout_s: float | None = None) -> list[tuple[bool, Any]]:
        """As `run`, but gives (True, value) or (False, traceback) of each rank."""
        for pipe in self.pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        deadline = time.monotonic() + (timeout_s or self.timeout_s)
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.size and (left := deadline - time.monotonic()) > 0:
            waiting = {self.pipes[rank]: rank for rank in range(self.size) if rank not in answers}
            for pipe in wait(list(waiting), timeout=left):
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, f"the process ended with exit code {self.processes[rank].exitcode}")
                if not answers[rank][0]:  # the others may wait for it in vain
                    deadline = min(deadline, time.monotonic() + 5.0)
        silent = (False, "no answer: the rank waits for another")
        result = [answers.get(rank, silent) for rank in range(self.size)]
        if not all(ok for ok, _ in result):
            self.close()
            self._start()
        return result

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


class RankError(AssertionError):
    """A rank failed."""


def _context(backend: str) -> Any:
    """How ranks are started: with GPUs, whose drivers do not survive a fork, each imports for itself, as at a user's.

    On the CPU they are forks of one process that has imported torch, which takes seconds, and has no threads but
    OpenBLAS's, which it ends itself before a fork. What is lost is a seed of hashes for each rank: programs that are
    started (tests/train/test_cli.py) have theirs.
    """
    if backend == "nccl" or "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(SHARED)
    return context


def _serve(rank: int, size: int, port: int, pipe: Any, backend: str) -> None:
    import warnings
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    if backend == "nccl":
        torch.cuda.set_device(rank)  # and torch's compiler warns of its own internals
    else:
        warnings.simplefilter("error")
    # As in pyproject, which says why.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    warnings.filterwarnings("ignore", "`torch.jit.script")
    warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=NCCL_TIMEOUT_S if backend == "nccl" else TIMEOUT_S),
    )
    pipe.send("ready")
    while True:
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
