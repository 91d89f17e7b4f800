"""block_causal: blocks that are causal to each other and full within."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import integers, quantity
from flexcp.masks.core import Mask
from flexcp.masks.tables import clamped, columns, drop_single_row, last_index, rows, scalar, take


class BlockCausal(Mask):
    def __init__(self, block_size: int):
        self.block_size = block_size
        self._block_size = scalar(block_size)

    def __call__(self, b, h, q_idx, kv_idx):
        return q_idx // self._block_size >= kv_idx // self._block_size

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        size = self.block_size
        some = ((q_hi - 1) // size)[:, None] >= kv_lo // size
        every = (q_lo // size)[:, None] >= (kv_hi - 1) // size
        return some, every

    def __repr__(self) -> str:
        return f"block_causal({self.block_size})"


class FrameCausal(Mask):
    def __init__(self, frame_ids: Tensor):
        ids = drop_single_row(frame_ids)
        self.batch = ids.shape[0] if ids.dim() == 2 else None
        self.seq_len = ids.shape[-1]
        self._ids = ids.to(torch.int32)
        self._clamp_to = last_index(ids)

    def __call__(self, b, h, q_idx, kv_idx):
        q_idx = clamped(q_idx, self._clamp_to)
        kv_idx = clamped(kv_idx, self._clamp_to)
        if self.batch is None:
            return self._ids[q_idx] >= self._ids[kv_idx]
        return self._ids[b, q_idx] >= self._ids[b, kv_idx]

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        some = rows(take(self._ids, q_hi - 1)) >= columns(take(self._ids, kv_lo))
        every = rows(take(self._ids, q_lo)) >= columns(take(self._ids, kv_hi - 1))
        return some, every

    def __repr__(self) -> str:
        return f"block_causal(frame_ids{list(self._ids.shape)})"


def block_causal(block: int | Tensor) -> Mask:
    """Blocks are causal to each other and full within: the frames of a video, the steps of a block decoder.

        block 2
        kv 0 1 2 3
      q 0  # #
        1  # #
        2  # # # #
        3  # # # #

    Args:
        block: tokens in a block, at least 1; or an integer tensor [S] or [B, S], the frame of each token,
            nondecreasing, for frames of different sizes.

    Returns:
        A Mask, for any sequence length where block is an int, else for exactly S tokens. Its classes are
        exact.

    Raises:
        ValueError: block is not an int of at least 1 or a nondecreasing integer tensor.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.block_causal(2)(0, 0, torch.tensor(0), torch.arange(4)).int().tolist()
        [1, 1, 0, 0]

    Source: Yin et al. 2025, "From Slow Bidirectional to Fast Autoregressive Video Diffusion Models"
    (CausVid), 4.1.
    """
    if not isinstance(block, Tensor | list | tuple):
        return BlockCausal(quantity("block_causal", "block", block))
    frame_ids = integers("block_causal", "block", block, (1, 2), "[S] or [B, S]").long()
    if bool((frame_ids.diff() < 0).any()):
        raise ValueError("block_causal: frame ids must not decrease along the sequence; order tokens by frame.")
    if int(frame_ids.max()) >= 2**31 or int(frame_ids.min()) < -(2**31):
        raise ValueError("block_causal: frame ids must fit into 32 bits; number the frames from 0.")
    return FrameCausal(frame_ids)
