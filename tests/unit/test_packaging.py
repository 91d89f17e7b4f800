"""The ways flexcp gets onto a path: a wheel, a checkout without an install, `python -m`, torchrun.

Two environments are made that see this one's packages, torch among them, but not its flexcp: `installed` has the wheel,
`bare` has nothing, so that there flexcp can only come from the working directory.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = ["--steps", "2", "--seq-len", "256"]

# Prints where everything comes from; the process has not been told about the checkout.
LOOK = """
import importlib.util as u, json
import flexcp, flexcp.masks, flexcp.models
from flexcp import masks, models
assert masks is flexcp.masks and models is flexcp.models
assert masks.causal() is not None and models.get_config("llama3-debug").num_params > 0
files = [m.__file__ for m in (flexcp, masks, models)]
print(json.dumps({"files": files, "top": [n for n in ("masks", "models", "tests") if u.find_spec(n)]}))

# As `python -m flexcp.train --help`, without another import of torch.
import runpy, sys
sys.argv[1:] = ["--help"]
runpy.run_module("flexcp.train", run_name="__main__")
"""


def run(argv: list, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """A program that knows of no checkout but its working directory, and was started by no launcher."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run([*map(str, argv)], cwd=cwd, env=env, capture_output=True, text=True, timeout=150)
    assert not check or done.returncode == 0, f"{argv} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def site_packages(venv: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))


def make_venv(venv: Path) -> Path:
    """An environment with this one's packages, less what .pth files bring in, such as an editable flexcp."""
    run([sys.executable, "-m", "venv", "--without-pip", venv], venv.parent)
    places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages(venv) / "outer.pth").write_text("\n".join(sorted(places)) + "\n")
    return venv / "bin" / "python"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Away from the checkout; tests use it as the working directory."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="module")
def wheel(place: Path) -> Path:
    """Built from a copy, as `build` leaves folders behind; through the sdist, so that it is complete, too."""
    copy = place / "copy"
    for name in ("flexcp", "masks", "models"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", place / "dist", copy], place)
    [built] = (place / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(place: Path, wheel: Path) -> Path:
    """The interpreter of an environment in which the wheel is installed."""
    python = make_venv(place / "installed")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    run(pip, place)
    return python


@pytest.fixture(scope="module")
def bare(place: Path) -> Path:
    """The interpreter of an environment without flexcp."""
    python = make_venv(place / "bare")
    run([python, "-c", "import importlib.util as u; assert u.find_spec('flexcp') is None"], place)
    return python


def test_wheel_holds_one_top_level_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"flexcp"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    for folder, target in (("flexcp", "flexcp"), ("masks", "flexcp/masks"), ("models", "flexcp/models")):
        for path in (ROOT / folder).rglob("*"):
            if path.is_dir() or path.suffix == ".pyc":
                continue
            assert f"{target}/{path.relative_to(ROOT / folder)}" in names, f"{path} is not in the wheel"


def test_every_way_in(place: Path, installed: Path, bare: Path) -> None:
    script = installed.parent / "flexcp.train"
    # One rank of torchrun shows `python -m` from the root as well, since that is how it starts one.
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "flexcp.train", *TRAIN]
    ways = {
        "script": ([script, *TRAIN, "--cp", "2", "--out", "by-script"], place),
        "root torchrun": ([bare, *torchrun, "--out", place / "by-torchrun"], ROOT),
        "look": ([installed, "-c", LOOK], place),
        "plan --help": ([installed.parent / "flexcp.plan", "--help"], place),
    }
    with ThreadPoolExecutor(2) as pool:  # most of their time is the import of torch
        outcomes = dict(zip(ways, pool.map(lambda way: run(*way), ways.values())))

    found = json.loads(outcomes["look"].stdout.splitlines()[0])
    package = site_packages(place / "installed") / "flexcp"
    assert found["files"] == [str(package / name / "__init__.py") for name in (".", "masks", "models")]
    assert found["top"] == [], "these must not be importable: they would shadow a user's own packages"
    for name in ("look", "plan --help"):
        assert "--seq-len" in outcomes[name].stdout, name
    for folder in ("by-script", "by-torchrun"):
        records = [json.loads(line) for line in (place / folder / "metrics.jsonl").read_text().splitlines()]
        assert [record["step"] for record in records] == [1, 2]
        assert all(0 < record["loss"] < 10 for record in records)
