"""What memory this machine has."""

import os
from pathlib import Path

import torch

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, or what this process may still take of the host's memory (cgroup limits included)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [_host("MemAvailable")]
    for limit, used in _CGROUPS:
        try:
            limits.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no cgroup, or "max"
            continue
    return max(0, min(limits))


def total_bytes(device: torch.device) -> int:
    """All bytes of a GPU, or of the host's memory that processes of this one's cgroup may take together."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    limits = [_host("MemTotal")]
    for limit, _ in _CGROUPS:
        try:
            limits.append(int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits)


def _host(field: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
