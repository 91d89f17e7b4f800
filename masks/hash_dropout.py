"""hash_dropout: pairs dropped by a hash of where they are, so that every layout drops the same ones."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import integers, quantity
from flexcp.masks.score import Score

_BITS = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B  # below 2^31: a product with 32 bits stays within int64, so nothing ever overflows
_STEP = 0x1E3779B9


def mix(state: Tensor, value: Tensor) -> Tensor:
    """32 hashed bits, as int64, of 32 bits and a non-negative number."""
    state = (state ^ value) + _STEP & _BITS
    for _ in range(2):
        state = ((state ^ (state >> 16)) * _MULTIPLIER) & _BITS
    return state ^ (state >> 16)


class HashDropout(Score):
    def __init__(self, p: float, seed: Tensor):
        self.p = p
        self.seed = seed  # int64, 0-d: may be changed in place between steps
        self._threshold = torch.tensor(round(p * 2**32), dtype=torch.int64, device=seed.device)

    def __call__(self, score, b, h, q_idx, kv_idx):
        state = self.seed & _BITS
        for index in (b, h, q_idx, kv_idx):
            state = mix(state, index.to(torch.int64))
        return torch.where(state >= self._threshold, score, -float("inf"))

    def __repr__(self) -> str:
        return f"hash_dropout({self.p}, seed={int(self.seed)})"


def hash_dropout(p: float, seed: int | Tensor) -> Score:
    """Drops each pair with probability p before the softmax: -inf where hash(seed, b, h, q, kv) < p.

    Nothing is drawn and nothing is stored, so forward, backward, recomputation, every rank, every layout and
    every device drop the same pairs. The rest is renormalised by the softmax itself (DropKey), so there is no
    1 / (1 - p).
    A query of which every key is dropped sees nothing: out 0, lse -inf.

    Args:
        p: probability, at least 0 and below 1.
        seed: int, or an int64 0-d tensor, which may be changed in place at each step without a recompile.

    Returns:
        A Score without parameters.

    Raises:
        ValueError: p is not in [0, 1), or seed is negative or not an int or 0-d integer tensor.

    Example:
        >>> import torch
        >>> from flexcp.masks import scores
        >>> i = torch.arange(100)
        >>> dropped = scores.hash_dropout(0.25, 7)(torch.tensor(0.0), i[:1], i[:1], i[:, None], i)
        >>> 0.23 < dropped.isinf().float().mean().item() < 0.27
        True

    Source: Li et al. 2023, "DropKey", 3.2; the integer hash is a multiply-xorshift of the murmur family.
    """
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
        raise ValueError(f"hash_dropout: p must be a probability in [0, 1), got {p!r}.")
    if isinstance(seed, Tensor):
        seed = integers("hash_dropout", "seed", seed, (0,), "0-d")
        if seed.dtype != torch.int64:
            raise ValueError(f"hash_dropout: a seed tensor must be int64, got {seed.dtype}.")
    else:
        seed = torch.tensor(quantity("hash_dropout", "seed", seed, least=0) & _BITS)
    return HashDropout(float(p), seed)
