"""What a run's checkpoint holds, and how a run goes on from one: tensors by name, random streams, the rest as JSON."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

# What activation checkpointing and torch.compile put into the names of what they wrap.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


def plain_name(name: str) -> str:
    """A parameter's name in the unwrapped model, so that a run may go on with other wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, shared ones once, and buffers that belong to the model's state."""
    kept = model.state_dict(keep_vars=True).keys()
    tensors = dict(model.named_parameters()) | {n: t for n, t in model.named_buffers() if n in kept}
    return {f"model.{plain_name(name)}": tensor for name, tensor in tensors.items()}


def optimizer_tensors(model: nn.Module, optimizers: Iterable[Optimizer]) -> dict[str, Tensor]:
    """What optimizers remember of each parameter, by the parameter's name."""
    names = {param: plain_name(name) for name, param in model.named_parameters()}
    return {
        f"optimizer.{names[param]}.{what}": value
        for optimizer in optimizers
        for group in optimizer.param_groups
        for param in group["params"]
        for what, value in optimizer.state.get(param, {}).items()
        if isinstance(value, Tensor)
    }


def make_states(optimizers: Iterable[Optimizer]) -> None:
    """Lets optimizers make the state that they make at their first step, by a step of zeros that changes nothing."""
    for optimizer in optimizers:
        rates = [group["lr"] for group in optimizer.param_groups]
        grads = {}
        for group in optimizer.param_groups:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
            for param in group["params"]:
                grads[param], param.grad = param.grad, torch.zeros_like(param)
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        for param, grad in grads.items():
            param.grad = grad
