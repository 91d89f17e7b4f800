"""classify and to_dense: what is left to the pairs, in bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import quantity
from flexcp.masks.core import Classes, Mask, MaskMod, lift

_PAIRS_AT_ONCE = 1 << 20  # int64 indices and bools of one batch of boxes stay under 64 MiB


def classify(
    mask: Mask | MaskMod, q_lo: Tensor, q_hi: Tensor, kv_lo: Tensor, kv_hi: Tensor, *, refine: bool = False
) -> Classes:
    """(any, all) of each box in full shape, and on request exact for every mask.

    Args:
        mask: a mask or plain function.
        q_lo, q_hi, kv_lo, kv_hi: int64 [nQ], [nQ], [nK], [nK], half-open ranges as for `Mask.classify`, on
            the mask's device where refine is True.
        refine: evaluate the pairs of undecided boxes (any, but not all), and of no others, a megapair at a
            time. This makes compositions and lifted functions exact, at the cost of one evaluation of what is
            partial.

    Returns:
        (any, all), bool [batch or 1, heads or 1, nQ, nK].

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> odd = masks.causal() & (lambda b, h, q_idx, kv_idx: q_idx < kv_idx)
        >>> one_box = [torch.tensor([x]) for x in (0, 8, 0, 8)]
        >>> masks.classify(odd, *one_box)[0].item(), masks.classify(odd, *one_box, refine=True)[0].item()
        (True, False)

    Source: none; issue 6 of this project.
    """
    mask = lift(mask)
    shape = (mask.batch or 1, mask.heads or 1, q_lo.numel(), kv_lo.numel())
    some, every = (answer.expand(shape).clone() for answer in mask.classify(q_lo, q_hi, kv_lo, kv_hi))
    if not refine:
        return some, every
    boxes = (some & ~every).nonzero()
    q_size, kv_size = int((q_hi - q_lo).max()), int((kv_hi - kv_lo).max())
    q_step = torch.arange(q_size, device=q_lo.device)[:, None]
    kv_step = torch.arange(kv_size, device=q_lo.device)
    for part in boxes.split(max(1, _PAIRS_AT_ONCE // (q_size * kv_size))):
        b, h, i, j = part.unbind(1)
        b, h = b[:, None, None], h[:, None, None]
        # A range shorter than the longest repeats its last index, which changes neither any nor all.
        q_idx = torch.minimum(q_lo[i][:, None, None] + q_step, q_hi[i][:, None, None] - 1)
        kv_idx = torch.minimum(kv_lo[j][:, None, None] + kv_step, kv_hi[j][:, None, None] - 1)
        pairs = mask(b, h, q_idx, kv_idx).expand(len(part), q_size, kv_size).flatten(1)
        some[tuple(part.T)], every[tuple(part.T)] = pairs.any(1), pairs.all(1)
    return some, every


def to_dense(mask: Mask | MaskMod, q_len: int, kv_len: int | None = None, device: torch.device | str = "cpu") -> Tensor:
    """The mask pair by pair: bool [batch or 1, heads or 1, q_len, kv_len]. For tests and pictures: it is S x
    S.

    Args:
        mask: a mask or plain function.
        q_len, kv_len: in tokens; kv_len None: the same.
        device: where the mask's tensors are.

    Example:
        >>> from flexcp import masks
        >>> masks.to_dense(masks.causal(), 2).int().tolist()
        [[[[1, 0], [1, 1]]]]

    Source: none.
    """
    mask = lift(mask)
    quantity("to_dense", "q_len", q_len)
    kv_len = q_len if kv_len is None else quantity("to_dense", "kv_len", kv_len)
    shape = (mask.batch or 1, mask.heads or 1, q_len, kv_len)
    b, h, q_idx, kv_idx = (
        torch.arange(size, device=device).reshape([-1 if axis == at else 1 for axis in range(4)])
        for at, size in enumerate(shape)
    )
    return mask(b, h, q_idx, kv_idx).expand(shape).clone()
