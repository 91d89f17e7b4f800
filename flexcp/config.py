"""The settings of a run and their defaults; `commandline` reads them, and `checks` says what must hold between them.

Fields are plain strings and numbers so that any of them can stand in a file or on the command line, and so that a wrong
one is answered with a sentence and near misses.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml

from flexcp.errors import UserError, unknown
from flexcp.leanlayer import Lean
from flexcp.longoptions import LongOptions
from flexcp.models import CONFIGS, CheckpointError, Llama3Config, get_config, read_config
from flexcp.offload import Store
from flexcp.parallelize import Parallel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
DEFAULT_MODEL = "llama3-debug"
COMPILE_BACKENDS = {"off": None, "on": "inductor", "aot_eager": "aot_eager"}


@dataclass(frozen=True)
class TrainConfig(LongOptions):
    """Trains a Llama 3 under context parallelism: `flexcp.train --model llama3-debug --cp 2 --steps 20`.

    Without torchrun's variables it starts its own ranks; `torchrun -m flexcp.train` is the same program.
    """

    model: str | None = None
    """The model's shape: a name such as llama3.1-8b, or a folder with a config.json. Left out: llama3-debug, or the
    shape of --init-from."""

    init_from: str | None = None
    """A Hugging Face folder whose weights to begin with (config.json and safetensors); left out, they are random."""

    rope_precision: str = "exact"
    """Of the rotary phases: exact (float64), or hf, in float32 as transformers computes them."""

    cp: int = 1
    """Ranks among which each sequence is divided; -1, of this or one other axis: the rest of the ranks."""

    dp_shard: int = 1
    """Ranks with rows of their own, which divide the parameters together with the cp ranks."""

    dp_replicate: int = 1
    """Copies of all that, with rows of their own."""

    tp: int = 1
    """Ranks among which the matrices and heads of each layer are divided."""

    pp: int = 1
    """Pipeline stages: only 1, since pipeline parallelism is no part of flexcp."""

    fsdp: str = "on"
    """on: parameters, gradients and optimizer states are divided over dp_shard x cp; off: every rank holds them all."""

    ac: str = "none"
    """Activations kept for backward: none but the layers' inputs (full), also attention's output, which is then never
    computed twice (selective), or all (none)."""

    fp8: str = "none"
    """Products of the layers' matrices in fp8, by torchao: none, rowwise, rowwise_with_gw_hp, tensorwise, or
    tensorwise_all_gather, which also sends the weights as fp8. Emulated on a CPU."""

    compile: str = "off"
    """on: each layer is one graph, compiled by inductor; aot_eager: one graph, run operation by operation, to debug."""

    offload: str = "off"
    """on: what --ac keeps waits in host memory for backward."""

    seq_len: int = 2048
    """Tokens in a row, over all ranks."""

    batch: int = 1
    """Rows in a step, over all ranks and micro-batches."""

    grad_accum: int = 1
    """Micro-batches into which a rank's rows of a step are divided; the last may have fewer rows."""

    steps: int = 20
    """Steps to train."""

    data: str | None = None
    """Text, .jsonl, .parquet or .bin with .bin.json: a file, or a folder; also a folder saved by `datasets`. The text
    files of this checkout where left out."""

    data_field: str = "text"
    """Of .jsonl, .parquet and `datasets`: with the text, or with a conversation (a list of messages with role and
    content, of which the assistant's are learned)."""

    tokenizer: str | None = None
    """A tokenizer.json, its folder, or bytes; that of the model's folder, else bytes, where left out."""

    packing: str = "concat"
    """concat: documents end to end, cut into rows; first_fit: whole documents in rows, what is left over padded."""

    positions: str = "reset"
    """reset: each document's tokens count from 0; continuous: each row's do."""

    long_documents: str = "split"
    """A document longer than a row: split it, truncate it (what is cut is counted), or refuse it."""

    eval_data: str | None = None
    """Held-out data, of the same kinds as --data."""

    eval_every: int = 0
    """Steps between evaluations on --eval-data; 0: only after the last."""

    eval_batches: int = 8
    """Batches in an evaluation."""

    mask: str = "causal & document"
    """What a token sees: an expression over flexcp.masks, module:function, or path/to/file.py:function."""

    comm: str = "auto"
    """How keys and values reach the ranks: auto, gather, ring, exchange, ulysses, or ulysses+ring and the like."""

    balance: str = "auto"
    """How a sequence is divided: auto, contiguous, head_tail, per_document, ptrr, min_heap or affinity."""

    dtype: str = "float32"
    """Of the parameters: float32, bfloat16 (AdamW keeps fp32 copies) or float64."""

    seed: int = 0
    """Of the weights and of the order of the documents."""

    optim: str = "adamw"
    """adamw; adamw8bit: moments of 8 bits; or adamw_bf16: moments of bf16. Weights of bfloat16 have fp32 copies under
    adamw, and are rounded at random under the others, so that small steps add up."""

    optim_step: str = "after"
    """after backward, or in_backward: each parameter as soon as its gradient is there, which then takes no memory."""

    lr: float = 3e-3
    """The learning rate after warm-up; a cosine takes it down to a tenth at the last step."""

    warmup_steps: int = 5
    """Steps in which the learning rate rises to lr."""

    weight_decay: float = 0.1
    """Of AdamW; norms do not decay."""

    grad_clip: float | None = 1.0
    """The largest global norm of the gradients; None clips nothing."""

    log_every: int = 1
    """Steps between lines on the terminal."""

    log: str = "none"
    """Where records go besides metrics.jsonl: tensorboard, wandb or trackio, several with commas between."""

    profile: str | None = None
    """START:STOP: a trace of these steps (from 1, without STOP) for each rank, in OUT/profile."""

    memory_snapshot: int = 0
    """The step after which each GPU's memory, with its history, is written to OUT/memory; 0: none."""

    save_every: int = 0
    """Steps between checkpoints, in OUT/checkpoints; the last step has one, too. 0: none."""

    save_mode: str = "async"
    """async: files are written while the training goes on; sync: the training waits for them."""

    keep_last: int = 3
    """The newest checkpoints that are kept; 0 keeps all."""

    resume: str = "none"
    """auto: go on from the newest complete checkpoint in OUT/checkpoints, if there is one; none; or a checkpoint's or a
    run's folder."""

    out: str | None = None
    """Folder for config.yaml, metrics.jsonl, eval.jsonl, checkpoints and, at the end, the folder `model`, which
    transformers and --init-from load; the files of an earlier run are replaced, and its checkpoints never."""

    config: str | None = None
    """A YAML file with values for any of these fields; the command line wins over it."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def model_name(self) -> str:
        """What the model is called: the name or folder that its shape comes from."""
        return self.model or self.init_from or DEFAULT_MODEL

    @property
    def origin(self) -> str | None:
        """The folder whose tokenizer and token ids belong to the model, if it comes from one."""
        return self.init_from or (self.model if self.model and self.model not in CONFIGS else None)

    def model_config(self) -> Llama3Config:
        """The shape of the model, from its name or its folder.

        Raises:
            UserError: a name or folder that is not there, or a config.json that is not supported.
        """
        place = self.model_name
        try:
            if place in CONFIGS and place != self.init_from:
                return dataclasses.replace(get_config(place), rope_precision=self.rope_precision)
            if Path(place).expanduser().is_dir():
                return read_config(place, self.rope_precision)
        except CheckpointError as error:
            raise UserError(f"--{'model' if self.model else 'init-from'} {place}: {error}") from None
        if self.model is None:
            raise UserError(f"--init-from {place} is no folder: name one with config.json and safetensors")
        raise UserError(f"{unknown('model', place, CONFIGS)}, or name a folder with a config.json")

    def parallel(self, device: torch.device) -> Parallel:
        """What is done to the model."""
        store = None
        if self.offload == "on":
            store = Store(device, keep_bytes=int(self.offload_keep * 2**30), fp8=self.offload_fp8 == "on")
        lean = Lean(self.tile, self.head_serial, self.ac == "selective", self.checkpoint_every)
        backend = COMPILE_BACKENDS[self.compile]
        return Parallel(self.fsdp == "on", self.ac, store, self.fp8, None if lean.is_plain else lean, backend)

    def to_yaml(self) -> str:
        """The resolved values as YAML that --config reads back."""
        values = dataclasses.asdict(self)
        for name in ("config", "dry_run"):  # the values of the first are in here already
            del values[name]
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
