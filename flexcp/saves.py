"""A run's state as tensors, and when it is saved."""

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from flexcp.checkpoint import Checkpointer, Ranks
from flexcp.config import TrainConfig
from flexcp.data import Documents
from flexcp.mesh import Mesh
from flexcp.meter import Meter
from flexcp.packing import Reader
from flexcp.restore import fill
from flexcp.resume import FOLDER, Start, random_states, state_of

# What activation checkpointing and torch.compile put into the names of what they wrap.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class Optimizer(Protocol):
    """What is asked of an optimizer: the model's parameters, what is stepped for each (itself or an fp32 copy), and the
    torch.optim.Optimizer that steps it.
    """

    params: list[nn.Parameter]
    masters: list[nn.Parameter]
    inner: torch.optim.Optimizer


def plain_name(name: str) -> str:
    """A parameter's name in the unwrapped model, so that a run may go on with other wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def state_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Everything that a run changes: parameters, shared ones once; buffers that are the model's state; for each
    parameter what the optimizer remembers of it, and the fp32 copy that it steps where there is one.
    """
    kept = model.state_dict(keep_vars=True).keys()
    mine = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}
    tensors = {f"model.{plain_name(name)}": tensor for name, tensor in mine.items()}
    names = {param: plain_name(name) for name, param in model.named_parameters()}
    for param, master in zip(optimizer.params, optimizer.masters):
        if master is not param:
            tensors[f"optimizer.{names[param]}.master"] = master
        for what, value in optimizer.inner.state.get(master, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{names[param]}.{what}"] = value
    return tensors


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """Lets an optimizer make the states that it makes at its first step, by a step of zeros that changes nothing."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


def restore(start: Start, model: nn.Module, optimizer: Optimizer, mesh: Mesh, device: torch.device) -> None:
    """Makes the model, the optimizer and the random streams those of the checkpoint."""
    assert start.folder is not None
    assert start.manifest is not None
    make_states(optimizer.inner)
    fill(start.folder, start.manifest, state_tensors(model, optimizer))
    start.restore_random(mesh.rank, mesh.degrees, device)


class Saves:
    """Saves a run after every so many steps, and after its last.

    Args:
        ranks: who saves; None where --save-every is 0.
        out: the run's folder.
    """

    def __init__(self, config: TrainConfig, out: Path | None, ranks: Ranks | None, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self._saver: Checkpointer | None = None
        if config.save_every:
            assert out is not None
            assert ranks is not None
            self._saver = Checkpointer(out / FOLDER, ranks, config.keep_last, config.save_mode == "async")
        self.held_up_s = 0.0

    def after(
        self, step: int, model: nn.Module, optimizer: Optimizer, reader: Reader, documents: Documents, meter: Meter
    ) -> None:
        """Saves what there is after a step, from 1, if it is one to save after.

        Raises:
            UserError: the checkpoint before could not be written; on all ranks alike.
        """
        self.held_up_s = 0.0
        if self._saver is None:
            return
        if meter.trouble:
            self._saver.wait()
        if step % self.config.save_every == 0 or step == self.config.steps:
            state = state_of(self.config, documents, reader.state, meter.tokens_seen, self.mesh.degrees)
            tensors = state_tensors(model, optimizer)
            self.held_up_s = self._saver.save(step, tensors, state, random_states(meter.device))

    @property
    def failed(self) -> bool:
        """Whether this rank knows of a save that failed, for `Meter.record` to tell the others."""
        return self._saver is not None and self._saver.failed

    def close(self) -> None:
        """Waits for the last checkpoint.

        Raises:
            UserError: it could not be written.
        """
        if self._saver is not None:
            self._saver.wait()
