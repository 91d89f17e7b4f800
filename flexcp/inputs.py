"""What a run begins with: its documents, its mask, its model."""

from typing import NamedTuple

import torch

from flexcp.config import TrainConfig
from flexcp.data import Documents, open_documents
from flexcp.errors import UserError
from flexcp.models import Checkpoint, CheckpointError, Llama3, build, check_names, from_pretrained
from flexcp.packing import Reader
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
    train, held_out = (
        open_documents(path, config.data_field, tokenizer, vocab_size) if wanted else None
        for path, wanted in ((config.data, True), (config.eval_data, config.eval_data is not None))
    )
    return Inputs(train, held_out, load_mask(config.mask))


def make_reader(config: TrainConfig, documents: Documents) -> Reader:
    """The batches of a run, from the first on."""
    return Reader(
        documents,
        *(config.seq_len, config.batch, config.seed),
        *(config.packing, config.positions, config.long_documents),
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


def make_model(config: TrainConfig, device: torch.device) -> Llama3:
    """The model with its first weights: those of --init-from, or random ones.

    Raises:
        UserError: an --init-from that cannot be used.
    """
    shape = config.model_config()
    if config.init_from is None:
        return build(shape, seed=config.seed, dtype=config.torch_dtype, device=device)
    try:
        return from_pretrained(config.init_from, dtype=config.torch_dtype, device=device, config=shape)
    except CheckpointError as error:
        raise UserError(f"--init-from {config.init_from}: {error}") from None
