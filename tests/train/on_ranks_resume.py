"""What the tests of resuming run in each rank: a run that ends after some step, and what it has read."""

import dataclasses
import threading
from typing import Any

import torch.distributed as dist

import flexcp.checkpoint as checkpoint
import flexcp.train as trainer
from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.mesh import Mesh
from flexcp.step import own_rows
from tests.train import on_ranks


def _grid(config: TrainConfig) -> Mesh:
    return on_ranks.mesh(**{name: getattr(config, name) for name in ("dp_replicate", "dp_shard", "cp", "tp")})


class Stopped(Exception):
    """The run ends here."""


def train(config: TrainConfig, stop_after: int | None = None) -> dict[str, Any]:
    """The losses of a run, by step, and the tokens that this rank has got, step by step, flat.

    Args:
        stop_after: raise after this step, as a failure would, between two checkpoints.
    """
    losses, read = {}, []
    real = trainer.accumulate

    def accumulate(model, batch, plans, mesh, *more):
        read.append(own_rows(batch, mesh).tokens.flatten().tolist())
        return real(model, batch, plans, mesh, *more)

    def on_step(model: object, record: Any) -> None:
        losses[record["step"]] = record["loss"]
        if record["step"] == stop_after:
            raise Stopped

    trainer.accumulate = accumulate
    try:
        trainer.run(config, _grid(config), on_step=on_step)
    except Stopped:
        for thread in threading.enumerate():  # what a checkpoint under way still writes
            if thread.name == "flexcp-checkpoint":
                thread.join()
    finally:
        trainer.accumulate = real
    return {"losses": losses, "read": read}


def train_on_a_full_disk(config: TrainConfig) -> tuple[str, list[int]]:
    """Rank 1 cannot write the second checkpoint: what each rank says, and the steps that it has done till then."""
    real, left, steps = checkpoint.save_file, [1 if dist.get_rank() == 1 else 99], []

    def save_file(tensors: Any, path: Any) -> None:
        if left[0] == 0:
            raise OSError(28, "No space left on device", str(path))
        left[0] -= 1
        real(tensors, path)

    checkpoint.save_file = save_file
    try:
        trainer.run(config, _grid(config), on_step=lambda model, record: steps.append(record["step"]))
    except UserError as error:
        return str(error), steps
    finally:
        checkpoint.save_file = real
    return "no error", steps


def said(config: TrainConfig, other: dict[str, Any] | None = None) -> str:
    """What a run is refused with; rank 1 with other settings, where there are some."""
    if other and dist.get_rank() == 1:
        config = dataclasses.replace(config, **other)
    try:
        trainer.run(config, _grid(config))
    except UserError as error:
        return str(error)
    return "no error"
