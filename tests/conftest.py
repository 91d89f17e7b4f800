import importlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.ranks import Ranks

# The ranks have one thread each, too. With two, the first float64 forward of a process was off by 5e-11 now and then
# (dense, torch alone; docs/log.md).
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests, too")
    parser.addoption("--matrix-seed", type=int, default=20261201, help="seed of the sampled oracle matrix")


def pytest_report_header(config: pytest.Config) -> str:
    return f"oracle matrix: seed {config.getoption('--matrix-seed')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow: scripts/test --all runs it"))


@pytest.fixture(scope="session", autouse=True)
def no_structured_trace() -> None:
    """Dynamo describes every call of flex_attention to this logger, and pytest would format and keep all of it."""
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = False
    # pytest 9 gives its handlers to loggers that do not propagate, too, before each phase of each test.
    trace.addHandler = lambda handler: None


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """`script(name)`: scripts/NAME.py as a module, which imports its neighbours as it does when it is run."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "scripts"))
    return importlib.import_module


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """`ranks(n)`: n gloo processes, started at the first call and shared by the whole session; or n with "nccl"."""
    pools: dict[tuple[int, str], Ranks] = {}

    def get(size: int, backend: str = "gloo") -> Ranks:
        key = size, backend
        if key not in pools:
            pools[key] = Ranks(*key)
        return pools[key]

    yield get
    for pool in pools.values():
        pool.close()
