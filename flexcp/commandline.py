"""A run's settings from the command line and a YAML file: each wrong flag, field or value gets a sentence."""

import types
import typing
from pathlib import Path

import yaml

from flexcp import flags
from flexcp.checks import check_parts
from flexcp.config import TrainConfig
from flexcp.errors import UserError, unknown


def parse(argv: list[str]) -> TrainConfig:
    """The config of a command line: defaults, then --config, then the flags.

    Raises:
        UserError: an unknown flag, one that does nothing without another, or a config file with an error in it.
        SystemExit: for --help (0) and for a flag without a usable value (2, told by tyro).
    """
    given = {} if {"-h", "--help"} & set(argv) else _given(argv)
    default = from_yaml(given["config"]) if given.get("config", "None") != "None" else TrainConfig()
    config = flags.read(argv, default)
    check_parts(config, given)
    return config


def _given(argv: list[str]) -> dict[str, str]:
    """The flags of a command line and their texts, looked through before tyro, whose errors are boxes of many lines."""
    hints = typing.get_type_hints(TrainConfig)
    given: dict[str, str] = {}
    args = iter(argv)
    for arg in args:
        flag, equals, value = arg.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--"):
            raise UserError(f"{arg!r} belongs to no flag: write --FLAG VALUE, such as --steps 20")
        if hints.get(switch := name.removeprefix("no_")) is bool:
            if equals:
                raise UserError(f"{flag} takes no value: write {flag} alone")
            given[switch] = str(switch == name)
            continue
        if name not in hints:
            raise unknown("flag", flag, ["--" + field.replace("_", "-") for field in hints])
        if not equals and (value := next(args, None)) is None:
            raise UserError(f"{flag} needs a value: write {flag} VALUE")
        kinds = _kinds(hints[name])
        for kind in (int, float):
            if kind in kinds and not (value == "None" and type(None) in kinds):
                try:
                    kind(value)
                except ValueError:
                    raise UserError(f"{flag} is {value!r}, and must be {_wanted(kinds)}") from None
        given[name] = value
    return given


def from_yaml(path: str) -> TrainConfig:
    """A config from a YAML file: a mapping of field names (`seq_len` or `seq-len`) to values.

    Raises:
        UserError: a file that is missing or is no YAML, an unknown field, or a value of the wrong type.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"--config {path} cannot be read ({reason}): name a YAML file") from None
    try:
        values = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"--config {path} is not YAML ({reason}): write lines like `seq_len: 2048`") from None
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise UserError(f"--config {path} holds a {type(values).__name__}: write lines like `seq_len: 2048`")
    hints = typing.get_type_hints(TrainConfig)
    checked = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in hints or name == "config":
            raise UserError(f"--config {path}: {unknown('field', key, [n for n in hints if n != 'config'])}")
        checked[name] = _typed(path, name, value, hints[name])
    return TrainConfig(**checked)


def _typed(path: str, name: str, value: object, hint: object) -> object:
    """A YAML value as the type of its field."""
    kinds = _kinds(hint)
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is float and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return float(value)  # YAML 1.1 reads 3e-4 as a string
            except (ValueError, OverflowError):
                continue
        if kind in (int, str, bool) and type(value) is kind:
            return value
    raise UserError(f"--config {path}: {name} is {value!r}, and must be {_wanted(kinds)}")


def _kinds(hint: object) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _wanted(kinds: tuple[type, ...]) -> str:
    words = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a text",
        type(None): "None (null in YAML)",
    }
    return " or ".join(words[kind] for kind in kinds)
