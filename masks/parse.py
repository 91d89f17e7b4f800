"""parse: a mask from an expression on a command line, by a whitelist of syntax; nothing runs as Python."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable

from flexcp.masks.core import Mask, lift
from flexcp.masks.registry import library

_OPERATORS: dict[type, Callable[[Mask, Mask], Mask]] = {
    ast.BitAnd: lambda left, right: left & right,
    ast.BitOr: lambda left, right: left | right,
    ast.BitXor: lambda left, right: left ^ right,
}
_MAX_LENGTH = 4096  # characters
_MAX_DEPTH = 50  # nested operators and calls; reading and calling a mask recurse


def parse(expression: str, **bindings: object) -> Mask:
    """Reads a mask expression such as `causal & sliding_window(1024)`.

    The grammar: names of the library (`masks.names()`), with or without parentheses; literal arguments; names
    of bindings; `& | ^ ~` and parentheses. A parameter that the expression leaves out is taken from the
    binding of that name: with `doc_ids=...` bound, `document` alone is `document(doc_ids)`.

    Args:
        expression: the text, at most 4096 characters.
        **bindings: values by name, for arguments; a mask or a function mask_mod(b, h, q_idx, kv_idx) may be
            named in the expression itself.

    Returns:
        The Mask.

    Raises:
        ValueError: syntax that is not in the grammar, an unknown name (near misses are suggested), or a mask
            that needs an argument neither written nor bound.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.parse("causal & (document | prefix_lm(16))", doc_ids=torch.tensor([0, 0, 1, 1]))
        causal() & (document(doc_ids[4]) | prefix_lm(16))
    """
    if not isinstance(expression, str) or not expression.strip():
        raise ValueError(f"A mask expression is needed, such as 'causal & sliding_window(1024)', got {expression!r}.")
    if len(expression) > _MAX_LENGTH:
        raise ValueError(f"A mask expression has at most {_MAX_LENGTH} characters, got {len(expression)}.")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        too_deep = _depth(tree) > _MAX_DEPTH
    except (RecursionError, MemoryError):
        too_deep = True
    except (SyntaxError, ValueError) as error:
        reason = getattr(error, "msg", None) or "it cannot be read"
        raise ValueError(
            f"The mask expression {expression!r} is not valid ({reason}); write it like 'causal & document'."
        ) from None
    if too_deep:
        raise ValueError(
            f"The mask expression {expression[:40]!r}... is nested deeper than {_MAX_DEPTH}; "
            f"build it in Python and name it as module:function."
        )
    return _Reader(expression, bindings).mask(tree)


def _depth(node: ast.AST) -> int:
    return 1 + max((_depth(child) for child in ast.iter_child_nodes(node)), default=0)


class _Reader:
    def __init__(self, expression: str, bindings: dict[str, object]):
        self.expression, self.bindings, self.library = expression, bindings, library()

    def mask(self, node: ast.expr) -> Mask:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](self.mask(node.left), self.mask(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ~self.mask(node.operand)
        if isinstance(node, ast.Name):
            if callable(self.bindings.get(node.id)):
                return lift(self.bindings[node.id])
            return self.build(node.id, [], {})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if any(keyword.arg is None for keyword in node.keywords):
                raise self.refuse(node, "** is not allowed")
            args = [self.argument(arg) for arg in node.args]
            return self.build(node.func.id, args, {k.arg: self.argument(k.value) for k in node.keywords})
        raise self.refuse(node, "only names of masks, calls of them, & | ^ ~ and parentheses are allowed")

    def argument(self, node: ast.expr) -> object:
        if isinstance(node, ast.Name) and node.id in self.bindings:
            return self.bindings[node.id]
        if isinstance(node, ast.Name | ast.Call | ast.BinOp):
            return self.mask(node)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return self.mask(node)
        if isinstance(node, ast.List | ast.Tuple):
            return [self.argument(item) for item in node.elts]
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            raise self.refuse(node, "an argument is a literal, a bound name or a mask") from None

    def build(self, name: str, args: list, kwargs: dict[str, object]) -> Mask:
        factory = self.library.get(name)
        if factory is None:
            near = difflib.get_close_matches(name, self.library, n=3)
            meant = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(
                f"Unknown mask {name!r} in {self.expression!r}: {meant}The library has "
                f"{', '.join(sorted(self.library))}."
            )
        parameters = inspect.signature(factory).parameters
        try:
            given = inspect.signature(factory).bind_partial(*args, **kwargs).arguments
        except TypeError as error:
            raise ValueError(f"{name}: {error}; it takes ({', '.join(parameters)}).") from None
        bound = {key: self.bindings[key] for key in parameters if key not in given and key in self.bindings}
        missing = [
            key
            for key, parameter in parameters.items()
            if key not in given and key not in bound and parameter.default is parameter.empty
        ]
        if missing:
            raise ValueError(
                f"The mask {name!r} in {self.expression!r} needs {' and '.join(missing)}, neither written in "
                f"the expression nor supplied by the caller; write {name}(...) or bind {missing[0]}=."
            )
        return factory(*args, **kwargs, **bound)

    def refuse(self, node: ast.expr, why: str) -> ValueError:
        part = ast.get_source_segment(self.expression.strip(), node) or ast.unparse(node)
        return ValueError(f"Cannot read {part!r} in the mask expression {self.expression!r}: {why}.")
