"""What a run begins with: its documents, its mask, its model."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexcp.config import TrainConfig
from flexcp.data import Documents, open_documents
from flexcp.errors import UserError
from flexcp.mesh import Mesh
from flexcp.models import Checkpoint, CheckpointError, Llama3, check_names, load_weights, save_pretrained, weights_of
from flexcp.packing import Reader
from flexcp.parallelize import parallelize, place, whole
from flexcp.tokenizer import find_tokenizer, load_tokenizer
from flexcp.usermask import MaskSource, load_mask


class Inputs(NamedTuple):
    """What a run reads."""

    train: Documents
    held_out: Documents | None
    mask: MaskSource


def read_inputs(config: TrainConfig) -> Inputs:
    """What a run reads: training and held-out documents, and the mask.

    Raises:
        UserError: a file that cannot be used.
    """
    tokenizer = load_tokenizer(find_tokenizer(config.tokenizer, config.origin))
    vocab_size = config.model_config().vocab_size
    train = open_documents(config.data, config.data_field, tokenizer, vocab_size)
    held_out = None
    if config.eval_data is not None:
        try:
            held_out = open_documents(config.eval_data, config.data_field, tokenizer, vocab_size)
        except UserError as error:  # whose words are about the option that most data come by
            raise UserError(str(error).replace("--data ", "--eval-data ", 1)) from None
    return Inputs(train, held_out, load_mask(config.mask))


def make_reader(config: TrainConfig, documents: Documents, state: dict[str, Any] | None = None) -> Reader:
    """The batches of a run, from the first on, or from where another reader's state says."""
    return Reader(
        documents,
        *(config.seq_len, config.batch, config.seed),
        *(config.packing, config.positions, config.long_documents),
        state,
    )


def check_init(config: TrainConfig) -> None:
    """Refuses an --init-from whose files are damaged or not of the model's shape, from their headers alone.

    Raises:
        UserError: naming the tensor or file.
    """
    try:
        with Checkpoint(config.init_from) as checkpoint:
            check_names(config.model_config(), checkpoint)
    except CheckpointError as error:
        raise UserError(f"--init-from {config.init_from}: {error}") from None


def make_model(config: TrainConfig, mesh: Mesh, device: torch.device) -> Llama3:
    """The model, parallel, with its first weights: those of --init-from, or random ones.

    No rank ever holds more of the weights than its part.

    Raises:
        UserError: an --init-from that cannot be used.
    """
    shape = config.model_config()
    with torch.device("meta"):
        model = Llama3(shape).to(config.torch_dtype)
    parallelize(model, mesh, config.parallel(device))
    model.to_empty(device=device)
    if config.init_from is None:
        model.init_weights(config.seed, place, device if config.init_on == "device" else torch.device("cpu"))
        return model
    try:
        with Checkpoint(config.init_from) as checkpoint:
            check_names(shape, checkpoint)
            load_weights(model, checkpoint, place)
    except CheckpointError as error:
        raise UserError(f"--init-from {config.init_from}: {error}") from None
    return model


def save_model(config: TrainConfig, model: Llama3, mesh: Mesh, folder: Path) -> None:
    """Writes the model as a Hugging Face folder. A collective; rank 0 writes.

    Raises:
        UserError: the folder cannot be written.
    """
    if mesh.rank > 0:
        for _, tensor in weights_of(model):
            whole(tensor)
        return
    try:
        save_pretrained(model, folder, origin=config.origin, whole=whole)
    except CheckpointError as error:
        raise UserError(f"the trained model: {error}") from None
