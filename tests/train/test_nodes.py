"""Several nodes, played by several torchrun agents on this machine; and the Slurm script, whose Slurm is a stand-in."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
FLAGS = ["--seq-len", "128", "--steps", "2", "--batch", "2", "--data", str(ROOT / "LICENSE")]
TORCHS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def agent(folder: Path, port: int, flags: list[str]) -> subprocess.Popen[str]:
    """One node's torchrun with two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    command += [
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "7",
        "--rdzv-endpoint",
        f"127.0.0.1:{port}",
        "--max-restarts",
        "0",
    ]
    clean = {name: value for name, value in os.environ.items() if name not in TORCHS}
    return subprocess.Popen(
        [*command, "-m", "flexcp.train", *FLAGS, *flags],
        cwd=folder,
        env=clean | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_two_nodes(folder: Path, flags: list[str]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each node's agent."""
    port = free_port()
    agents = [agent(folder, port, flags) for _ in range(2)]
    try:
        told = [each.communicate(timeout=150) for each in agents]
    finally:
        for each in agents:
            each.kill()
    return [(each.returncode, out, err) for each, (out, err) in zip(agents, told)]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_two_nodes_of_two_ranks(tmp_path: Path) -> None:
    """cp within a node, rows over the nodes: one config, one metrics file, and the losses of one rank."""
    ended = on_two_nodes(tmp_path, ["--cp", "2", "--dp-shard", "-1", "--out", "four"])
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert sum("step 2/2  loss" in out for _, out, _ in ended) == 1  # rank 0 alone speaks
    alone = [sys.executable, "-m", "flexcp.train", *FLAGS, "--out", "one"]
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True, timeout=100)
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_a_wrong_use_ends_all_nodes(tmp_path: Path) -> None:
    ended = on_two_nodes(tmp_path, ["--cp", "3"])
    assert all(code != 0 for code, _, _ in ended)
    assert any("is a grid of 3 ranks, and 4 were started" in err for _, _, err in ended)


def test_the_slurm_script_starts_one_agent_on_each_node(tmp_path: Path) -> None:
    """What srun is given, with the numbers that Slurm would set."""
    stand_ins = {"scontrol": "printf 'a1\\na2\\n'", "srun": 'printf "%s\\n" "$@"'}
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "a[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    env = {**os.environ, **slurm, "SLURM_GPUS_ON_NODE": "8", "SLURM_SUBMIT_DIR": str(ROOT)}
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    command = [ROOT / "scripts" / "train.slurm", "--model", "llama3-8b", "--mask", "causal & document"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=30)
    given = done.stdout.splitlines()
    options = dict(itertools.pairwise(given))
    assert options["--nnodes"] == "2"
    assert options["--nproc-per-node"] == "8"
    assert options["--rdzv-endpoint"] == "a1:21234"
    assert given[given.index("-m") :] == ["-m", "flexcp.train", "--model", "llama3-8b", "--mask", "causal & document"]
