"""Combining partial results of one query row computed over disjoint sets of keys."""

import torch
from torch import Tensor


def merge(out1: Tensor, lse1: Tensor, out2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The attention over the union of two disjoint key sets.

    Associative up to rounding; a row that sees nothing (out 0, lse -inf) is the identity, on either side or on both.

    Args:
        out1, out2: [B, H, L, Dv], normalised; lse1, lse2: [B, H, L], natural logarithm.
    Returns:
        (out, lse) in the dtype of the inputs, which should be the accumulation dtype.
    """
    lse = torch.logaddexp(lse1, lse2)
    # Where both sides are empty lse is -inf, and -inf - -inf would be NaN.
    shift = torch.where(lse == -torch.inf, 0.0, lse)
    weight1 = torch.exp(lse1 - shift)[..., None]
    weight2 = torch.exp(lse2 - shift)[..., None]
    return out1 * weight1 + out2 * weight2, lse
