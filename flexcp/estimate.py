"""What a run needs in memory, from its config alone, and what this host has."""

import os
from pathlib import Path

import torch

from flexcp.errors import UserError
from flexcp.models import Llama3Config


def training_bytes(config: Llama3Config, dtype: torch.dtype, optim: str = "adamw") -> int:
    """Bytes for parameters, gradients and optimizer states (`flexcp.optim.Optimizer`); activations come on top.

    "adamw" keeps two moments in fp32 at least, and for low-precision parameters an fp32 copy and its gradient; of the
    others the moments have 8 bits, or the parameters' own.

    >>> from flexcp.models import get_config
    >>> training_bytes(get_config("llama3-8b"), torch.float32) == 16 * 8030261248
    True
    """
    wide = max(dtype.itemsize, 4)
    masters = 2 * wide if optim == "adamw" and dtype.itemsize < 4 else 0
    moment = {"adamw": wide, "adamw8bit": 1, "adamw_bf16": dtype.itemsize}[optim]
    return config.num_params * (2 * dtype.itemsize + masters + 2 * moment)


def available_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, or what this process may still take of the host's memory (cgroup limits included)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [_host_available()]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limits.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no cgroup, or "max"
            continue
    return max(0, min(limits))


def _host_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(
    model: str,
    config: Llama3Config,
    dtype: torch.dtype,
    device: torch.device,
    ranks: int,
    local_ranks: int,
    tokens: int,
    shards: int = 1,
    optim: str = "adamw",
) -> None:
    """Refuses a run that cannot fit, before anything is allocated.

    Counted is what is certain: weights, gradients and AdamW states, the batch's own columns, and the logits of the
    rank's tokens with their gradient in fp32. The activations of the layers come on top, so that a run that passes may
    still be too large.

    Args:
        ranks: among which the tokens are divided.
        local_ranks: ranks on this host; on a CPU they share its memory, a GPU has one.
        tokens: in a micro-batch, over these ranks.
        shards: ranks among which parameters, gradients and optimizer states are divided.
        optim: of `flexcp.optim.OPTIMIZERS`.

    Raises:
        UserError: with the bytes needed and available.
    """
    states = -(-training_bytes(config, dtype, optim) // shards)
    rows = tokens * 4 * 8 + -(-tokens // ranks) * config.vocab_size * 2 * max(4, dtype.itemsize)
    sharing = local_ranks if device.type == "cpu" else 1
    available = available_bytes(device)
    if (states + rows) * sharing <= available:
        return
    place = "this host" if device.type == "cpu" else "this GPU"
    remedy = "train a smaller model (llama3-debug)" if states > rows else "lower --seq-len or --batch"
    raise UserError(
        f"{model} needs {states:,} bytes per rank for parameters, gradients and AdamW states in "
        f"{str(dtype).removeprefix('torch.')} and {rows:,} bytes for {tokens:,} tokens and their logits, "
        f"{(states + rows) * sharing:,} bytes for {sharing} rank(s) on {place}, which has {available:,} bytes "
        f"available: {remedy}, or use a machine with more memory, or more of them: --cp and --dp-shard divide the "
        "parameters"
    )
