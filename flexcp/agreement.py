"""Do all ranks plan the same thing? Compared before anything depends on it, since a disagreement would hang or, worse,
compute something.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from flexcp.blocksource import ClosedFormMask
from flexcp.comm import Link
from flexcp.table import Table

# Fixed, so that another version of flexcp, with other fields, is told and not waited for.
_FIELDS, _TEXT_BYTES = 16, 400
_REFUSED = -1  # in the place of every field: this rank has raised


class PlanMismatch(ValueError):
    """Ranks of one group made plans that differ, or one of them could make none; raised on all others, too."""


def agree(link: Link | None, fields: Mapping[str, object], device: torch.device) -> None:
    """Compares the fields between all ranks. A collective.

    Raises:
        PlanMismatch: on every rank, with the first field that differs, the ranks that differ and their values; or with
            what another rank raised inside `others_are_told`.
    """
    if link is None or link.size == 1:
        return
    texts = {name: str(value) for name, value in fields.items()}
    digests = [_number(name + text) for name, text in texts.items()]
    mine = torch.tensor(digests + [0] * (_FIELDS - len(digests)), dtype=torch.int64, device=device)
    every = link.all_gather(mine).cpu()
    refused = (every == _REFUSED).all(1).nonzero()[:, 0].tolist()
    if refused:
        said = _tell(link, "", device)
        raise PlanMismatch(f"rank {refused[0]} of the group could not plan: {said[refused[0]]}")
    differs = (every != every[:1]).any(0).nonzero()[:, 0].tolist()
    if not differs:
        return
    at = differs[0]
    # All ranks have seen the same numbers and so come here together.
    name, text = list(texts.items())[at] if at < len(texts) else ("number of fields", str(len(texts)))
    said = _tell(link, f"{name}\n{text}", device)
    usual, _ = Counter(said).most_common(1)[0]
    odd = [rank for rank, what in enumerate(said) if what != usual] or list(range(1, link.size))
    values = "; ".join(f"rank {rank}: {said[rank].partition(chr(10))[2]}" for rank in odd[:4])
    ranks = f"rank {odd[0]} disagrees" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} disagree"
    raise PlanMismatch(
        f"the ranks planned different things: {ranks} with the others about {usual.partition(chr(10))[0]} "
        f"({values}; the others: {usual.partition(chr(10))[2]}); call flexcp.plan with equal arguments on every rank"
    )


@contextmanager
def others_are_told(link: Link | None, device: torch.device) -> Iterator[None]:
    """What is raised inside ends all ranks: the others wait for this one in `agree`, so it goes there first."""
    try:
        yield
    except PlanMismatch:  # all ranks know
        raise
    except Exception as error:
        if link is not None and link.size > 1:
            link.all_gather(torch.full((_FIELDS,), _REFUSED, dtype=torch.int64, device=device))
            _tell(link, f"{type(error).__name__}: {error}", device)
        raise


def _tell(link: Link, text: str, device: torch.device) -> list[str]:
    """The text of each rank."""
    return [_decode(row) for row in link.all_gather(_encode(text).to(device)).cpu()]


def table_digest(table: Table) -> str:
    """What a table says, in 16 hexadecimal digits."""
    found = hashlib.blake2b(table.counts.tobytes(), digest_size=8)
    found.update(table.bits.tobytes())
    return found.hexdigest()


def mask_digest(mask: Any) -> str:
    """A mask's expression or name, and a digest of what it captures: tensors, numbers, functions."""
    found = hashlib.blake2b(digest_size=8)
    _feed(found, mask, set())
    name = getattr(mask, "__name__", type(mask).__name__)
    if isinstance(mask, ClosedFormMask) and " at 0x" not in repr(mask):
        name = repr(mask)
    return f"{name[:120]} #{found.hexdigest()}"


_READ_WHOLE = (
    Tensor,
    bool,
    int,
    float,
    complex,
    str,
    list,
    tuple,
    dict,
    BlockMask,
    ClosedFormMask,
    partial,
    FunctionType,
)


def _feed(found: Any, value: Any, seen: set[int]) -> None:
    """Adds everything that a mask's answers may depend on, as far as it can be found."""
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        found.update(f"{tuple(value.shape)} {value.dtype}".encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        found.update(repr(value).encode())
        return
    seen.add(id(value))
    if isinstance(value, BlockMask):
        for item in value.as_tuple():
            _feed(found, item, seen)
    elif isinstance(value, (list, tuple)):
        found.update(b"[")
        for item in value:
            _feed(found, item, seen)
        found.update(b"]")
    elif isinstance(value, dict):
        for key, item in value.items():
            found.update(str(key).encode())
            _feed(found, item, seen)
    elif isinstance(value, partial):
        _feed(found, [value.func, value.args, value.keywords], seen)
    elif isinstance(value, FunctionType):
        _feed_function(found, value, None, seen)
    elif isinstance(value, MethodType):
        _feed_function(found, value.__func__, value.__self__, seen)
    else:
        found.update(type(value).__qualname__.encode())
        if isinstance(value, ClosedFormMask):
            _feed(found, vars(value), seen)
        elif callable(value) and isinstance(type(value).__call__, FunctionType):
            _feed_function(found, type(value).__call__, value, seen)


def _feed_function(found: Any, function: FunctionType, owner: object, seen: set[int]) -> None:
    """A function's code and all that it captures; of objects, the attributes whose names its code holds."""
    code = function.__code__
    _feed_code(found, code, seen)
    _feed(found, function.__defaults__, seen)
    _feed(found, function.__kwdefaults__, seen)
    names = _names(code)
    captured = [owner, *(function.__globals__.get(name) for name in names)]
    for cell in function.__closure__ or ():
        try:
            captured.append(cell.cell_contents)
        except ValueError:  # not yet filled
            found.update(b"empty")
    for value in captured:
        if isinstance(value, _READ_WHOLE):
            _feed(found, value, seen)
        elif value is not None and not isinstance(value, ModuleType):
            for name in names:
                item = getattr(value, name, None)
                if isinstance(item, _READ_WHOLE):
                    _feed(found, item, seen)


def _names(code: CodeType) -> list[str]:
    """The global and attribute names in a function's code and in the functions inside it."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return sorted({*code.co_names, *inner})


def _feed_code(found: Any, code: CodeType, seen: set[int]) -> None:
    found.update(code.co_code)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _feed_code(found, constant, seen)
        else:
            _feed(found, constant, seen)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _encode(text: str) -> Tensor:
    data = text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
    return torch.tensor(list(data), dtype=torch.uint8)


def _decode(row: Tensor) -> str:
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore")
