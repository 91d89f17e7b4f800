"""Processes that are started together end together. The ranks here are small programs of their own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flexcp.errors import UserError
from flexcp.launch import World, _wait, launch

# A rank writes its number, then behaves as its arguments say: `dummy RANK BEHAVIOUR`; the others wait for ten minutes.
DUMMY = """
import os, signal, sys, time
rank, where = os.environ["RANK"], sys.argv[1]
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(os.path.join(where, rank), "w").write(str(os.getpid()))
while len(os.listdir(where)) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
if sys.argv[2] == "good":
    sys.exit(0)
if rank == "1" and sys.argv[2] in ("dies", "stubborn"):
    sys.exit(7)
if rank == "1" and sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "watches":
    from flexcp.launch import leave_with_launcher
    leave_with_launcher()
    open(os.path.join(where, "watching" + rank), "w").close()
time.sleep(600)
"""


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "flexcp_dummy.py").write_text(DUMMY)
    (tmp_path / "pids").mkdir()
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    return tmp_path / "pids"


def alive(where: Path) -> list[int]:
    """Process ids that the ranks wrote and that still run."""
    pids = [int(path.read_text()) for path in where.iterdir() if path.name.isdigit()]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in _status(pid)]


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "\nState:\tZ"


def wait_for(condition, seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [
        ("good", 0, ""),
        ("dies", 7, "rank 1 ended with exit code 7"),
        ("killed", 137, "rank 1 was killed by SIGKILL (out of memory?)"),
        ("stubborn", 7, "rank 1 ended with exit code 7"),
    ],
)
def test_one_end_is_everybodys(
    where: Path, capfd: pytest.CaptureFixture, behaviour: str, code: int, words: str
) -> None:
    began = time.monotonic()
    assert launch([str(where), behaviour], 3, module="flexcp_dummy") == code
    assert time.monotonic() - began < 10
    assert not alive(where)
    stderr = capfd.readouterr().err
    assert words in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGABRT, 1)])
def test_of_two_that_ended_at_once_the_cause_is_named(tmp_path: Path, number: signal.Signals, code: int) -> None:
    """A rank that missed a killed one and said so is not the cause; nor is one that aborts since another spoke."""
    spoke = subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"])
    (tmp_path / "speaker").write_text("0")
    killed = subprocess.Popen([sys.executable, "-c", f"import os; os.kill(os.getpid(), {int(number)})"])
    for rank in (spoke, killed):
        rank.wait()
    assert _wait([spoke, killed], tmp_path) == code


def start_launcher(where: Path, behaviour: str) -> subprocess.Popen:
    program = f"import sys; from flexcp.launch import launch; sys.exit(launch([{str(where)!r}, {behaviour!r}], 2, "
    return subprocess.Popen(
        [sys.executable, "-c", program + "module='flexcp_dummy'))"], stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_launcher_ends_its_ranks(where: Path, number: int, code: int) -> None:
    with start_launcher(where, "waits") as launcher:
        try:
            assert wait_for(lambda: len(list(where.iterdir())) == 2, 60)
            launcher.send_signal(number)
            assert launcher.wait(30) == code
            assert not alive(where)
            assert "Traceback" not in launcher.communicate()[1]
        finally:
            launcher.kill()


def test_ranks_do_not_outlive_a_killed_launcher(where: Path) -> None:
    with start_launcher(where, "watches") as launcher:
        try:
            assert wait_for(lambda: len(list(where.glob("watching*"))) == 2, 60)
        finally:
            launcher.kill()
    assert wait_for(lambda: not alive(where), 20)


def test_the_world_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert World.from_env() is None
    monkeypatch.setenv("RANK", "5")
    with pytest.raises(UserError, match="WORLD_SIZE is None"):
        World.from_env()
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="not MASTER_ADDR and MASTER_PORT"):
        World.from_env()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert World.from_env() == World(5, 8, 5, 8)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert World.from_env() == World(5, 8, 1, 4)
    monkeypatch.setenv("LOCAL_RANK", "-1")
    with pytest.raises(UserError, match="LOCAL_RANK is '-1'"):
        World.from_env()
