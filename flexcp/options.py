"""The settings of a run by topic, as --help shows them; `config` has them all in one, and `flags` makes flags of them.

Fields are plain strings and numbers so that any of them can stand in a file or on the command line, and so that a wrong
one is answered with a sentence and near misses.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """What is trained, and how its layers compute."""

    model: str | None = None
    """The model's shape: a name such as llama3.1-8b, or a folder with a config.json. Left out: llama3-debug, or the
    shape of --init-from."""

    init_from: str | None = None
    """A Hugging Face folder whose weights to begin with (config.json and safetensors); left out, they are random."""

    init_on: str = "cpu"
    """Where random weights are drawn: cpu, the same on every machine; or device, much faster for a large model on a
    GPU, and the same only on GPUs of one kind."""

    rope_precision: str = "exact"
    """Of the rotary phases: exact (float64), or hf, in float32 as transformers computes them."""

    dtype: str = "float32"
    """Of the parameters: float32, bfloat16 (AdamW keeps fp32 copies) or float64."""

    fp8: str = "none"
    """Products of the layers' matrices in fp8, by torchao: none, rowwise, rowwise_with_gw_hp, tensorwise, or
    tensorwise_all_gather, which also sends the weights as fp8. Emulated on a CPU."""

    fp8_modules: str = "all"
    """Which of them: all; large, those that gain by it; or names with commas between, such as
    gate_proj,up_proj,down_proj."""

    compile: str = "off"
    """on: each layer is one graph, compiled by inductor; aot_eager: one graph, run operation by operation, to debug."""


@dataclass(frozen=True)
class Data:
    """What it is trained on."""

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


@dataclass(frozen=True)
class Training:
    """How long, and in which portions."""

    seq_len: int = 2048
    """Tokens in a row, over all ranks."""

    batch: int = 1
    """Rows in a step, over all ranks and micro-batches."""

    grad_accum: int = 1
    """Micro-batches into which a rank's rows of a step are divided; the last may have fewer rows."""

    steps: int = 20
    """Steps to train."""

    seed: int = 0
    """Of the weights and of the order of the documents."""


@dataclass(frozen=True)
class Parallelism:
    """The grid of ranks: dp_replicate x dp_shard x cp x tp."""

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

    timeout_s: int = 0
    """Seconds after which a rank that waits for another one gives up; 0: torch's own, 600 over NCCL, 1800 over gloo."""


@dataclass(frozen=True)
class Attention:
    """Which keys a token sees, and how they reach it."""

    mask: str = "causal & document"
    """What a token sees: an expression over flexcp.masks, module:function, or path/to/file.py:function."""

    comm: str = "auto"
    """How keys and values reach the ranks: auto, gather, ring, exchange, ulysses, or ulysses+ring and the like."""

    balance: str = "auto"
    """How a sequence is divided: auto, contiguous, head_tail, per_document, ptrr, min_heap or affinity."""


@dataclass(frozen=True)
class Memory:
    """What makes long sequences fit."""

    memory: str = "given"
    """given: these options as they are; auto: as many of them turned on as are needed to fit; unchecked: as they are,
    even where the prediction, an upper bound, says that they do not fit."""

    ac: str = "none"
    """Activations kept for backward: none but the layers' inputs (full), also attention's output, which is then never
    computed twice (selective), or all (none)."""

    offload: str = "off"
    """on: what --ac keeps waits in host memory for backward."""

    offload_keep: float = 0.0
    """GiB of what --offload moves that stay on the GPU, the newest."""

    offload_fp8: str = "off"
    """on: what --offload moves is stored in 8 bits, which rounds every element by up to a sixteenth."""

    tile: int = 0
    """Tokens that norms, projections and the MLP take at a time; 0: all. With --ac."""

    head_serial: int = 1
    """Groups of KV heads that attention takes one after the other, making q, k and v anew for each. With --ac."""

    checkpoint_every: int = 1
    """Layers from one kept input to the next. With --ac."""

    loss_chunk: int = 0
    """Tokens of which the loss takes the logits at a time; 0: all."""


@dataclass(frozen=True)
class Optimizer:
    """How the weights learn."""

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

    z_loss: float = 0.0
    """Factor on the square of the log of the softmax's denominator, added to the loss."""


@dataclass(frozen=True)
class Evaluation:
    """The loss on data that is held out."""

    eval_data: str | None = None
    """Held-out data, of the same kinds as --data."""

    eval_every: int = 0
    """Steps between evaluations on --eval-data; 0: only after the last."""

    eval_batches: int = 8
    """Batches in an evaluation."""


@dataclass(frozen=True)
class Output:
    """What is written to disk, and gone on from."""

    out: str | None = None
    """Folder for config.yaml, metrics.jsonl, eval.jsonl, checkpoints and, at the end, the folder `model`, which
    transformers and --init-from load; the files of an earlier run are replaced, and its checkpoints never."""

    save_model: str = "on"
    """off: OUT gets no folder `model` at the end."""

    save_every: int = 0
    """Steps between checkpoints, in OUT/checkpoints; the last step has one, too. 0: none."""

    save_mode: str = "async"
    """async: files are written while the training goes on; sync: the training waits for them."""

    keep_last: int = 3
    """The newest checkpoints that are kept; 0 keeps all."""

    resume: str = "none"
    """auto: go on from the newest complete checkpoint in OUT/checkpoints, if there is one; none; or a checkpoint's or a
    run's folder."""


@dataclass(frozen=True)
class Logging:
    """What a run tells of itself beside metrics.jsonl."""

    log_every: int = 1
    """Steps between lines on the terminal."""

    log: str = "none"
    """Where records go besides metrics.jsonl: tensorboard, wandb or trackio, several with commas between."""

    profile: str | None = None
    """START:STOP: a trace of these steps (from 1, without STOP) for each rank, in OUT/profile."""

    memory_snapshot: int = 0
    """The step after which each GPU's memory, with its history, is written to OUT/memory; 0: none."""


@dataclass(frozen=True)
class Simulation:
    """One rank of many, alone."""

    simulate_rank: int | None = None
    """Be this one rank of --world alone; the others are played by copies of the right size."""

    world: int = 8
    """Ranks of the group of which --simulate-rank is one."""

    simulate_gb_s: float = 450.0
    """10^9 bytes a second that the simulated rank receives, on a GPU."""


# In the order of --help.
GROUPS = {
    "model": Model,
    "data": Data,
    "training": Training,
    "parallelism": Parallelism,
    "attention": Attention,
    "memory": Memory,
    "optimizer": Optimizer,
    "evaluation": Evaluation,
    "output": Output,
    "logging": Logging,
    "simulation": Simulation,
}
