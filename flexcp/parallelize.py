"""A model made parallel, from outside of it, in the one order in which the steps fit together.

    parallelize: fp8 conversion -> tensor parallelism -> activation checkpointing -> compile -> fully_shard
    then, by the caller: allocation (to_empty) and weights, each rank its own part of them (`place`)

The model may still be on the meta device, and should be where it is large: no rank ever holds more than its part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flexcp import compiled
from flexcp.activation import checkpoint_layers, store_inputs
from flexcp.compat_tensor import full_tensor, offset_of_local
from flexcp.fp8 import convert
from flexcp.leanlayer import Lean, make_lean
from flexcp.mesh import Mesh
from flexcp.offload import Store
from flexcp.tp import tensor_parallel


@dataclass(frozen=True)
class Parallel:
    """What is done to a model.

    Attributes:
        fsdp: divide the parameters over dp_shard x cp; False: every rank holds all of them.
        ac: of `activation.MODES`, which activations are kept for backward.
        store: where what is kept lies; None: where it was made.
        fp8: of `fp8.RECIPES`, the products of the layers' matrices; fp8_modules: of which, `fp8.chosen_modules`.
        lean: how lean the layers are, which then keep by themselves what `ac` says; None: they are plain.
        compile_backend: of torch.compile, by which each layer becomes one graph, its checkpoint included and attention
            in it as the operator `flexcp.flex_attention`; None: layers run as they are. A lean layer, which runs
            autograd in its middle, cannot be one.
    """

    fsdp: bool = True
    ac: str = "none"
    store: Store | None = None
    fp8: str = "none"
    fp8_modules: str = "all"
    lean: Lean | None = None
    compile_backend: str | None = None


def parallelize(model: nn.Module, mesh: Mesh, how: Parallel) -> None:
    """Makes a model parallel, in place; its parameters keep their names.

    Args:
        model: a decoder with `embed`, `layers`, `norm` and `head`, or a module that holds one; it may hold other
            parameters, learned tensors of its scores for instance.
        mesh: the grid.
        how: what to do.

    Raises:
        ValueError: layers that are lean and compiled.
    """
    if how.lean is not None and how.compile_backend is not None:
        raise ValueError("lean layers run autograd in their middle, and cannot be compiled: leave out one of the two")
    decoder = _decoder(model)
    convert(decoder.layers, how.fp8, mesh.device_type, how.fp8_modules)
    if mesh.tp is not None:
        tensor_parallel(decoder, mesh.tp)
    if how.lean is not None:
        make_lean(list(decoder.layers), how.lean, how.store)
    elif how.compile_backend is not None:
        checkpoint_layers(list(decoder.layers), how.ac)
        _compile(decoder, mesh, how.compile_backend, how.store)
    else:
        checkpoint_layers(list(decoder.layers), how.ac, how.store)
    if how.fsdp and mesh.sharding is not None:
        _shard(model, list(decoder.layers), mesh)


def _compile(decoder: nn.Module, mesh: Mesh, backend: str, store: Store | None) -> None:
    layers = list(decoder.layers)
    if mesh.tp is not None:
        # The embedding's output is still on its way, in a wrapper that AOTAutograd takes off, and the gradient's way
        # back with it. A copy waits for it.
        decoder.embed.register_forward_hook(lambda module, args, x: x.clone())
    compiled.compile(decoder, fullgraph=True, backend=backend, blocks=layers)
    if store is not None:
        store_inputs(layers, store)


def _decoder(model: nn.Module) -> nn.Module:
    return next(module for module in model.modules() if hasattr(module, "layers") and hasattr(module, "embed"))


def _shard(model: nn.Module, layers: list[nn.Module], mesh: Mesh) -> None:
    """FSDP2 over dp_shard x cp, with copies over dp_replicate; gradients are summed, not averaged."""
    dtype = next(model.parameters()).dtype
    # bf16 has 8 bits: its gradients are summed over ranks in fp32.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.promote_types(dtype, torch.float32))
    settings = {"mesh": mesh.sharding, "mp_policy": policy}
    # FSDP2 cannot divide a number; it stays whole, and `gradients.sum_gradients` sums its gradient.
    scalars = {param for param in model.parameters() if param.ndim == 0}
    for layer in layers:
        fully_shard(layer, **settings)
    # What stands around the layers (embedding, last norm, head) is used at both ends of backward, and stays gathered
    # between them.
    fully_shard(model, **settings, ignored_params=scalars or None)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # What ranks compute are parts of a sum (`step`), and gloo knows no other reduction.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Lets go of what FSDP2 keeps gathered after a forward without a backward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def place(name: str, param: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's part of a parameter, to be filled, and where it begins in the whole."""
    if not isinstance(param, DTensor):
        return param.detach(), (0,) * param.ndim
    return param.detach().to_local(), offset_of_local(param)


def whole(x: Tensor) -> Tensor:
    """A tensor with the parts of all ranks. A collective, where it is a DTensor."""
    return full_tensor(x) if isinstance(x, DTensor) else x
