"""scripts/setup with a stand-in for Python that installs nothing, and what scripts/demo makes of losses."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of a checkout as scripts/setup looks at, in a folder whose name has a space."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup", root / "scripts")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root)
    return root


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def setup(checkout: Path, **env: str) -> subprocess.CompletedProcess[str]:
    # From elsewhere: the script finds its own checkout.
    return subprocess.run(
        [checkout / "scripts" / "setup"], cwd="/", env=os.environ | env, capture_output=True, text=True, timeout=60
    )


def test_setup_installs_torch_first_and_only_when_something_changed(checkout: Path) -> None:
    log = checkout / "pip.log"
    log.touch()
    program(
        checkout / ".venv" / "bin" / "python",
        f'if [ "$2" = pip ]; then echo "$*" >>"{log}"; else exec {sys.executable} "$@"; fi',
    )
    done = setup(checkout)
    assert done.returncode == 0, done.stderr
    first, second = log.read_text().splitlines()
    assert first.endswith("--constraint constraints.txt torch")
    assert second.endswith("--constraint constraints.txt --editable .[test,dev]")

    assert setup(checkout).stdout == ""
    assert len(log.read_text().splitlines()) == 2

    (checkout / "constraints.txt").write_text("torch==0\n")
    assert setup(checkout).returncode == 0
    assert len(log.read_text().splitlines()) == 4


def test_setup_that_failed_is_tried_again(checkout: Path) -> None:
    log = checkout / "pip.log"
    program(
        checkout / ".venv" / "bin" / "python",
        f'if [ "$2" = pip ]; then echo x >>"{log}"; exit 1; else exec {sys.executable} "$@"; fi',
    )
    for tries in (1, 2):
        assert setup(checkout).returncode == 1
        assert log.read_text().count("x") == tries


def test_setup_refuses_an_old_python(checkout: Path) -> None:
    old = program(checkout / "python3.9", 'if [ "$1" = -c ]; then exit 1; else echo Python 3.9.1; fi')
    done = setup(checkout, PYTHON=str(old))
    assert done.returncode == 1
    assert "needs Python 3.11 or later" in done.stderr
    assert "3.9.1" in done.stderr
    assert not (checkout / ".venv").exists()

    program(checkout / ".venv" / "bin" / "python", "exit 1")
    done = setup(checkout)
    assert done.returncode == 1
    assert "remove it" in done.stderr


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "scripts" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(demo, others: float = 1.0, slope: float = -0.1) -> dict[str, list[float]]:
    first = [5 + slope * step for step in range(20)]
    return {name: [x * (1.0 if name == "cp 1" else others) for x in first] for name in demo.RUNS}


@pytest.mark.parametrize(
    ("others", "slope", "good", "words"),
    [
        (1.0, -0.1, True, ("Agrees", "Falls")),
        (1 + 9e-5, -0.1, True, ("Agrees", "Falls")),
        (1 + 2e-4, -0.1, False, ("DOES NOT AGREE", "Falls")),
        (1.0, +0.1, False, ("Agrees", "DOES NOT FALL")),
    ],
)
def test_verdict_of_the_demo(demo, others: float, slope: float, good: bool, words: tuple[str, str]) -> None:
    answer, sentence = demo.verdict(losses(demo, others, slope))
    assert answer is good
    assert all(word in sentence for word in words)


def test_table_of_the_demo_fits_a_terminal(demo) -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(demo.table(losses(demo, 1 + 5e-5), dict.fromkeys(demo.RUNS, 100.0)))
    lines = capture.get().splitlines()
    assert sum("5.0e-05" in line for line in lines) == 20
    assert not any("…" in line for line in lines)
