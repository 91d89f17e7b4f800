"""Weights between a Hugging Face folder and a model: `from_pretrained`, `load_weights`, `save_pretrained`."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from flexcp.models.configs import Llama3Config
from flexcp.models.errors import CheckpointError
from flexcp.models.hf_config import read_config
from flexcp.models.hf_names import from_hf, to_hf
from flexcp.models.llama3 import Llama3, Place
from flexcp.models.safetensors_in import DTYPES, Checkpoint

# Tables that old checkpoints carry although they follow from the config.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def from_pretrained(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    rope_precision: str = "exact",
    config: Llama3Config | None = None,
) -> Llama3:
    """A model with the weights of a Hugging Face folder: config.json and safetensors, in one file or many.

    The memory it takes is the model's and a piece of 32 MiB. Nothing is downloaded, and nothing unpickled.

    Args:
        folder: as `transformers` and `save_pretrained` write it.
        dtype: of the parameters; None: that of the files, which must then all have one.
        device: of the parameters.
        rope_precision: "exact" or "hf", for the bits of transformers (`models/rope.py`).
        config: in place of the folder's config.json, to give its weights another RoPE, for instance.

    Returns:
        A module to be called as `model(tokens, positions) -> logits`; tokens and positions [B, S] int64.

    Raises:
        CheckpointError: what is missing, extra, of another shape, damaged or not supported, by name.
    """
    config = config or read_config(folder, rope_precision)
    with Checkpoint(folder) as checkpoint:
        check_names(config, checkpoint)
        dtype = dtype or stored_dtype(checkpoint)
        with torch.device("meta"):
            model = Llama3(config).to(dtype)
        model.to_empty(device=device)
        load_weights(model, checkpoint)
    return model


def expected_shapes(config: Llama3Config) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by its Hugging Face name; nothing is allocated."""
    with torch.device("meta"):
        return {to_hf(name): tuple(param.shape) for name, param in Llama3(config).named_parameters()}


def check_names(config: Llama3Config, checkpoint: Checkpoint) -> None:
    """Refuses files whose tensors are not the model's.

    A tied model may come with its head, which must then equal the embedding; a derived table may be there.

    Raises:
        CheckpointError: the first tensor that is missing, of another shape or extra, with its file.
    """
    expected = expected_shapes(config)
    for name, shape in expected.items():
        if name not in checkpoint.tensors:
            hint = ""
            if name == "lm_head.weight":
                hint = ": where the head is the embedding, config.json says tie_word_embeddings"
            raise CheckpointError(f"tensor {name!r} {list(shape)} is missing in {checkpoint.folder}{hint}")
        entry = checkpoint.entry(name)
        if entry.shape != shape:
            raise CheckpointError(
                f"{entry.file}: tensor {name!r} is {list(entry.shape)}, and config.json makes it {list(shape)}"
            )
    for name, entry in checkpoint.tensors.items():
        if name in expected or _DERIVED.fullmatch(name):
            continue
        if name == "lm_head.weight" and config.tied_head:
            _require_same_head(checkpoint, expected["model.embed_tokens.weight"])
            continue
        raise CheckpointError(f"{entry.file}: tensor {name!r} {list(entry.shape)} is none of a Llama with this config")


def _require_same_head(checkpoint: Checkpoint, shape: tuple[int, ...]) -> None:
    head, embedding = checkpoint.entry("lm_head.weight"), checkpoint.entry("model.embed_tokens.weight")
    where = f"{head.file}: tensor 'lm_head.weight' {list(head.shape)}"
    if head.shape != shape:
        raise CheckpointError(f"{where} is not as the embedding {list(shape)}, but tie_word_embeddings is true")
    rows = max(1, (16 << 20) // (8 * shape[1]))
    for row in range(0, shape[0], rows):
        blocks = [torch.empty(min(rows, shape[0] - row), shape[1], dtype=DTYPES[e.dtype]) for e in (head, embedding)]
        checkpoint.read("lm_head.weight", blocks[0], (row, 0))
        checkpoint.read("model.embed_tokens.weight", blocks[1], (row, 0))
        different = (blocks[0] != blocks[1]).any(1).nonzero()
        if len(different):
            raise CheckpointError(
                f"{where} differs from the embedding in row {row + int(different[0])}, but tie_word_embeddings is "
                "true: set it to false in config.json to use this head, or remove the tensor"
            )


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The one dtype of all tensors.

    Raises:
        CheckpointError: they have several.
    """
    kinds: dict[str, str] = {}
    for name in checkpoint.tensors:
        if not _DERIVED.fullmatch(name):
            kinds.setdefault(checkpoint.entry(name).dtype, name)
    if len(kinds) > 1:
        told = " and ".join(f"{name!r} is {kind}" for kind, name in kinds.items())
        raise CheckpointError(f"{checkpoint.folder}: tensor {told}: say which dtype the model shall have")
    return DTYPES[next(iter(kinds))]


@torch.no_grad()
def load_weights(model: Llama3, checkpoint: Checkpoint, place: Place | None = None) -> None:
    """Streams a checkpoint into the parameters of a model that has been allocated, file after file.

    Args:
        model: its parameters are filled; none is replaced.
        checkpoint: of the model's names and shapes (`check_names`).
        place: for sharded parameters: from a parameter's name and itself to this rank's part of it, a tensor
            to be filled, and to where that part begins in the whole. None: parameters are whole.
    """
    params = {to_hf(name): param for name, param in model.named_parameters()}
    order = [name for name in checkpoint.tensors if name in params]
    order.sort(key=lambda name: checkpoint.tensors[name].file)
    for name in order:
        if place is None:
            checkpoint.read(name, params[name])
        else:
            checkpoint.read(name, *place(from_hf(name), params[name]))


def weights_of(model: Llama3) -> Iterable[tuple[str, Tensor]]:
    """The model's tensors by their Hugging Face names, a tied head not twice."""
    return ((to_hf(name), param.detach()) for name, param in model.named_parameters())
