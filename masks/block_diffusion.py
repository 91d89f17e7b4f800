"""block_diffusion: noised and clean copies of a sequence side by side, decoded block by block."""

from __future__ import annotations

import torch

from flexcp.masks.checks import quantity
from flexcp.masks.core import Mask
from flexcp.masks.tables import scalar


class BlockDiffusion(Mask):
    def __init__(self, clean_len: int, block_size: int):
        self.clean_len, self.block_size, self.seq_len = clean_len, block_size, 2 * clean_len
        self._clean_len, self._block_size = scalar(clean_len), scalar(block_size)

    def __call__(self, b, h, q_idx, kv_idx):
        q_clean, kv_clean = q_idx >= self._clean_len, kv_idx >= self._clean_len
        q_block = (q_idx % self._clean_len) // self._block_size
        kv_block = (kv_idx % self._clean_len) // self._block_size
        own = (q_clean == kv_clean) & (q_block == kv_block)
        return own | (kv_clean & (q_block > kv_block))

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        some = torch.zeros(q_lo.numel(), kv_lo.numel(), dtype=torch.bool, device=q_lo.device)
        every = ~some
        for q_clean in (False, True):
            q_there, q_first, q_last = self._half(q_lo, q_hi, q_clean)
            for kv_clean in (False, True):
                kv_there, kv_first, kv_last = self._half(kv_lo, kv_hi, kv_clean)
                both = q_there[:, None] & kv_there
                q_from, q_to = q_first[:, None], q_last[:, None]
                if q_clean and not kv_clean:
                    reached = covered = torch.zeros_like(both)
                elif q_clean:  # block causal
                    reached, covered = q_to >= kv_first, q_from >= kv_last
                elif kv_clean:  # strictly earlier blocks
                    reached, covered = q_to > kv_first, q_from > kv_last
                else:  # own block
                    reached = (q_from <= kv_last) & (kv_first <= q_to)
                    covered = (q_from == kv_last) & (kv_first == q_to)
                some |= both & reached
                every &= covered | ~both
        return some, every

    def _half(self, lo, hi, clean):
        """Does each range reach into this half, and the first and last block that it holds there."""
        begin = self.clean_len if clean else 0
        lo, hi = lo.clamp(min=begin), hi.clamp(max=begin + self.clean_len)
        return lo < hi, (lo - begin) // self.block_size, (hi - 1 - begin) // self.block_size

    def __repr__(self) -> str:
        return f"block_diffusion({self.clean_len}, {self.block_size})"


def block_diffusion(clean_len: int, block_size: int) -> Mask:
    """Training mask of block diffusion over [noised x_t, clean x_0]: a noised block sees itself and the clean
    blocks before it, a clean block the clean blocks up to itself; nothing clean sees noise.

        clean_len 2, block_size 1 (columns and rows 0-1 noised, 2-3 clean)
        kv 0 1 2 3
      q 0  #
        1    # #
        2      #
        3      # #

    Args:
        clean_len: length of the clean sequence, in tokens, at least 1.
        block_size: tokens denoised together, at least 1; the last block may be shorter.

    Returns:
        A Mask for sequences of exactly 2 * clean_len tokens. Its classes are exact.

    Raises:
        ValueError: clean_len or block_size is not an int of at least 1.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.block_diffusion(2, 1)(0, 0, torch.tensor(1), torch.arange(4)).int().tolist()
        [0, 1, 1, 0]

    Source: Arriola et al. 2025, "Block Diffusion" (BD3-LM), 3.1 and appendix B.6.
    """
    return BlockDiffusion(
        quantity("block_diffusion", "clean_len", clean_len), quantity("block_diffusion", "block_size", block_size)
    )
