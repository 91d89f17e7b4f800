"""The library by name."""

from __future__ import annotations

from collections.abc import Callable

from flexcp.masks.causal import causal, full
from flexcp.masks.core import Mask
from flexcp.masks.document import document
from flexcp.masks.prefix_lm import prefix_lm
from flexcp.masks.sliding_window import sliding_window

_FACTORIES = (causal, full, sliding_window, document, prefix_lm)


def library() -> dict[str, Callable[..., Mask]]:
    """The factories that an expression may name, by name."""
    return {factory.__name__: factory for factory in _FACTORIES}


def names() -> list[str]:
    """The names of the library's masks, as `parse` knows them.

    Example:
        >>> from flexcp import masks
        >>> "causal" in masks.names()
        True
    """
    return sorted(library())
