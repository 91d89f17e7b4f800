"""The trainer's settings that make long sequences fit, and that say beforehand whether they do."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LongOptions:
    """A part of `config.TrainConfig`; what goes with what is checked in `fit`."""

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

    z_loss: float = 0.0
    """Factor on the square of the log of the softmax's denominator, added to the loss."""

    memory: str = "given"
    """given: these options as they are; auto: as many of them turned on as are needed to fit."""

    dry_run: bool = False
    """Say what each rank needs in memory, and what would fit; allocate nothing."""

    simulate_rank: int | None = None
    """Be this one rank of --world alone; the others are played by copies of the right size."""

    world: int = 8
    """Ranks of the group of which --simulate-rank is one."""

    simulate_gb_s: float = 450.0
    """10^9 bytes a second that the simulated rank receives, on a GPU."""
