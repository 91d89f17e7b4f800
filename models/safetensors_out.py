"""A model as a Hugging Face folder: safetensors in shards, an index, config.json, tokenizer files.

The folder appears whole or not at all: it is written under another name beside its place, flushed to the
disk, and renamed. Tensors are written one by one, so that no more than one lies in memory beside the model.
"""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from flexcp.models.durable import sync_folder, write_durably
from flexcp.models.errors import CheckpointError
from flexcp.models.hf_config import config_to_hf, read_json
from flexcp.models.llama3 import Llama3
from flexcp.models.pretrained import weights_of
from flexcp.models.safetensors_in import DTYPES, INDEX, SINGLE

SHARD_BYTES = 5_000_000_000
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# What belongs to a model and is not weights or shape.
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)


def save_pretrained(
    model: Llama3,
    folder: str | Path,
    *,
    origin: str | Path | None = None,
    tokenizer: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    whole: Callable[[Tensor], Tensor] | None = None,
) -> Path:
    """Writes a folder that `transformers` and `from_pretrained` load.

    Args:
        model: all parameters of one floating-point dtype.
        folder: where; a model folder that is already there is replaced.
        origin: the folder that the model came from: tokenizer files are copied, and the token ids of its
            config.json kept.
        tokenizer: a tokenizer.json, where there is no origin or it is another one.
        shard_bytes: the most bytes of tensors in one file; a larger tensor has a file of its own.
        whole: where ranks hold only parts of parameters: from a part to the whole, called once for each of
            `weights_of(model)`, in its order, so that one rank can write while the others call it as well.

    Returns:
        The folder.

    Raises:
        CheckpointError: the folder cannot be written, or holds something else than a model.
    """
    folder = Path(folder).expanduser().absolute()
    weights = list(weights_of(model))
    dtypes = {tensor.dtype for _, tensor in weights}
    if len(dtypes) != 1 or not dtypes <= set(_NAMES):
        raise CheckpointError(
            f"a model of {sorted(map(str, dtypes))} cannot be saved: it must have one dtype of weights"
        )
    if shard_bytes < 1:
        raise CheckpointError(f"shard_bytes is {shard_bytes}, and must be at least 1")
    origin = None if origin is None else Path(origin).expanduser()
    kept: dict[str, Any] = {}
    if origin is not None and (origin / "config.json").exists():
        kept = read_json(origin / "config.json", "model's config")
    require_replaceable(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
        try:
            os.chmod(temporary, 0o777 & ~_umask())
            _write_weights(temporary, weights, shard_bytes, whole)
            fields = config_to_hf(model.config, dtypes.pop(), kept)
            write_durably(temporary / "config.json", json.dumps(fields, indent=2) + "\n")
            for path in _companions(origin, tokenizer):
                write_durably(temporary / path[1], path[0].read_bytes())
            sync_folder(temporary)
            _put(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written ({error.strerror}: {error.filename})") from None
    return folder


def _companions(origin: Path | None, tokenizer: str | Path | None) -> list[tuple[Path, str]]:
    """Files to copy, with their new names."""
    files = {}
    if origin is not None:
        files = {name: origin / name for name in COMPANIONS if (origin / name).is_file()}
    if tokenizer is not None:
        files["tokenizer.json"] = Path(tokenizer).expanduser()
    return [(path, name) for name, path in files.items()]


def _write_weights(
    folder: Path, weights: list[tuple[str, Tensor]], shard_bytes: int, whole: Callable[[Tensor], Tensor] | None
) -> None:
    shards: list[list[tuple[str, Tensor]]] = []
    room = 0
    for name, tensor in weights:
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append((name, tensor))
        room -= tensor.nbytes
    if len(shards) == 1:
        _write_file(folder / SINGLE, shards[0], whole)
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(folder / file, shard, whole)
        weight_map |= {name: file for name, _ in shard}
    total = sum(tensor.nbytes for _, tensor in weights)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_durably(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _write_file(path: Path, tensors: list[tuple[str, Tensor]], whole: Callable[[Tensor], Tensor] | None = None) -> None:
    """One file of the format, in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors:
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name]["data_offsets"] = [at, at + tensor.nbytes]
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors:
            _write_tensor(file, tensor if whole is None else whole(tensor))
        file.flush()
        os.fsync(file.fileno())


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    flat = tensor.cpu().contiguous().flatten()
    file.write(memoryview(flat.view(torch.uint8).numpy()))


def require_replaceable(folder: Path) -> None:
    """Refuses a place where `save_pretrained` would have to remove something else than a model.

    Raises:
        CheckpointError: a file, or a folder that holds files and no config.json.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds files, and no model to be replaced: name another folder")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file: name another place for the model's folder")


def _put(temporary: Path, folder: Path) -> None:
    """Renames; a folder in the way goes aside first, and comes back where that fails."""
    if not folder.exists():
        os.rename(temporary, folder)
    else:
        aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
        os.rename(folder, aside / "old")
        try:
            os.rename(temporary, folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.rename(aside / "old", folder)
            raise
        finally:
            if folder.exists():
                shutil.rmtree(aside, ignore_errors=True)
    sync_folder(folder.parent)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
