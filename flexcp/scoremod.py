"""A score_mod where only data can pass: a number for its code, and tensors for all that it captures.

An operator takes no functions. What a score_mod does is decided by its code and by the numbers and tensors that it
captures. `code_and_tensors` takes the tensors out, and numbers what is left. The registry of numbers is strong, and
small: functions that are made anew at every step, with other tensors in them, are one code and so one number.
"""

import copy
import dis
import functools
import itertools
from collections.abc import Callable, Hashable, Iterator
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

Make = Callable[[Iterator[Tensor]], Any]  # a captured value again, from the tensors in it

_numbers: dict[Hashable, int] = {}
_functions: dict[int, Callable[..., Tensor]] = {}
_count = itertools.count(1)

IDENTITY = 0  # the number of no score_mod at all


class ScoreMod:
    """A score_mod as `flexcp.flex_attention` takes it in compiled code, where a function that captures cannot pass.

    It can be called like the function, so torch's flex_attention takes it, too.

    Args:
        function: (score, b, h, q_idx, kv_idx, *score_tensors) -> score, in global indices. What it captures is read
            now: numbers are constants from here on, tensors are the ones captured now, with gradients to them.
    Attributes:
        number: stands for the code and the numbers; equal for equal ones.
        tensors: the captured tensors.
    Raises:
        ValueError: it captures what is neither number nor tensor.

    >>> import flexcp
    >>> from flexcp.masks import scores
    >>> flexcp.ScoreMod(scores.softcap(50.0)).tensors
    (tensor(50.),)
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.number, self.tensors = code_and_tensors(function)

    def __call__(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def code_and_tensors(score_mod: Callable[..., Tensor]) -> tuple[int, tuple[Tensor, ...]]:
    """The number of a score_mod's code, and the tensors that it captures, to be passed to `function_of` last."""
    if isinstance(score_mod, ScoreMod):
        return score_mod.number, score_mod.tensors
    lifting = _Lifting()
    key, make = lifting.lift(score_mod, "it")
    count = len(lifting.tensors)
    if key not in _numbers:
        number = _numbers[key] = next(_count)

        def lifted(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *tensors: Tensor) -> Tensor:
            given = len(tensors) - count
            return make(iter(tensors[given:]))(score, b, h, q_idx, kv_idx, *tensors[:given])

        lifted.__name__ = getattr(score_mod, "__name__", type(score_mod).__name__)
        lifted.code = f"score_mod {number}"  # by which the GPU's kernels tell programs apart
        _functions[number] = lifted
    return _numbers[key], tuple(lifting.tensors)


def function_of(number: int) -> Callable[..., Tensor] | None:
    """(score, b, h, q_idx, kv_idx, *score_tensors, *captured tensors) -> score; None where there is no score_mod."""
    return None if number == IDENTITY else _functions[number]


@torch.compiler.assume_constant_result
def constant_number(score_mod: Callable[..., Tensor]) -> int:
    """The number of a function that captures nothing. Dynamo tells functions apart by their code, so for others this
    would be another function's number."""
    lifting = _Lifting()
    if not isinstance(score_mod, FunctionType) or lifting.lift(score_mod, "it")[0] is None or lifting.captures:
        name = getattr(score_mod, "__name__", type(score_mod).__name__)
        what = f"it captures {lifting.captures[0]}" if lifting.captures else "it is no plain function"
        raise ValueError(
            f"in compiled code, score_mod={name} cannot be told from another one: {what}; make it a "
            "flexcp.ScoreMod once, outside, and pass that (or pass its tensors as score_tensors)"
        )
    return code_and_tensors(score_mod)[0]


_CONSTANT = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_CODE = (ModuleType, BuiltinFunctionType, type)


class _Lifting:
    """One walk through what a callable captures.

    Attributes:
        tensors: found so far, in order.
        captures: where values other than code were found.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.captures: list[str] = []
        self._open: set[int] = set()

    def lift(self, value: Any, name: str) -> tuple[Hashable, Make]:
        """(what tells it from others but for its tensors, how to make it again)."""
        if isinstance(value, Tensor):
            self.captures.append(name)
            self.tensors.append(value)
            return Tensor, next
        if isinstance(value, _CONSTANT):
            if value is not None:
                self.captures.append(name)
            return (type(value), value), lambda tensors: value
        if isinstance(value, _CODE) or str(getattr(value, "__module__", "")).split(".")[0] == "torch":
            return ("code", id(value)), _kept(value)
        if id(value) in self._open:
            raise ValueError(f"score_mod captures itself ({name}); write it without recursion")
        self._open.add(id(value))
        try:
            return self._compound(value, name)
        finally:
            self._open.remove(id(value))

    def _compound(self, value: Any, name: str) -> tuple[Hashable, Make]:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            key, make = self.lift((value.__func__, value.__self__), name)
            return ("method", key), lambda tensors: MethodType(*make(tensors))
        if isinstance(value, functools.partial):
            key, make = self.lift((value.func, value.args, value.keywords), name)
            return ("partial", key), lambda tensors: _partial(*make(tensors))
        if isinstance(value, (tuple, list)):
            kind = type(value)
            parts = [self.lift(item, f"{name}[{i}]") for i, item in enumerate(value)]
            return (kind, *[key for key, _ in parts]), lambda tensors: kind([make(tensors) for _, make in parts])
        if isinstance(value, dict):
            key, make = self.lift(list(value.values()), name)
            names = tuple(value)
            return ("dict", names, key), lambda tensors: dict(zip(names, make(tensors)))
        if isinstance(value, ScoreMod):
            return self.lift(value.function, name)
        if callable(value) and hasattr(value, "__dict__") and not isinstance(value, torch.nn.Module):
            return self._object(value, name)
        raise ValueError(
            f"score_mod captures {name}, a {type(value).__name__}, which an operator cannot be given; let it capture "
            "numbers and tensors, or pass tensors as score_tensors"
        )

    def _function(self, function: FunctionType) -> tuple[Hashable, Make]:
        code = function.__code__
        cells = function.__closure__ or ()
        # Globals too, so that a number is read once and a tensor is not baked in.
        names = [name for name in _globals(code) if name in function.__globals__]
        captured = {
            **{name: cell.cell_contents for name, cell in zip(code.co_freevars, cells)},
            **{f"default {i}": value for i, value in enumerate(function.__defaults__ or ())},
            **{f"default {name}": value for name, value in (function.__kwdefaults__ or {}).items()},
            **{f"global {name}": function.__globals__[name] for name in names},
        }
        parts = [self.lift(value, name) for name, value in captured.items()]
        num_defaults, keywords = len(function.__defaults__ or ()), tuple(function.__kwdefaults__ or ())

        def make(tensors: Iterator[Tensor]) -> FunctionType:
            values = iter([part(tensors) for _, part in parts])
            new_cells = tuple(CellType(next(values)) for _ in cells)
            defaults = tuple(next(values) for _ in range(num_defaults))
            kwdefaults = {name: next(values) for name in keywords}
            scope = {"__builtins__": function.__globals__.get("__builtins__", __builtins__), **dict(zip(names, values))}
            made = FunctionType(code, scope, function.__name__, defaults or None, new_cells or None)
            made.__kwdefaults__ = kwdefaults or None
            return made

        return (code, *[key for key, _ in parts]), make

    def _object(self, value: Any, name: str) -> tuple[Hashable, Make]:
        attributes = list(vars(value))
        key, make = self.lift(list(vars(value).values()), name)
        without = copy.copy(value)
        without.__dict__ = {}

        def again(tensors: Iterator[Tensor]) -> Any:
            made = copy.copy(without)
            made.__dict__.update(zip(attributes, make(tensors)))
            return made

        return (type(value), tuple(attributes), key), again


def _kept(value: Any) -> Make:
    # The registry keeps it, so that nothing else gets its id.
    return lambda tensors: value


def _partial(function: Callable[..., Any], args: tuple, keywords: dict[str, Any]) -> functools.partial:
    return functools.partial(function, *args, **keywords)


@functools.lru_cache(maxsize=1024)
def _globals(code: CodeType) -> tuple[str, ...]:
    """The global names that a function's code reads, and those of the functions inside it."""
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _globals(constant)]
    return tuple(dict.fromkeys([*own, *inner]))
