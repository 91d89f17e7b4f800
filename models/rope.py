"""Rotary position embeddings: the frequencies with their long-context scalings, and the table of cos and sin.

Sources: RoFormer (Su et al., 2021, section 3.4.2); position interpolation (Chen et al., 2023) for "linear";
"The Llama 3 Herd of Models" (2024) and the `rope_scaling` fields of its released configs for "llama3".
"""

import math

import torch
from torch import Tensor

from flexcp.models.configs import RopeScaling

PRECISIONS = ("exact", "hf")


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, precision: str = "exact"
) -> Tensor:
    """theta^(-2i/D) for i = 0 .. D/2 - 1, scaled: [D/2], in turns of 1 radian per token, on the CPU.

    "llama3" leaves short waves as they are, slows long ones down by `factor`, and goes over from one to the
    other between original_max_positions / high_freq_factor and original_max_positions / low_freq_factor.

    Args:
        head_dim: D, even.
        theta: the base.
        scaling: None for the plain frequencies.
        precision: "exact": float64; "hf": float32, in the order of operations of transformers, bit for bit.
    """
    dtype = {"exact": torch.float64, "hf": torch.float32}[precision]
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    wavelength = 2 * math.pi / inverse
    slow, short = wavelength > original / low, wavelength < original / high
    # The order of operations below is what "hf" needs for the same bits.
    scaled = torch.where(slow, inverse / scaling.factor, inverse)
    share = (original / wavelength - low) / (high - low)
    between = (1 - share) * scaled / scaling.factor + share * scaled
    return torch.where(slow | short, scaled, between)


def rope_table(
    positions: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: RopeScaling | None = None,
    precision: str = "exact",
) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary phases, [B, 1, S, D] in `dtype`.

    "exact" takes the phase position * frequency in float64: at a million tokens an fp32 phase is off by 0.04,
    and a bf16 one aliases whole positions. Only cos and sin, which lie in [-1, 1], are rounded to `dtype`.
    "hf" takes it in float32, as transformers does, for the same bits.

    Args:
        positions: [B or 1, S] int64, the place of each token in its document or sequence.
    """
    inverse = inverse_frequencies(head_dim, theta, scaling, precision).to(positions.device)
    phase_BSd = positions[..., None].to(inverse.dtype) * inverse
    phase_B1SD = torch.cat([phase_BSd, phase_BSd], dim=-1)[:, None]
    return phase_B1SD.cos().to(dtype), phase_B1SD.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x_i, x_{i + D/2}) of x [B, H, S, D] by the phases of `rope_table`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
