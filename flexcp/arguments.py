"""What a call of attention takes beside its tensors: a scale and a score_mod, each refused with a sentence."""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)

_WANTED = "it is a function (score, b, h, q_idx, kv_idx) that returns the new score, a tensor"

_good: "WeakSet[Any]" = WeakSet()  # codes of functions, and callables of other kinds, that return a tensor


def check_scale(scale: object) -> None:
    """Raises ValueError for what is neither a number nor None."""
    if scale is None or isinstance(scale, _NUMBERS) or (isinstance(scale, Tensor) and scale.numel() == 1):
        return
    if isinstance(scale, str | bytes | Tensor) or not hasattr(scale, "__float__"):  # other libraries' numbers have it
        raise ValueError(f"scale is {scale!r}; it is a number, the factor on q @ k, or None for 1 / sqrt(D)")


def check_score(score_mod: object) -> None:
    """Raises ValueError for what is no function, or returns something else than a tensor; None is no score_mod.

    A function made anew at every step, of a code that was called once, costs a look-up.
    """
    if score_mod is None:
        return
    require_callable(score_mod)
    key = score_mod.__code__ if isinstance(score_mod, FunctionType) else score_mod
    try:
        known = key in _good
    except TypeError:  # no hash, or no weak reference
        require_tensor(score_mod)
        return
    if not known:
        require_tensor(score_mod)
        _good.add(key)


def require_callable(score_mod: object) -> None:
    """Raises ValueError for what cannot be called."""
    if not callable(score_mod):
        raise ValueError(f"score_mod is {score_mod!r}; {_WANTED}")


def require_tensor(score_mod: Callable[..., Any], tensors: Sequence[Tensor] = ()) -> None:
    """Calls a score_mod at one pair, and raises ValueError where it returns something else than a tensor.

    What it raises itself says nothing: here it gets plain 0-d tensors, and under vmap it may do well.

    Args:
        tensors: taken after the five arguments that each score_mod has.
    """
    indices = [torch.zeros((), dtype=torch.int32) for _ in range(4)]  # on the CPU, 0-d: they go with any device
    try:
        with torch.no_grad():
            score = score_mod(torch.zeros(()), *indices, *tensors)
    except Exception:
        return
    if not isinstance(score, Tensor):
        name = getattr(score_mod, "__name__", type(score_mod).__name__)
        raise ValueError(f"score_mod {name} returned {score!r}; {_WANTED}")
