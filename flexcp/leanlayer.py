"""A decoder layer as one autograd function that keeps next to nothing: its input, and perhaps what attention gave.

A layer is a token-wise part before attention (norm, projections, RoPE), attention, and a token-wise part after it
(output projection, norm, MLP, residuals). Backward makes every intermediate result again: the token-wise ones a tile of
tokens at a time (`tiling`), queries, keys and values a group of heads at a time (`headserial`). Attention itself need
not be computed twice: its output and lse can be kept.

Where only every g-th layer keeps its input, the inputs of the layers between are made again from it, once, when
backward reaches the last of them. What is kept lies in a `Store` where there is one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp import dispatch, tokens
from flexcp.comm import Link
from flexcp.headserial import SerialAttention
from flexcp.offload import Kept, Store
from flexcp.planner import Schedule
from flexcp.tiling import GradientSums, backward_in_tiles, forward_in_tiles, hand_over, own

_BEFORE = {"dims": (1, 2, 2), "out_dims": (2, 2, 2)}  # x, cos, sin -> q, k, v
_AFTER = {"dims": (1, 1), "out_dims": (1,)}  # x, out -> y


class DecoderLayer(Protocol):
    """What a layer must offer; `flexcp.models.llama3.Layer` does.

    Attributes:
        num_heads, num_kv_heads, head_dim: H, G and D.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def before_attention(
        self, x: Tensor, cos: Tensor, sin: Tensor, keys: slice | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, S, D], k and v [B, G, S, D] of the residual stream x [B, S, C]; only some KV heads with their
        query heads where `keys` says so."""
        ...

    def after_attention(self, x: Tensor, out: Tensor) -> Tensor:
        """The layer's result [B, S, C] from its input and attention's output [B, S, H * D]."""
        ...


@dataclass(frozen=True)
class Lean:
    """How lean a layer is.

    Attributes:
        tile: tokens that the token-wise parts take at a time; 0: all.
        head_groups: groups of KV heads that attention takes one after the other; a divisor of G.
        keep_attention: keep attention's output and lse for backward; else it is computed again.
        every: layers from one kept input to the next (g).
    """

    tile: int = 0
    head_groups: int = 1
    keep_attention: bool = True
    every: int = 1

    def __post_init__(self) -> None:
        if self.tile < 0 or self.head_groups < 1 or self.every < 1:
            raise ValueError(f"tile is at least 0, head_groups and every at least 1, got {self}")

    @property
    def is_plain(self) -> bool:
        """Whether this asks for nothing that a plain layer does not do."""
        return self.tile == 0 and self.head_groups == 1 and self.every == 1


def make_lean(layers: Sequence[nn.Module], lean: Lean, store: Store | None = None) -> None:
    """Replaces the forward of each layer, in place; parameters and their names stay.

    To be called before FSDP2's fully_shard of each layer, whose hooks then gather a layer's parameters once forward and
    once backward (once more for a layer whose input is made again).

    Args:
        layers: the model's decoder layers, in order, each called as layer(x, cos, sin, block_mask, score_mod).
        store: where what is kept lies; None: where it was made.
    Raises:
        ValueError: a layer that does not offer what `DecoderLayer` says, or a wrong number.
    """
    chain = _Chain(list(layers), lean, store)
    for index, layer in enumerate(layers):
        if not (hasattr(layer, "before_attention") and hasattr(layer, "after_attention")):
            raise ValueError(
                f"a {type(layer).__name__} offers no before_attention and after_attention (flexcp.leanlayer."
                "DecoderLayer), which tiles and head groups need: leave them off for this model"
            )
        if layer.num_kv_heads % lean.head_groups:
            raise ValueError(
                f"{layer.num_kv_heads} KV heads cannot be divided into {lean.head_groups} equal groups: choose a "
                "divisor"
            )
        layer.forward = functools.partial(_forward, chain, index)


@dataclass
class _Arguments:
    """What every layer of a forward pass gets besides x."""

    cos: Tensor
    sin: Tensor
    block_mask: BlockMask
    schedule: Schedule
    link: Link


class _Chain:
    """The layers of one model, in order, with what they share in a forward pass."""

    def __init__(self, layers: list[nn.Module], lean: Lean, store: Store | None) -> None:
        self.layers, self.lean, self.store = layers, lean, store
        self.segment: _Segment | None = None  # of the forward pass under way
        self.replayed: _Segment | None = None  # whose inputs are being made again

    def keep(self, x: Tensor) -> Kept | Tensor:
        return x.detach() if self.store is None else self.store.put(x)

    def run(self, index: int, x: Tensor, arguments: _Arguments, kept: _Attended | None) -> tuple[Tensor, _Attended]:
        """A layer's result and what its attention gave; attention is not computed where that is at hand."""
        layer = self.layers[index]
        if kept is None:
            serial = _serial(layer, self.lean, arguments)
            out, lse = serial.forward(functools.partial(_project, layer, x, arguments, self.lean.tile))
        else:
            out, lse = kept.get()
        (y,) = forward_in_tiles(layer.after_attention, (x, out), self.lean.tile, **_AFTER)
        return y, _Attended(out, lse)


@dataclass
class _Attended:
    """Attention's output [B, S, H * D] and lse [B, H, S] of one layer."""

    out: Kept | Tensor
    lse: Tensor

    def get(self) -> tuple[Tensor, Tensor]:
        return _fetched(self.out), self.lse


class _Segment:
    """Up to `every` layers, of which the first keeps its input."""

    def __init__(self, chain: _Chain, first: int, x: Tensor, arguments: _Arguments) -> None:
        self.chain, self.first, self.arguments = chain, first, arguments
        self.kept: Kept | Tensor | None = chain.keep(x)
        self.attended: dict[int, _Attended] = {}  # by layer
        self.inputs: list[Kept | Tensor] = []  # of the layers from the first on, once backward has come

    def take_input(self, index: int) -> Tensor:
        """The input of a layer, the last one not yet taken; those between it and the first are made on the way."""
        if self.kept is None:
            return _fetched(self.inputs.pop())
        x, kept = _fetched(self.kept), self.kept
        self.kept = None
        for layer in range(self.first, index):
            self.inputs.append(kept if layer == self.first else self.chain.keep(x))
            x = self._again(layer, x)
        return x

    def _again(self, index: int, x: Tensor) -> Tensor:
        arguments = self.arguments
        self.chain.replayed = self
        try:
            with torch.no_grad():
                # Called as a module, so that FSDP gathers its parameters.
                return self.chain.layers[index](x, arguments.cos, arguments.sin, arguments.block_mask, None)
        finally:
            self.chain.replayed = None


def _forward(
    chain: _Chain, index: int, x: Tensor, cos: Tensor, sin: Tensor, block_mask: BlockMask, score_mod: Any
) -> Tensor:
    """Stands in the place of a layer's forward."""
    if score_mod is not None:
        raise ValueError(
            "lean layers (tiles, head groups, checkpoints of every g-th layer) take no score_mod: leave them off "
            "and use activation checkpointing alone"
        )
    layer = chain.layers[index]
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ValueError(
            "lean layers (tiles, head groups, checkpoints of every g-th layer) need whole parameters, but these are "
            "divided by tensor parallelism: leave one of the two off"
        )
    token = _token_of(block_mask, x.shape[1])
    arguments = _Arguments(cos, sin, block_mask, token.schedule, token.plan().link)
    if torch.is_grad_enabled() and (x.requires_grad or parameters):
        return _Layer.apply(chain, index, arguments, x, *parameters)
    kept = None if chain.replayed is None else chain.replayed.attended.get(index)
    return chain.run(index, x, arguments, kept)[0]


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: _Chain, index: int, arguments: _Arguments, x: Tensor, *parameters: Tensor) -> Tensor:
        if index % chain.lean.every == 0:
            chain.segment = _Segment(chain, index, x, arguments)
        segment = chain.segment
        assert segment is not None
        y, attended = chain.run(index, x, arguments, None)
        if chain.lean.keep_attention:
            segment.attended[index] = _Attended(chain.keep(attended.out), attended.lse)
        if index + 1 == len(chain.layers):
            chain.segment = None
        ctx.chain, ctx.index, ctx.segment, ctx.parameters = chain, index, segment, parameters
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:
        chain, segment, index = ctx.chain, ctx.segment, ctx.index
        if segment is None:
            raise RuntimeError("backward through a lean layer a second time: what it kept is gone; run forward again")
        layer, tile, arguments = chain.layers[index], chain.lean.tile, segment.arguments
        x = segment.take_input(index)
        project = functools.partial(_project, layer, x, arguments, tile)
        serial = _serial(layer, chain.lean, arguments)
        attended = segment.attended.pop(index, None)
        with torch.no_grad():
            out, lse = serial.forward(project) if attended is None else attended.get()
        del attended
        sums = GradientSums(ctx.parameters)
        # The gradient that came is done with, tile by tile, and its memory is that of the one that goes.
        dx, dout = dy if own(dy) else torch.empty_like(x), torch.empty_like(out)
        backward_in_tiles(layer.after_attention, (x, out), (dy,), (dx, dout), sums, tile, **_AFTER, add=False)
        with torch.no_grad():
            dqkv = serial.backward(project, out, lse, dout)
        del out, lse, dout
        inputs = x, arguments.cos, arguments.sin
        backward_in_tiles(layer.before_attention, inputs, dqkv, (dx, None, None), sums, tile, **_BEFORE)
        ctx.parameters = ctx.segment = None
        return None, None, None, hand_over(dx), *sums.collect()


def _serial(layer: DecoderLayer, lean: Lean, arguments: _Arguments) -> SerialAttention:
    heads = layer.num_heads, layer.num_kv_heads
    return SerialAttention(arguments.schedule, arguments.link, *heads, lean.head_groups, layer.head_dim**-0.5)


def _project(
    layer: DecoderLayer, x: Tensor, arguments: _Arguments, tile: int, keys: slice
) -> tuple[Tensor, Tensor, Tensor]:
    some = None if keys == slice(0, layer.num_kv_heads) else keys
    before = functools.partial(layer.before_attention, keys=some)
    q, k, v = forward_in_tiles(before, (x, arguments.cos, arguments.sin), tile, **_BEFORE)
    return q, k, v


def _token_of(block_mask: BlockMask, length: int) -> tokens.Token:
    """The token of the active plan that a block mask stands for."""
    token = None if block_mask is None else tokens.token_of(block_mask.as_tuple())
    plan = None if token is None else token.plan()
    if token is None or plan is None or not any(context.plan is plan for context in dispatch._contexts()):
        raise RuntimeError(
            "a lean layer was called with a block mask that is not of the active plan: call the model inside `with "
            "flexcp.context_parallel(plan):` and pass it block_mask=plan.block_mask"
        )
    if plan.local_len != length:
        raise ValueError(
            f"a lean layer was given {length} rows, but this rank's shard of the {plan.seq_len} tokens has "
            f"{plan.local_len}; shard the inputs with plan.shard"
        )
    return token


def _fetched(kept: Kept | Tensor) -> Tensor:
    return kept.get() if isinstance(kept, Kept) else kept
