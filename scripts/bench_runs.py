"""Runs of the trainer that a bench starts as a user would, and what they leave behind."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flexcp.commandline import parse
from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.fit import setup_of
from flexcp.memory import estimate
from flexcp.train import grid_of

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30
AXES = {"cp": "--cp", "dp": "--dp-shard", "rep": "--dp-replicate", "tp": "--tp"}


@dataclass(frozen=True)
class Run:
    """What a run has left behind; `failure` is None where it ended well."""

    config: TrainConfig | None
    records: list[dict[str, Any]]
    seconds: float
    failure: str | None

    def predicted(self, device: str) -> int:
        """The planner's bytes for one rank, of the settings that --memory auto had resolved."""
        assert self.config is not None
        return estimate(setup_of(self.config, grid_of(self.config, None), torch.device(device))).device


def grid_flags(text: str) -> list[str]:
    """The trainer's flags of a grid.

    >>> grid_flags("cp4xdp2:ring")
    ['--cp', '4', '--dp-shard', '2', '--comm', 'ring']
    """
    grid, _, comm = text.partition(":")
    found = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in grid.split("x")] if grid != "1" else []
    if any(part is None or part[1] not in AXES for part in found):
        raise UserError(f"--grid {text}: write 1, or axes with their ranks such as cp4xdp2 ({', '.join(AXES)})")
    return [word for part in found if part for word in (AXES[part[1]], part[2])] + (["--comm", comm] if comm else [])


@dataclass(frozen=True)
class Runs:
    """Of every command."""

    grid: tuple[str, ...] = ("1", "cp2")
    """The grids, each a run."""

    device: str = "cuda"
    """cuda, or cpu to hide the GPUs."""

    torchrun: bool = False
    """Started by torchrun, and not by the trainer itself."""

    limit_s: float = 570.0
    """Seconds for all runs; the one under way is then ended."""

    out: str = str(ROOT / "runs" / "training")
    """A folder, with one for each run in it."""

    def run(self, given: list[str]) -> int:
        raise NotImplementedError

    def train(self, name: str, argv: list[str], ends: float) -> Run:
        """One run; it is ended at `ends`, of time.monotonic()."""
        folder = Path(self.out) / re.sub(r"[^A-Za-z0-9_.-]", "-", name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        program = [sys.executable, "-m"]
        if self.torchrun:
            ranks = grid_of(parse(argv), None).size
            program += ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"]
        command = [*program, "flexcp.train", *argv, "--out", str(folder), "--save-model", "off"]
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {})
        began = time.monotonic()
        with open(folder / "output.txt", "w", encoding="utf-8") as output:
            process = subprocess.Popen(
                command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            failure = _outcome(process, max(0.0, ends - began))
        printed = (folder / "output.txt").read_text(encoding="utf-8", errors="replace")
        if failure and re.search("OutOfMemoryError|out of memory", printed, re.IGNORECASE):
            failure = "out of memory"
        elif failure:
            failure += ": " + " / ".join(printed.strip().splitlines()[-3:])[-800:]
        metrics, settings = folder / "metrics.jsonl", folder / "config.yaml"
        records = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        config = parse(["--config", str(settings)]) if settings.exists() else None
        return Run(config, records, time.monotonic() - began, failure)


def _outcome(process: subprocess.Popen, seconds: float) -> str | None:
    try:
        code = process.wait(seconds)
        return f"exit code {code}" if code else None
    except subprocess.TimeoutExpired:
        return f"ended after {seconds:.0f} s, since the time was over"
    finally:
        process.terminate()  # its launcher ends the ranks
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
