"""What must hold between the settings of a run, looked at before ranks are started and again in each rank."""

import dataclasses
import math
import tempfile
from collections.abc import Container
from pathlib import Path

from flexcp import activation, loggers, planner, profiling
from flexcp.balance import BALANCES
from flexcp.config import COMPILE_BACKENDS, DTYPES, TrainConfig
from flexcp.errors import UserError, unknown
from flexcp.fp8 import RECIPES, check_fp8, chosen_modules
from flexcp.group import ulysses_ranks
from flexcp.heads import check_heads
from flexcp.mesh import Degrees, resolve
from flexcp.models import CheckpointError, require_replaceable
from flexcp.models.rope import PRECISIONS
from flexcp.optim import OPTIMIZERS
from flexcp.packing import LONG_DOCUMENTS, PACKINGS, POSITIONS
from flexcp.tp import check_tp

COMMS = ("auto", *planner.COMMS)
SAVE_MODES = ("async", "sync")
_DEFAULTS = TrainConfig()


def check(config: TrainConfig) -> None:
    """Refuses values that no run can use. Costs nothing and looks at nothing but the config.

    Raises:
        UserError: naming the flag, the value and what it must be.
    """
    names = (
        *(("comm", COMMS), ("balance", BALANCES), ("dtype", DTYPES), ("rope_precision", PRECISIONS)),
        *(("ac", activation.MODES), ("offload", ("on", "off")), ("fsdp", ("on", "off"))),
        ("compile", tuple(COMPILE_BACKENDS)),
        *(("fp8", RECIPES), ("optim", OPTIMIZERS), ("optim_step", ("after", "in_backward"))),
        *(("packing", PACKINGS), ("positions", POSITIONS), ("long_documents", LONG_DOCUMENTS)),
        *(("save_mode", SAVE_MODES), ("memory", ("given", "auto", "unchecked")), ("offload_fp8", ("on", "off"))),
        *(("save_model", ("on", "off")), ("init_on", ("cpu", "device"))),
    )
    for name, known in names:
        if getattr(config, name) not in known:
            raise unknown(name, getattr(config, name), known)
    config.model_config()
    for name in ("seq_len", "batch", "grad_accum", "steps", "log_every", "eval_batches", "checkpoint_every", "world"):
        _demand(config, name, getattr(config, name) >= 1, "at least 1")
    _demand(config, "pp", config.pp == 1, "1: pipeline parallelism is not supported; use --cp, --tp and --dp-shard")
    for name in (
        "warmup_steps",
        "seed",
        "eval_every",
        "save_every",
        "keep_last",
        "memory_snapshot",
        "timeout_s",
        "tile",
        "loss_chunk",
    ):
        _demand(config, name, getattr(config, name) >= 0, "0 or more")
    for name in ("lr", "weight_decay", "z_loss", "offload_keep"):
        _demand(config, name, 0 <= getattr(config, name) < math.inf, "a number of 0 or more")
    if config.offload == "on" and config.ac == "none":
        raise UserError("--offload on moves the layers' inputs that --ac keeps, and --ac is none: add --ac selective")
    if config.optim == "adamw_bf16" and config.dtype != "bfloat16":
        raise UserError(
            f"--optim adamw_bf16 is for bfloat16 weights, and --dtype is {config.dtype}: pass --dtype bfloat16, or "
            "--optim adamw or adamw8bit"
        )
    if config.optim_step == "in_backward":
        _check_step_in_backward(config)
    _demand(config, "grad_clip", config.grad_clip is None or config.grad_clip > 0, "more than 0, or None")
    loggers.names_of(config.log)
    profiling.steps_of(config.profile)
    for name in ("profile", "memory_snapshot"):
        if getattr(config, name) and config.out is None:
            raise UserError(f"--{name.replace('_', '-')} needs --out, the folder where its files are written")
    if config.log != "none" and config.out is None:
        raise UserError(f"--log {config.log} needs --out, the folder where its files are written")
    if config.eval_every and config.eval_data is None:
        raise UserError(f"--eval-every {config.eval_every} has nothing to evaluate on: add --eval-data")
    check_parts(config)
    if config.init_on == "device" and config.init_from is not None:
        raise UserError("--init-on device draws random weights, and --init-from has some: leave one of the two out")
    if config.simulate_rank is not None:
        _check_simulation(config)


# Options that say how another one is done, by that one and what to write for it.
_PARTS = {
    "world": ("simulate_rank", "--simulate-rank RANK"),
    "simulate_gb_s": ("simulate_rank", "--simulate-rank RANK"),
    "keep_last": ("save_every", "--save-every STEPS"),
    "save_mode": ("save_every", "--save-every STEPS"),
    "eval_batches": ("eval_data", "--eval-data FILE"),
    "save_model": ("out", "--out DIR"),
}


def check_parts(config: TrainConfig, given: Container[str] = ()) -> None:
    """Refuses options that would silently do nothing, since what they are a part of is not asked for.

    Args:
        given: fields that stand on the command line, where the value that they have anyway is noticed, too.

    Raises:
        UserError: naming the option, and what it is a part of.
    """
    for name, (whole, wanted) in _PARTS.items():
        value, flag = getattr(config, name), f"--{name.replace('_', '-')}"
        asked = name in given or value != getattr(_DEFAULTS, name)
        if asked and getattr(config, whole) == getattr(_DEFAULTS, whole):
            raise UserError(f"{flag} {value} does nothing without {wanted}: add that, or leave {flag} out")


def _check_simulation(config: TrainConfig) -> None:
    assert config.simulate_rank is not None
    if not 0 <= config.simulate_rank < config.world:
        raise UserError(
            f"--simulate-rank is {config.simulate_rank}, and must be 0 to {config.world - 1}, one of the --world "
            f"{config.world} ranks"
        )
    if not config.simulate_gb_s > 0:
        raise UserError(f"--simulate-gb-s is {config.simulate_gb_s}, and must be more than 0")
    if config.out is not None or config.resume != "none":
        raise UserError(
            "--simulate-rank trains on what other ranks never sent, so its weights mean nothing: leave out --out and "
            "--resume"
        )
    grid = Degrees(config.dp_replicate, config.dp_shard, config.cp, config.tp)
    if min(dataclasses.astuple(grid)) >= 1 and grid.size != config.world:
        raise UserError(
            f"--simulate-rank is one of --world {config.world} ranks, and {grid} is a grid of {grid.size}: make the "
            "two equal"
        )


def _check_step_in_backward(config: TrainConfig) -> None:
    if config.grad_accum > 1:
        raise UserError(
            f"--optim-step in_backward steps at each backward, and --grad-accum {config.grad_accum} has several in a "
            "step: leave one of them off"
        )
    if config.grad_clip is not None:
        raise UserError(
            f"--optim-step in_backward has no gradients left when their norm is known, so --grad-clip "
            f"{config.grad_clip} cannot be kept: pass --grad-clip None, or --optim-step after"
        )


def _demand(config: TrainConfig, name: str, holds: bool, wanted: str) -> None:
    if not holds:
        raise UserError(f"--{name.replace('_', '-')} is {getattr(config, name)}, and must be {wanted}")


def check_world(config: TrainConfig, num_ranks: int | None) -> Degrees:
    """The grid of ranks of a run.

    Args:
        num_ranks: that have been started; None where they are still to be.

    Raises:
        UserError: a grid of another size, or rows that it cannot divide.
    """
    grid = resolve(config.dp_replicate, config.dp_shard, config.cp, config.tp, num_ranks)
    if config.batch % grid.dp:
        raise UserError(
            f"--batch {config.batch} rows cannot be divided equally over {grid.dp} data parallel ranks "
            f"(--dp-replicate {grid.dp_replicate} x --dp-shard {grid.dp_shard}): make it a multiple of {grid.dp}"
        )
    if config.grad_accum > config.batch // grid.dp:
        raise UserError(
            f"--grad-accum {config.grad_accum} is more than the {config.batch // grid.dp} row(s) of a step that each "
            f"rank has (--batch {config.batch} over {grid.dp} data parallel rank(s)): lower it, or raise --batch"
        )
    model = config.model_config()
    check_tp(
        grid.tp,
        {
            "query heads": model.num_heads,
            "KV heads": model.num_kv_heads,
            "columns of the MLP": model.ffn_dim,
            "rows of the vocabulary": model.vocab_size,
        },
    )
    if config.comm.startswith("ulysses"):
        heads, kv_heads = model.num_heads // grid.tp, model.num_kv_heads // grid.tp
        try:
            check_heads(heads, ulysses_ranks(config.comm, None, grid.cp, kv_heads))
        except ValueError as error:
            raise UserError(f"--comm {config.comm} with --cp {grid.cp}: {error}") from None
    matrices = {
        "the model's width": model.dim,
        "its query heads": model.num_heads * model.head_dim // grid.tp,
        "its KV heads": model.num_kv_heads * model.head_dim // grid.tp,
        "columns of its MLP": model.ffn_dim // grid.tp,
    }
    check_fp8(config.fp8, matrices)
    chosen_modules(config.fp8_modules)
    if config.fp8 == "none" and config.fp8_modules != "all":
        raise UserError("--fp8-modules says which products --fp8 makes of fp8: name a recipe with --fp8, too")
    if config.fp8 == "tensorwise_all_gather" and (config.fsdp == "off" or grid.fsdp == 1):
        raise UserError(
            "--fp8 tensorwise_all_gather is about the gathering of FSDP2, and parameters are not divided: add --cp or "
            "--dp-shard, or use tensorwise"
        )
    if config.fsdp == "off" and grid.dp_shard > 1:
        raise UserError(
            f"--fsdp off holds all parameters on every rank, and --dp-shard {grid.dp_shard} divides them: pass "
            f"--dp-replicate {grid.dp} --dp-shard 1, or --fsdp on"
        )
    if config.optim_step == "in_backward" and grid.size > 1 and (config.fsdp == "off" or grid.fsdp == 1):
        raise UserError(
            "--optim-step in_backward with several ranks needs parameters that FSDP2 divides: pass --fsdp on, and "
            "--cp or --dp-shard above 1"
        )
    return grid


def prepare_out(config: TrainConfig) -> Path | None:
    """Makes the --out folder and sees that it can be written to.

    Raises:
        UserError: where it cannot.
    """
    if config.out is None:
        return None
    out = Path(config.out).expanduser()
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written to ({error.strerror}): name a folder that can be made or written"
        ) from None
    try:
        require_replaceable(out / "model")
    except CheckpointError as error:
        raise UserError(f"--out {out}, where the trained model will be put: {error}") from None
    return out
