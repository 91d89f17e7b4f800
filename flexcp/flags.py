"""The command line of flexcp.train: a flag for each setting, in the groups of `options`."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing
from typing import Annotated, Any

import tyro

from flexcp.config import TrainConfig
from flexcp.options import GROUPS


def read(argv: list[str], default: TrainConfig) -> TrainConfig:
    """The settings of a command line, over the default ones.

    Raises:
        SystemExit: for --help (0) and for a flag without a usable value (2, told by tyro).
    """
    grouped = {name: _described(group) for name, group in GROUPS.items()}
    members: list[Any] = [
        (name, group, dataclasses.field(default=group(**_values(default, group)))) for name, group in grouped.items()
    ]
    alone = _described(TrainConfig, list(_texts(TrainConfig)))
    # What belongs to no group comes first, beside --help.
    every = dataclasses.make_dataclass("Flags", members, bases=(alone,), frozen=True, kw_only=True)
    read = tyro.cli(
        every,
        prog="flexcp.train",
        description=inspect.getdoc(TrainConfig),
        args=argv,
        default=every(**_values(default, alone)),
        config=(tyro.conf.OmitArgPrefixes,),  # --lr, and not --optimizer.lr
    )
    given = {name: value for group in grouped for name, value in vars(getattr(read, group)).items()}
    return TrainConfig(**given, **_values(read, alone))


def _values(of: object, like: type) -> dict[str, Any]:
    return {field.name: getattr(of, field.name) for field in dataclasses.fields(like)}


def _described(group: type, names: list[str] | None = None) -> type:
    """The same fields, whose texts tyro need not look for: it keeps the breaks of lines within them."""
    hints, texts = typing.get_type_hints(group), _texts(group)
    fields: list[Any] = [
        (
            field.name,
            Annotated[hints[field.name], tyro.conf.arg(help=texts[field.name])],
            dataclasses.field(default=field.default),
        )
        for field in dataclasses.fields(group)
        if names is None or field.name in names
    ]
    made = dataclasses.make_dataclass(group.__name__, fields, frozen=True)
    made.__doc__ = group.__doc__
    return made


def _texts(group: type) -> dict[str, str]:
    """The text below each field in a class's own body, in one line."""
    (body,) = [
        node.body
        for node in ast.parse(textwrap.dedent(inspect.getsource(group))).body
        if isinstance(node, ast.ClassDef)
    ]
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
