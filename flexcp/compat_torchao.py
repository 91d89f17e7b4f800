"""torchao, imported where it is used: that takes a second, and tells of each GPU library that does not load here."""

import importlib
import logging
import warnings
from types import ModuleType

_NOISY = ("torchao", "torchao.kernel.intmm", "torch.utils._pytree")


def torchao(module: str) -> ModuleType:
    """`torchao.MODULE`, without the remarks of its import, which nobody who trains on this machine can act upon."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Where it has not been compiled to .pyc yet, Python says that its strings have invalid escape sequences: as
            # a SyntaxWarning from 3.12 on, which everyone sees, and as a DeprecationWarning before.
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(f"torchao.{module}")
    finally:
        for logger, level in zip(loggers, levels):
            logger.setLevel(level)
