"""A model's blocks compiled: norms, projections, RoPE and MLP fused, attention over the whole sequence as it was."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention as local_attention

from flexcp.op import flex_attention


def compile(
    model: nn.Module, *, fullgraph: bool = False, backend: str = "inductor", blocks: Sequence[nn.Module] | None = None
) -> None:
    """Compiles each block of a model, in place; parameters, their names and hooks stay.

    Attention itself is never compiled from its pieces, which would be attention over this rank's rows alone.

    * fullgraph=False: model code that calls torch's flex_attention stays as it is, and runs inside `context_parallel`.
      The graph breaks around that call, in each function that leads to it: a layer of Llama is four graphs.
    * fullgraph=True: a block is one graph, with attention in it as the operator `flexcp.flex_attention`; a block that
      breaks the graph raises. Modules that keep the function which they call as their attribute `attend`, as those of
      `flexcp.models` do, are given `flexcp.flex_attention`; other models call it themselves.

    After tensor parallelism and before `fully_shard`. With activation checkpointing, fullgraph=True comes after it, so
    that a checkpoint is part of the graph, and fullgraph=False before it. New documents are new data: as long as shapes
    stay, nothing is compiled again.

    Args:
        model: the module; its parameters may still be on the meta device.
        backend: of torch.compile.
        blocks: what to compile; None: the entries of each nn.ModuleList that lies in no other.
    Raises:
        ValueError: there are no blocks, or they were checkpointed before the graph was to break in them.

    >>> import torch, flexcp
    >>> from flexcp import masks
    >>> from flexcp.models import build
    >>> model = build("llama3-debug", seed=0)
    >>> flexcp.compile(model, fullgraph=True, backend="eager")
    >>> plan = flexcp.plan(masks.causal(), seq_len=256, mesh=1)
    >>> model(torch.zeros(1, 256, dtype=torch.int64), plan.positions, block_mask=plan.block_mask).shape
    torch.Size([1, 256, 256])
    """
    blocks = _blocks(model) if blocks is None else list(blocks)
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no nn.ModuleList of blocks to compile; name them with blocks=")
    for block in blocks:
        if fullgraph:
            for module in block.modules():
                if getattr(module, "attend", None) is local_attention:
                    module.attend = flex_attention
        if not fullgraph and "forward" in vars(block):
            raise ValueError(
                "the forward of a block was replaced before flexcp.compile, by activation checkpointing for instance, "
                "which is not compiled where the graph breaks; compile first, or pass fullgraph=True"
            )
        # The forward alone, and not the call: hooks of fully_shard then run around the graph.
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=fullgraph)


def _blocks(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [block for child in module.children() for block in _blocks(child)]
