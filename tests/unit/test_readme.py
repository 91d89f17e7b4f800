"""What README.md shows is true: its programs run, its flags and files exist."""

import ast
import os
import re
import runpy
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from flexcp.config import TrainConfig

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
FLAGS_OF_OTHERS = {
    "--help",
    "--nproc-per-node",
    "--nnodes",
    "--rdzv-backend",
    "--rdzv-id",
    "--rdzv-endpoint",
}  # torchrun
FLAGS_OF_OTHERS |= {"--nodes", "--gpus-per-node"}  # sbatch


def run(argv: list, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run([*map(str, argv)], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def test_the_number_of_ranks_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "quickstart.py").write_text(PROGRAMS[0])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda ranks: run([*torchrun, ranks, "quickstart.py"], tmp_path), (1, 2))
    assert re.fullmatch(r"loss 5\.\d{4}, logits \(1, 1000, 256\)", one)
    assert two == one


@pytest.mark.parametrize("number", range(1, len(PROGRAMS)))
def test_the_other_programs_run(number: int, tmp_path: Path) -> None:
    """In this process, to save the import of torch."""
    (tmp_path / "program.py").write_text(PROGRAMS[number])  # Dynamo and inspect look for the source
    runpy.run_path(str(tmp_path / "program.py"), run_name="__main__")


def test_flags_exist() -> None:
    known = {"--" + field.name.replace("_", "-") for field in fields(TrainConfig)} | FLAGS_OF_OTHERS
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL))
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", commands)) | set(re.findall(r"`(--[a-z0-9-]+)", TEXT))
    assert mentioned
    assert mentioned <= known


@pytest.mark.parametrize("page", sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("*.md")) + ["docs/architecture.md"])
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        assert ((ROOT / page).parent / target).exists(), target


def test_python_blocks_of_other_pages_parse() -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        for program in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            ast.parse(program)
