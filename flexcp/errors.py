"""The one exception of the trainer that is an answer and not a defect."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A wrong use of the trainer, told in one sentence: what was given, what is needed, what to do.

    The command line prints the sentence without a traceback and ends with exit code 2.
    """


def unknown(kind: str, name: object, known: Iterable[str]) -> UserError:
    """The error for a name that is not known, with its near misses.

    >>> print(unknown("comm", "gatter", ["auto", "gather", "ring"]))
    unknown comm 'gatter': did you mean gather? (known: auto, gather, ring)
    """
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=2, cutoff=0.5)
    hint = f": did you mean {' or '.join(near)}?" if near else ""
    return UserError(f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})")
