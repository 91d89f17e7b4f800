"""From gradients to a step: learning rate, optimizers, and steps taken within backward."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flexcp.compat_torchao import torchao
from flexcp.gradients import GlobalNorm, clip, is_summed_in_backward, sum_gradients

OPTIMIZERS = ("adamw", "adamw8bit", "adamw_bf16")
BETAS, EPS = (0.9, 0.95), 1e-8


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


class Optimizer:
    """AdamW in one of three forms, over parameters that may be divided among ranks.

    "adamw": torch's, fused. A bf16 weight has 8 bits and cannot take a step of 1/1000 of itself, so a bf16 model keeps
    fp32 weights here and is a rounded copy of them: 18 bytes a parameter with its gradient, 16 for fp32.
    "adamw8bit": torchao's, whose two moments have 8 bits; bf16 weights are rounded at random, so that small steps add
    up on average: 6 bytes. "adamw_bf16": torchao's with bf16 moments and the same rounding, for bf16 weights: 8 bytes.

    Norms and other 1-D parameters do not decay.

    Args:
        model: whose parameters to step.
        kind: of OPTIMIZERS.
        weight_decay: of the parameters with two or more dimensions.
        group: over which gradients are summed that FSDP2 has not summed (`Mesh.gradient_group`).
        seed: of the random rounding, which is the same in a run that goes on from a checkpoint.

    Attributes:
        inner: the torch.optim.Optimizer, whose state is this optimizer's.
        params, masters: the model's parameters and what is stepped, one by one: themselves or their fp32 copies.
    """

    def __init__(
        self,
        model: nn.Module,
        kind: str = "adamw",
        *,
        weight_decay: float,
        group: dist.ProcessGroup | None = None,
        seed: int = 0,
    ) -> None:
        self.kind, self.group, self.seed = kind, group, seed
        self.params = [param for param in model.parameters() if param.requires_grad]
        self.masters = [
            nn.Parameter(param.detach().float()) if kind == "adamw" and param.dtype.itemsize < 4 else param
            for param in self.params
        ]
        self.inner = _INNER[kind](self._groups(weight_decay))
        self._copies = {param: master for param, master in zip(self.params, self.masters) if master is not param}

    def _groups(self, weight_decay: float) -> list[dict]:
        """Parameters that decay and those that do not, apart by mesh: fused steps take one mesh at a time."""
        groups: dict[tuple, list[nn.Parameter]] = {}
        for master in self.masters:
            mesh = master.device_mesh if isinstance(master, DTensor) else None
            groups.setdefault((mesh, master.ndim >= 2), []).append(master)
        return [
            {"params": params, "weight_decay": weight_decay if decays else 0.0}
            for (_, decays), params in groups.items()
        ]

    def begin(self, step: int, lr: float) -> None:
        """Before the backward of a step, counted from 0, whose learning rate is `lr`."""
        for group in self.inner.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        if self.kind != "adamw":
            # From the step alone, so that copies of a parameter on other ranks are rounded alike.
            torch.manual_seed((self.seed * 1_000_003 + step) % 2**63)

    def step(self, grad_clip: float | None = None) -> float:
        """Sums the gradients over the ranks, clips them to a global norm, steps, and forgets them. A collective.

        Args:
            grad_clip: the largest global norm; None clips nothing.

        Returns:
            The global norm before clipping, the same on every rank.
        """
        sum_gradients(self.params, self.group)
        norm = clip(self.params, grad_clip)
        self.apply(self.params)
        return float(norm)

    @torch.no_grad()
    def apply(self, params: list[nn.Parameter]) -> None:
        """Steps parameters by their final gradients, and forgets these."""
        for param in params:
            if (master := self._copies.get(param)) is not None:
                master.grad = None if param.grad is None else param.grad.float()
                param.grad = None
        self.inner.step()
        self.inner.zero_grad()
        for param in params:
            if (master := self._copies.get(param)) is not None:
                param.copy_(master)


class StepInBackward:
    """Steps each parameter as soon as backward has its final gradient, so that gradients are never all there at once.

    There is one backward in a step, then, and no clipping, which needs the norm of all gradients before the first
    parameter is stepped.

    Args:
        optimizer: whose parameters to step. Each must be divided by FSDP2, or be this rank's alone: a sum over ranks
            in the middle of backward would need all of them to come to it in the same order.

    Raises:
        ValueError: a parameter of which other ranks hold copies.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._norm = GlobalNorm()
        alone = optimizer.group is None
        for param in optimizer.params:
            if not (is_summed_in_backward(param) or (alone and not isinstance(param, DTensor))):
                raise ValueError(
                    "an optimizer step in backward needs each parameter to be divided by FSDP2, or one rank: other "
                    f"ranks hold copies of one of shape {list(param.shape)}"
                )
            param.register_post_accumulate_grad_hook(self._step)

    def begin(self, step: int, lr: float) -> None:
        """As `Optimizer.begin`."""
        self._norm = GlobalNorm()
        self.optimizer.begin(step, lr)

    def _step(self, param: nn.Parameter) -> None:
        # FSDP2 calls this for each parameter of a layer, in the same order on every rank.
        self._norm.add([param.grad])
        self.optimizer.apply([param])

    def step(self, grad_clip: float | None = None) -> float:
        """After backward. A collective.

        Returns:
            The global norm of the gradients, which are gone.
        """
        if grad_clip is not None:
            raise ValueError("gradients cannot be clipped where parameters are stepped within backward")
        return float(self._norm.total())


def _adamw(groups: list[dict]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, fused=True)


def _adamw8bit(groups: list[dict]) -> torch.optim.Optimizer:
    optimizer = torchao("optim").AdamW8bit(groups, lr=0.0, betas=BETAS, eps=EPS, bf16_stochastic_round=True)
    state = torchao("optim.subclass_8bit").OptimState8bit
    # A view of a state forgets the dtype that it pretends to have, and a DTensor holds a view: where it pretends to be
    # bf16, torch 2.13 cannot compile the step. It is fp32 then, as it is dequantized anyway.
    optimizer._subclass_zeros = lambda p, signed, block_size: state.zeros(p.shape, signed, block_size, p.device)
    return optimizer


def _adamw_bf16(groups: list[dict]) -> torch.optim.Optimizer:
    return torchao("optim")._AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, bf16_stochastic_round=True)


_INNER: dict[str, Callable[[list[dict]], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "adamw_bf16": _adamw_bf16,
}
