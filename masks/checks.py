"""Checks of what users give: one sentence that says what was given, what is needed and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def quantity(factory: str, name: str, value: object, least: int = 1) -> int:
    """`value` as an int of at least `least`; bools and floats are not ints."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(
            f"{factory}: {name} must be an int, got {value!r} of type {type(value).__name__}; "
            f"give a whole number of at least {least}."
        )
    if value < least:
        raise ValueError(f"{factory}: {name} must be at least {least}, got {value}.")
    return value


def flag(factory: str, name: str, value: object) -> bool:
    """`value` as a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{factory}: {name} must be True or False, got {value!r}.")
    return value


def integers(factory: str, name: str, value: object, dims: tuple[int, ...], shape: str) -> Tensor:
    """`value` as an integer tensor with one of `dims` dimensions, not empty. `shape` says so in words."""
    if not isinstance(value, Tensor):
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(
                f"{factory}: {name} must be an integer tensor {shape}, got {type(value).__name__}; "
                f"pass torch.tensor(...)."
            )
        try:
            value = torch.tensor(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{factory}: {name} must be an integer tensor {shape}: {error}.") from error
    if value.dtype not in INTEGERS:
        raise ValueError(
            f"{factory}: {name} must hold integers {shape}, got dtype {value.dtype}; convert it with .long()."
        )
    if value.dim() not in dims or value.numel() == 0:
        raise ValueError(f"{factory}: {name} must have shape {shape} and not be empty, got {list(value.shape)}.")
    return value


def merge_sizes(what: str, left: int | None, right: int | None, sides: str) -> int | None:
    """The size two masks agree on, None where neither cares."""
    if left is None or right is None or left == right:
        return right if left is None else left
    raise ValueError(
        f"Cannot join {sides}: one is made for {left} {what}, the other for {right}; build both for the same."
    )


def count_positional(fn: Callable) -> int | None:
    """How many arguments without default `fn` takes, None where Python cannot tell."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in parameters)


def axes(factory: str, name: str, value: object, num_axes: int | None = None) -> tuple[int, ...]:
    """`value` as one size for each axis of a grid: an int for a line, else 1 to 3 of them."""
    sizes = (value,) if isinstance(value, int) else value
    if not isinstance(sizes, list | tuple) or not 1 <= len(sizes) <= 3:
        raise ValueError(f"{factory}: {name} must be an int or 1 to 3 of them, slowest axis first, got {value!r}.")
    if num_axes is not None and len(sizes) != num_axes:
        raise ValueError(f"{factory}: {name} must have {num_axes} axes like the grid, got {value!r}.")
    return tuple(quantity(factory, name, size) for size in sizes)


def divides(factory: str, name: str, value: object, of: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`value` as one size for each axis, each of which divides that of `sizes`."""
    parts = axes(factory, name, value, len(sizes))
    if any(size % part for size, part in zip(sizes, parts)):
        raise ValueError(f"{factory}: {name} {parts} must divide the {of} {sizes} along each axis; pad or change one.")
    return parts


def per_axis_flags(factory: str, name: str, value: object, num_axes: int) -> tuple[bool, ...]:
    """`value` as one bool for each axis; a single one counts for all."""
    flags = [value] * num_axes if isinstance(value, bool) else value
    if not isinstance(flags, list | tuple) or len(flags) != num_axes:
        raise ValueError(f"{factory}: {name} must be a bool or {num_axes} of them, got {value!r}.")
    return tuple(flag(factory, name, each) for each in flags)
