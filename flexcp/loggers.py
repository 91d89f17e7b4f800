"""Records to TensorBoard, Weights & Biases or trackio: packages that are installed where they are wanted."""

import math
import secrets
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from flexcp.errors import UserError, unknown

LOGGERS = ("none", "tensorboard", "wandb", "trackio")
_PROJECT = "flexcp"
_RUN_ID = "run_id"  # a file in the run's folder, so that a resumed run goes on in the same place


class Sink(Protocol):
    """Takes numbers of steps."""

    def add(self, step: int, values: dict[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


def names_of(log: str) -> list[str]:
    """What --log asks for.

    Raises:
        UserError: a name that is not known, or whose package is not installed.
    """
    names = [name.strip() for name in log.split(",")]
    for name in names:
        if name not in LOGGERS:
            raise unknown("log", name, LOGGERS)
    for name in names:
        if name != "none" and find_spec(name) is None:
            raise UserError(f"--log {name} needs the package {name}: pip install 'flexcp[{name}]'")
    return [name for name in dict.fromkeys(names) if name != "none"]


def open_sinks(names: Sequence[str], out: Path | None, settings: dict[str, Any]) -> list[Sink]:
    """The sinks of a run; on one rank only.

    Args:
        names: as `names_of` gives them.
        out: the run's folder, after which the run is called.
        settings: of the run, to be shown beside the numbers.

    Raises:
        UserError: a service that does not let the run in.
    """
    kinds = {"tensorboard": _TensorBoard, "wandb": _Wandb, "trackio": _Trackio}
    return [kinds[name](out or Path("."), settings) for name in names]


class _TensorBoard:
    """Event files in OUT/tensorboard: `tensorboard --logdir OUT`."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(out / "tensorboard"))
        text = "\n".join(f"    {name}: {value}" for name, value in settings.items())
        self._writer.add_text("settings", text)

    def add(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases; with WANDB_MODE=offline it stays in OUT/wandb until `wandb sync`."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        wandb = import_module("wandb")
        try:
            self._run = wandb.init(
                project=_PROJECT,
                name=out.resolve().name,
                dir=str(out),
                config=settings,
                id=_run_id(out),
                resume="allow",
                settings=wandb.Settings(silent=True),
            )
        except Exception as error:  # not logged in, no network
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"--log wandb: {reason}; `wandb login`, or set WANDB_MODE=offline") from None

    def add(self, step: int, values: dict[str, float]) -> None:
        self._run.log({name: x for name, x in values.items() if math.isfinite(x)}, step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    """A local run of trackio: `trackio show --project flexcp`."""

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        trackio = import_module("trackio")
        self._run = trackio.init(
            project=_PROJECT, name=f"{out.resolve().name}-{_run_id(out)}", config=settings, resume="allow", embed=False
        )

    def add(self, step: int, values: dict[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish()


def _run_id(out: Path) -> str:
    """The same for a run and the runs that go on from it in its folder."""
    path = out / _RUN_ID
    if not path.exists():
        path.write_text(secrets.token_hex(4), encoding="utf-8")
    return path.read_text(encoding="utf-8").strip()
