"""Tensor parallelism of a Llama decoder: each rank has some heads and some columns of the MLP, and between them some
tokens.

q, k, v, gate and up are divided by columns, o and down by rows (Megatron-LM, Shoeybi et al., 2019). Norms and residuals
run on a rank's own L / tp of the tokens (sequence parallelism, Korthikanti et al., 2022): an all-gather of the tokens
before attention and before the MLP, a reduce-scatter behind each. Context parallelism goes on inside: attention of a
rank's heads runs over the cp ranks that have the same heads.

The head is divided by rows of the vocabulary at rest and gathered where it is used: a rank then has the logits of its
own L / tp tokens, whole, so that any loss of single tokens can be taken without a word to the other ranks. For the long
shards that this project is about, the weight is smaller than the rows that a division of the vocabulary would move.
"""

import functools
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from flexcp.errors import UserError


def check_tp(tp: int, sizes: Mapping[str, int]) -> None:
    """Refuses a model that cannot be divided.

    Args:
        sizes: query heads, KV heads, and so on, by what they are called.

    Raises:
        UserError: the first that tp does not divide.
    """
    for name, size in sizes.items():
        if size % tp:
            raise UserError(
                f"--tp {tp} cannot divide the model's {size} {name} equally: use a divisor of {size}, or more --cp"
            )


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divides a decoder's matrices over the mesh, in place; parameters keep their names.

    Args:
        model: with `embed`, `layers`, `norm`, `head` (None where it is the embedding) and `unembed`, as
            `flexcp.models.Llama3`. Its forward then takes all of the cp rank's tokens and gives the logits of this
            rank's part of them, by `own_tokens`.
        mesh: of one dimension.

    Raises:
        ValueError: a parameter that none of this divides, whose gradient would be missing the other ranks' heads.
    """
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(use_local_output=True),
        },
    )
    for layer in model.layers:
        parallelize_module(layer, mesh, _layer_styles())
    if model.head is not None:
        model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, mesh, [Shard(0)]))
    model.unembed = functools.partial(_unembed, model)
    left = [name for name, param in model.named_parameters() if not isinstance(param, DTensor)]
    if left:
        raise ValueError(f"tensor parallelism does not know the parameter {left[0]}: leave --tp at 1 for this model")


def _layer_styles() -> dict[str, ParallelStyle]:
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    # Of attention's arguments only the first is divided by tokens.
    rest = (None,) * 4
    attention = {"input_layouts": (Shard(1), *rest), "desired_input_layouts": (Replicate(), *rest)}
    return {
        "attn_norm": SequenceParallel(),
        "attn": PrepareModuleInput(**attention),
        "attn.q_proj": ColwiseParallel(),
        "attn.k_proj": ColwiseParallel(),
        "attn.v_proj": ColwiseParallel(),
        "attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(**gathered),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }


def _unembed(model: nn.Module, x: Tensor) -> Tensor:
    """The logits [B, L / tp, V] of this rank's tokens."""
    return F.linear(x, whole_weight((model.embed if model.head is None else model.head).weight))


def whole_weight(weight: Tensor) -> Tensor:
    """A weight gathered over tp, as a plain tensor; each rank's gradient is of its own tokens, and is summed on its
    way back to the parts."""
    if not isinstance(weight, DTensor):
        return weight
    return weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
