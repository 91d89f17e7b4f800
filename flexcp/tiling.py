"""Token-wise functions, a tile of tokens at a time: what is as wide as the MLP's hidden layer lives for one tile only.

Norms, projections, RoPE and the MLP treat every token alone. Run over a whole shard, each leaves intermediate results
behind that are several times as wide as the residual stream. Here forward keeps the inputs, and backward runs each tile
forward again and straight back.

Parameters enter as inputs of one autograd function and get one gradient each, summed over the tiles. So a gradient hook
(FSDP's reduction, an optimizer in backward) fires once a parameter, and nothing is gathered or freed between tiles.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from flexcp import compat

Outputs = Tensor | tuple[Tensor, ...]


def tiled(
    function: Callable[..., Outputs],
    inputs: Sequence[Tensor],
    parameters: Sequence[Tensor],
    tile: int,
    dims: Sequence[int] | None = None,
    out_dims: Sequence[int] = (1,),
) -> Outputs:
    """function(*inputs), computed a tile of tokens at a time, forward and backward.

    The result is that of the whole. Gradients of parameters are summed over tiles in fp32 (fp64 for fp64), so they
    differ from those of the whole by the rounding of one tile's gradient to the parameter's dtype: nothing beyond fp32
    rounding in fp32, at most 2^-9 of each tile's part in bf16.

    >>> weight = torch.randn(8, 8, requires_grad=True)
    >>> x = torch.randn(1, 10, 8)
    >>> torch.allclose(tiled(lambda rows: torch.relu(rows @ weight), [x], [weight], tile=4), torch.relu(x @ weight))
    True

    Args:
        function: takes tiles of the inputs, in order; each token of its results depends on that token of the inputs.
        inputs: tensors over the same tokens.
        parameters: what function reads besides and a gradient is wanted for; by reference, not through `inputs`.
        tile: tokens at a time; every rank of a group cuts equal shards and so makes as many tiles. 0: all at once,
            by plain autograd.
        dims: in which dimension of each input the tokens lie; 1 where left out.
        out_dims: the same of each result.
    """
    if tile == 0 or inputs[0].shape[(dims or (1,))[0]] <= tile:
        return function(*inputs)
    needs_grad = tuple(p for p in parameters if p.requires_grad)
    dims = tuple(dims or [1] * len(inputs))
    return _Tiled.apply(function, tile, dims, tuple(out_dims), len(inputs), *inputs, *needs_grad)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function, tile, dims, out_dims, count, *tensors: Tensor) -> Outputs:
        ctx.function, ctx.tile, ctx.dims, ctx.out_dims, ctx.count = function, tile, dims, out_dims, count
        ctx.save_for_backward(*tensors)
        outputs = forward_in_tiles(function, tensors[:count], tile, dims, out_dims)
        return outputs[0] if len(outputs) == 1 else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        inputs, parameters = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        sums = GradientSums(parameters)
        wanted = [torch.zeros_like(x) if need else None for x, need in zip(inputs, ctx.needs_input_grad[5:])]
        backward_in_tiles(ctx.function, inputs, grads, wanted, sums, ctx.tile, ctx.dims, ctx.out_dims)
        return (None,) * 5 + (*wanted, *sums.collect())


def tiles(length: int, tile: int) -> Iterator[slice]:
    """Slices of at most `tile` tokens, in order; one of all where tile is 0."""
    for start in range(0, length, tile or max(1, length)):
        yield slice(start, min(length, start + (tile or length)))


@torch.no_grad()
def forward_in_tiles(
    function: Callable[..., Outputs],
    inputs: Sequence[Tensor],
    tile: int,
    dims: Sequence[int],
    out_dims: Sequence[int],
    into: Sequence[Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """The results, written tile by tile; nothing is recorded for autograd. `into`: where to write them."""
    length = inputs[0].shape[dims[0]]
    outputs: Sequence[Tensor] | None = into
    for rows in tiles(length, tile):
        parts = function(*(_rows(x, dim, rows) for x, dim in zip(inputs, dims)))
        parts = parts if isinstance(parts, tuple) else (parts,)
        if outputs is None:
            if rows.stop == length:
                return parts
            outputs = [x.new_empty(_with_length(x, dim, length)) for x, dim in zip(parts, out_dims)]
        for whole, part, dim in zip(outputs, parts, out_dims):
            _rows(whole, dim, rows).copy_(part)
        del parts
    assert outputs is not None
    return tuple(outputs)


def backward_in_tiles(
    function: Callable[..., Outputs],
    inputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    wanted: Sequence[Tensor | None],
    sums: "GradientSums",
    tile: int,
    dims: Sequence[int],
    out_dims: Sequence[int],
    add: bool = True,
) -> None:
    """Runs each tile forward again and back.

    Args:
        grads: of the results; None for one that nothing depends on.
        wanted: for each input where its gradient goes to, or None where it is not wanted; one of `grads`, too, whose
            tile is then done with.
        sums: adds up the gradients of the parameters.
        add: to what `wanted` hold; False: they are overwritten.
    """
    for rows in tiles(inputs[0].shape[dims[0]], tile):
        with torch.enable_grad():
            leaves = [
                _rows(x, dim, rows).detach().requires_grad_(into is not None)
                for x, dim, into in zip(inputs, dims, wanted)
            ]
            outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (part, _rows(grad, dim, rows))
            for part, grad, dim in zip(outputs, grads, out_dims)
            if grad is not None and part.requires_grad
        ]
        into = [(leaf, total, dim) for leaf, total, dim in zip(leaves, wanted, dims) if total is not None]
        sources = [leaf for leaf, _, _ in into] + sums.parameters
        if not pairs or not sources:
            continue
        found = torch.autograd.grad(
            [part for part, _ in pairs], sources, [grad for _, grad in pairs], allow_unused=True
        )
        del outputs, pairs, leaves
        for (_, total, dim), grad in zip(into, found):
            if add and grad is not None:
                _rows(total, dim, rows).add_(grad)
            elif not add:
                _rows(total, dim, rows).copy_(grad if grad is not None else torch.zeros_like(_rows(total, dim, rows)))
        sums.add(found[len(into) :])


class GradientSums:
    """Gradients of parameters, added up in fp32 (fp64 for fp64) and handed out once, in the parameters' dtype.

    Args:
        parameters: those that want one.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self._sums: list[Tensor | None] = [None] * len(self.parameters)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        """One part of each parameter's gradient; None adds nothing."""
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            total = self._sums[i]
            if total is None:
                self._sums[i] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
            else:
                total += grad

    def collect(self) -> list[Tensor | None]:
        """The sums; None for a parameter that was given nothing."""
        found = []
        for i, parameter in enumerate(self.parameters):
            total, self._sums[i] = self._sums[i], None
            found.append(None if total is None else total.to(parameter.dtype))
        return found


# Gradients that a function here returned and nobody else can have, unless a hook of the user keeps one.
_handed_over: set[int] = set()


def hand_over(gradient: Tensor) -> Tensor:
    """Marks a gradient as the next function's own, to be overwritten; it must have been allocated for this."""
    storage = gradient.untyped_storage()
    number = storage.data_ptr()
    if number and number not in _handed_over:
        _handed_over.add(number)
        weakref.finalize(storage, _handed_over.discard, number)
    return gradient


def own(gradient: Tensor) -> bool:
    """Whether a gradient that has arrived was handed over, and nobody has kept it on the way."""
    handed = gradient.untyped_storage().data_ptr() in _handed_over and gradient.is_contiguous()
    return handed and compat.is_alone(gradient)


def _rows(x: Tensor, dim: int, rows: slice) -> Tensor:
    return x.narrow(dim, rows.start, rows.stop - rows.start)


def _with_length(x: Tensor, dim: int, length: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = length
    return shape
