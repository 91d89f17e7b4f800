"""`--mask`: an expression over the mask library, or a function of the user's own."""

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from flexcp import maskmods, masks
from flexcp.errors import UserError

FACTORY_ARGUMENTS = ("seq_len", "doc_ids")


@dataclass(frozen=True)
class MaskSource:
    """Where a run's masks come from; `make` builds the one of a batch.

    Attributes:
        text: the value of --mask.
        function: the user's mask_mod or factory; None for an expression.
        arguments: of FACTORY_ARGUMENTS, those the factory takes; None where `function` is itself a mask_mod.
        file: the user's file, to tell an error of theirs from one of ours.
    """

    text: str
    function: Callable | None = None
    arguments: tuple[str, ...] | None = None
    file: str | None = None

    def varies(self, seq_len: int) -> bool:
        """Whether the mask differs from batch to batch, because it asks for the document ids."""
        if self.function is not None:
            return "doc_ids" in (self.arguments or ())
        try:
            masks.parse(self.text, seq_len=seq_len)
        except ValueError:  # it cannot be built without them
            return True
        return False

    def make(self, doc_ids: Tensor) -> Callable | BlockMask:
        """The mask of one batch, as `flexcp.plan` takes it.

        Args:
            doc_ids: [B, S] int64.

        Raises:
            UserError: an expression with an error in it, or a factory that raises or returns no mask.
        """
        given = {"seq_len": doc_ids.shape[1], "doc_ids": doc_ids}
        if self.function is None:
            try:
                return masks.parse(self.text, **given)
            except ValueError as error:
                raise UserError(f"--mask: {error}") from None
        if self.arguments is None:
            return self.function
        try:
            mask = self.function(**{name: given[name] for name in self.arguments})
        except Exception as error:
            raise self.blame(error) from error
        if not callable(mask) and not isinstance(mask, BlockMask):
            raise UserError(
                f"--mask {self.text}: the factory returned {type(mask).__name__}; it must return a mask: a function "
                "(b, h, q_idx, kv_idx) -> bool, a flexcp mask or a BlockMask"
            )
        return mask

    def probe(self, doc_ids: Tensor) -> None:
        """Evaluates the mask at a few pairs as FlexAttention will, so that a mistake shows before ranks are
        started.

        Raises:
            UserError: the mask_mod raises, or returns something else than one bool per pair.
        """
        mask = self.make(doc_ids)
        if self.function is None or isinstance(mask, BlockMask):
            return
        some = min(8, doc_ids.shape[1])
        try:
            answer = create_mask(mask, 1, 1, some, some, device="cpu")
        except Exception as error:
            raise self.blame(error) from error
        if answer.dtype != torch.bool:
            raise UserError(f"--mask {self.text} returns {answer.dtype}: a mask_mod must return a bool tensor")

    def reads(self, mask: Callable | BlockMask) -> tuple[bool, bool]:
        """Whether a mask distinguishes batch rows, and heads; a flexcp mask or a BlockMask says so itself.

        Assuming that a function reads both would be right, too, but it would be classed again for every row and head.
        """
        if isinstance(mask, masks.Mask | BlockMask):
            return False, False
        try:
            return maskmods.reads(mask, "cpu")
        except (ValueError, TypeError):  # `probe` has judged it, here it only stays unknown
            return True, True

    def blame(self, error: BaseException) -> UserError:
        """The sentence for an exception of the user's: its type, its words and its line."""
        return UserError(f"--mask {self.text} raised {describe(error, self.file)}: correct it there")

    def is_users(self, error: BaseException) -> bool:
        """Whether an exception, or one it came from, passed through the user's file."""
        return self.file is not None and _user_line(error, self.file) is not None


def _user_line(error: BaseException, file: str) -> tuple[BaseException, int] | None:
    """The exception of a chain that was raised within `file`, and the deepest line there."""
    cause: BaseException | None = error
    while cause is not None:
        frames = [frame for frame in traceback.extract_tb(cause.__traceback__) if _same(frame.filename, file)]
        if frames:
            return cause, frames[-1].lineno or 0
        cause = cause.__cause__ or cause.__context__
    return None


def _same(left: str, right: str) -> bool:
    return os.path.abspath(left) == os.path.abspath(right)


def describe(error: BaseException, file: str | None) -> str:
    """An exception in one line: `ZeroDivisionError (division by zero) at my_masks.py line 7`."""
    found = _user_line(error, file) if file else None
    place = f" at {file} line {found[1]}" if found else ""
    error = found[0] if found else error
    if isinstance(error, SyntaxError) and not found:
        place = f" at {error.filename} line {error.lineno}"
    words = " ".join(str(error).split())  # torch's messages run over lines
    words = words if len(words) <= 300 else words[:297] + "..."
    return f"{type(error).__name__} ({words}){place}"


def load_mask(text: str) -> MaskSource:
    """Reads a --mask value.

    `causal & document` is an expression over `flexcp.masks`. `module:function` and `path/to/file.py:function`
    name a Python object: with the four arguments (b, h, q_idx, kv_idx) it is the mask_mod itself, otherwise a
    factory, called for each batch with the arguments it names among `seq_len` (int) and `doc_ids` ([B, S]
    int64), which returns one.

    Raises:
        UserError: a module, file or function that is not there or raises on import; arguments of another
        name.
    """
    if ":" not in text:
        return MaskSource(text)
    module_name, _, name = text.rpartition(":")
    if not module_name or not name:
        raise UserError(f"--mask {text}: write module:function or path/to/file.py:function")
    module = _import(text, module_name)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=2)
        hint = f": did you mean {' or '.join(near)}?" if near else ": name one of its functions"
        raise UserError(f"--mask {text}: {module_name} has no {name!r}{hint}")
    function = getattr(module, name)
    if not callable(function):
        raise UserError(f"--mask {text} is of type {type(function).__name__}: it must be a function or a mask")
    if isinstance(function, masks.Mask):
        return MaskSource(text, function, None, module.__file__)
    return MaskSource(text, function, _arguments(text, function), module.__file__)


def _import(text: str, module_name: str) -> ModuleType:
    path = Path(module_name).expanduser()
    if path.suffix == ".py":
        if not path.is_file():
            raise UserError(f"--mask {text}: the file {path} does not exist: name a Python file")
        spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
        module = importlib.util.module_from_spec(spec)
        load = lambda: spec.loader.exec_module(module)  # noqa: E731
        file = str(path.resolve())
    else:
        # A console script, unlike `python -m`, does not look for modules in the working directory.
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.append(os.getcwd())
        try:
            spec = importlib.util.find_spec(module_name)
        except Exception:  # a parent package that is missing or raises, or a name that is no module name
            spec = None
        if spec is None or spec.origin is None:
            raise UserError(
                f"--mask {text}: there is no module {module_name!r} in {os.getcwd()} or among the installed ones: "
                "name a module, or a file as path/to/file.py:function"
            )
        file = spec.origin
        module = None
        load = lambda: importlib.import_module(module_name)  # noqa: E731
    try:
        loaded = load()
    except Exception as error:
        raise UserError(f"--mask {text}: importing it raised {describe(error, file)}: correct it there") from error
    return module if module is not None else loaded


def _arguments(text: str, function: Callable) -> tuple[str, ...] | None:
    """The arguments of a factory, or None for a mask_mod."""
    try:
        params = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UserError(f"--mask {text} has no signature that Python can read: wrap it in a function") from None
    named = [p for p in params if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needed = [p.name for p in named if p.default is p.empty]
    known = tuple(p.name for p in named if p.name in FACTORY_ARGUMENTS and p.kind is not p.POSITIONAL_ONLY)
    if len(needed) == 4 and not known:
        return None
    strange = [name for name in needed if name not in known]
    if strange:
        raise UserError(
            f"--mask {text} takes ({', '.join(p.name for p in named)}): a mask_mod takes (b, h, q_idx, kv_idx), a "
            f"factory any of {', '.join(FACTORY_ARGUMENTS)}, and {', '.join(strange)} is neither"
        )
    return known
