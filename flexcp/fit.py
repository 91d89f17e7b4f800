"""Whether a run fits, and what would make it fit: the trainer's settings, put to the memory planner."""

import dataclasses
import os
import shutil

import torch
from rich.console import Console

from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.estimate import available_bytes, total_bytes
from flexcp.memory import Setup, estimate
from flexcp.memoryadvice import Limits, advise, flags, human, longest, require_fit, table
from flexcp.mesh import Degrees

_HOST_RESERVE = 4 << 30  # bytes of the host that checkpoints leave to everything else


def setup_of(config: TrainConfig, grid: Degrees, device: torch.device) -> Setup:
    """What the run's memory depends on."""
    return Setup(
        config.model_config(),
        config.seq_len,
        rows=-(-config.batch // (grid.dp * config.grad_accum)),  # of the largest micro-batch
        cp=grid.cp,
        dp_shard=grid.dp_shard,
        tp=grid.tp,
        element_bytes=config.torch_dtype.itemsize,
        optimizer=config.optim,
        step_in_backward=config.optim_step == "in_backward",
        fsdp=config.fsdp == "on",
        ac=config.ac,
        tile=config.tile,
        serial=config.head_serial,
        every=config.checkpoint_every,
        chunk=config.loss_chunk,
        offload=config.offload == "on",
        keep_bytes=int(config.offload_keep * 2**30),
        fp8=config.offload_fp8 == "on",
        comm="exchange" if config.comm == "auto" else config.comm,
        on_cpu=device.type == "cpu",
    )


def limits_of(device: torch.device, local_ranks: int, whole: bool = False) -> Limits:
    """What each of this host's ranks may take.

    Args:
        whole: of the memory that there is, which all ranks of equal hosts see alike; else of what is free now.
    """
    size = total_bytes if whole else available_bytes
    if device.type == "cpu":
        return Limits(size(device) // local_ranks)
    return Limits(size(device), max(0, size(torch.device("cpu")) - _HOST_RESERVE) // local_ranks)


def resolve(config: TrainConfig, grid: Degrees, device: torch.device, local_ranks: int) -> TrainConfig:
    """The settings with what --memory auto turns on; what was asked for stays.

    Raises:
        UserError: nothing fits; with what it needs, what there is and the nearest that fits.
    """
    if config.memory != "auto":
        return config
    setup, limits = setup_of(config, grid, device), limits_of(device, local_ranks, whole=True)
    advice = advise(setup, limits)
    if not advice.fits:
        require_fit(config.model_name, advice.setup, limits, local_ranks, force=True)
    chosen = advice.setup
    return dataclasses.replace(
        config,
        ac=chosen.ac,
        tile=chosen.tile,
        head_serial=chosen.serial,
        checkpoint_every=chosen.every,
        loss_chunk=chosen.chunk,
        offload="on" if chosen.offload else "off",
        offload_keep=round(chosen.keep_bytes / 2**30, 2),
    )


def require_memory(config: TrainConfig, grid: Degrees, device: torch.device, local_ranks: int) -> None:
    """Refuses a run that cannot fit, before anything is allocated.

    Raises:
        UserError: with what it needs, what there is and the nearest that fits.
    """
    if config.memory == "unchecked":
        return
    setup = setup_of(config, grid, device)
    require_fit(config.model_name, setup, limits_of(device, local_ranks), local_ranks)


def dry_run(config: TrainConfig, grid: Degrees, device: torch.device, local_ranks: int) -> None:
    """Prints what each rank would take, what there is, and what would fit."""
    show(setup_of(config, grid, device), config.model_name, limits_of(device, local_ranks), Console(width=120))


def check_options(config: TrainConfig, grid: Degrees) -> None:
    """Refuses options that do not go together.

    Raises:
        UserError: naming them, and what to do.
    """
    model = config.model_config()
    asked = {"--tile": config.tile > 0, "--head-serial": config.head_serial != 1}
    asked["--checkpoint-every"] = config.checkpoint_every > 1
    lean = [flag for flag, given in asked.items() if given]
    if lean and config.ac == "none":
        raise UserError(f"{lean[0]} makes activations anew in backward, and --ac none keeps all: add --ac selective")
    if grid.tp > 1 and (lean or config.loss_chunk or config.z_loss):
        flag = lean[0] if lean else "--loss-chunk" if config.loss_chunk else "--z-loss"
        raise UserError(f"{flag} needs whole parameters, and --tp {grid.tp} divides them: leave one of the two off")
    if config.head_serial < 1 or model.num_kv_heads % config.head_serial:
        raise UserError(
            f"--head-serial {config.head_serial} does not divide the {model.num_kv_heads} KV heads of "
            f"{config.model_name}: choose a divisor"
        )
    if config.fp8 != "none" and config.head_serial > 1:
        raise UserError("--head-serial needs plain projections, and --fp8 makes them anew: leave one of the two off")
    if config.fp8 != "none" and config.tile % 16:
        raise UserError(f"--fp8 multiplies 16 rows at a time, and --tile is {config.tile}: make it a multiple of 16")
    if config.checkpoint_every > model.num_layers:
        raise UserError(
            f"--checkpoint-every {config.checkpoint_every} is more than the {model.num_layers} layers: lower it"
        )
    if config.offload == "off" and (config.offload_keep or config.offload_fp8 == "on"):
        raise UserError("--offload-keep and --offload-fp8 say how checkpoints are offloaded: add --offload on")
    if config.compile != "off" and lean:
        chosen = " (by --memory auto)" if config.memory == "auto" else ""
        raise UserError(
            f"--compile makes each layer one graph, and {lean[0]}{chosen} runs autograd in its middle: leave one of "
            "the two off"
        )


def check_compiler(config: TrainConfig, device: torch.device) -> None:
    """Refuses what inductor would stop at in the first step.

    Raises:
        UserError: there is nothing that compiles C++, which it writes for a CPU.
    """
    compiler = os.environ.get("CXX", "g++")
    if config.compile == "on" and device.type == "cpu" and shutil.which(compiler) is None:
        raise UserError(
            f"--compile on needs a C++ compiler on a CPU, and {compiler} is not found: install g++, name another in "
            "the variable CXX, or use --compile off"
        )


def show(setup: Setup, name: str, limits: Limits, console: Console) -> None:
    """Prints the items of one rank, what there is, what fits and how long a sequence may become (--dry-run)."""
    needed = estimate(setup)
    title = f"{name}, {setup.seq_len:,} tokens, --cp {setup.cp} --dp-shard {setup.dp_shard} --tp {setup.tp}: one rank"
    console.print(table(needed, title))
    there = f"{human(limits.device)}" + (f" and {human(limits.host)} on the host" if limits.host else "")
    lines = [f"there is {there} for each rank: {'it fits' if limits.hold(needed) else 'it does not fit'}"]
    advice = advise(setup, limits)
    if not limits.hold(needed):
        chosen = f"it fits with {flags(setup, advice.setup)}" if advice.fits else "no options make it fit"
        lines.append(f"{chosen}: {human(advice.needed.device)} and {human(advice.needed.host)} on the host")
    for auto, words in ((False, "as given"), (True, "with options")):
        length, found = longest(setup, limits, auto)
        more = flags(setup, found.setup) if found is not None and auto else ""
        lines.append(f"longest sequence {words}: {length:,} tokens" + (f" ({more})" if more else ""))
    for line in lines:
        console.print(line, markup=False, highlight=False)
