"""From local gradients to a step: sum over the group, clip, AdamW, learning rate."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

_BUCKET_BYTES = 32 * 1024 * 1024


def gradient_buckets(sizes_bytes: list[int], limit_bytes: int = _BUCKET_BYTES) -> list[list[int]]:
    """Groups indices, in order, so that no group of more than one exceeds the limit.

    >>> gradient_buckets([4, 4, 9, 1], limit_bytes=8)
    [[0, 1], [2], [3]]
    """
    buckets: list[list[int]] = []
    room = 0
    for index, size in enumerate(sizes_bytes):
        if not buckets or size > room:
            buckets.append([])
            room = limit_bytes
        buckets[-1].append(index)
        room -= size
    return buckets


@torch.no_grad()
def sum_gradients(params: Iterable[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Replaces each gradient by its sum over the group, in place.

    Under context parallelism every rank holds the gradient of its own rows, of every parameter: the sum is
    the gradient of the whole sequence, not to be divided by anything. It goes in flat buckets, since many
    small messages are slow. A parameter without a gradient here (its rows did not use it) counts as zero, so
    that all ranks send the same.

    Args:
        params: in the same order on every rank.
        group: None for one rank.
    """
    params = [param for param in params if param.requires_grad]
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
    if group is None or dist.get_world_size(group) == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for param in params:
        by_dtype.setdefault(param.dtype, []).append(param.grad)
    for dtype, grads in by_dtype.items():
        # bf16 has 8 bits: its sum over ranks is taken in fp32.
        wide = torch.promote_types(dtype, torch.float32)
        for bucket in gradient_buckets([grad.numel() * wide.itemsize for grad in grads]):
            flat = torch.cat([grads[index].flatten().to(wide) for index in bucket])
            dist.all_reduce(flat, group=group)
            pieces = flat.split([grads[index].numel() for index in bucket])
            for index, piece in zip(bucket, pieces):
                grads[index].copy_(piece.view_as(grads[index]))


def learning_rate(step: int, steps: int, warmup_steps: int, peak: float, floor: float = 0.1) -> float:
    """Linear warm-up to `peak`, then a cosine down to `floor * peak` at the last step.

    >>> [round(learning_rate(step, 5, 2, 1.0), 3) for step in range(5)]
    [0.5, 1.0, 1.0, 0.55, 0.1]

    Args:
        step: from 0.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class AdamW:
    """AdamW on fp32 copies of low-precision parameters.

    A bf16 weight has 8 bits and cannot take a step of 1/1000 of itself, so a bf16 model keeps fp32 weights
    here and is a rounded copy of them. fp32 and fp64 parameters are stepped in place. Norms and other 1-D
    parameters do not decay.

    Args:
        model: whose parameters to step.
        weight_decay: of the parameters with two or more dimensions.
    """

    def __init__(self, model: nn.Module, weight_decay: float) -> None:
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.masters = [
            param if param.dtype.itemsize >= 4 else nn.Parameter(param.detach().float()) for param in self.params
        ]
        decay = [master for master in self.masters if master.ndim >= 2]
        plain = [master for master in self.masters if master.ndim < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=(0.9, 0.95), eps=1e-8)

    def step(self, lr: float, grad_clip: float | None) -> float:
        """Clips to a global norm, steps, and forgets the gradients.

        The gradients must already be summed over the group; then the norm is the same on every rank.

        Args:
            lr: of this step.
            grad_clip: the largest global norm; None clips nothing.

        Returns:
            The global norm before clipping.
        """
        for param, master in zip(self.params, self.masters):
            if master is not param:
                master.grad = None if param.grad is None else param.grad.float()
                param.grad = None
        norm = torch.nn.utils.clip_grad_norm_(self.masters, math.inf if grad_clip is None else grad_clip)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.adamw.zero_grad()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters):
                if master is not param:
                    param.copy_(master)
        return float(norm)
