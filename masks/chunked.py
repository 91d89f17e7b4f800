"""chunked: the sequence in chunks that do not see each other."""

from __future__ import annotations

from flexcp.masks.checks import flag, quantity
from flexcp.masks.core import Mask
from flexcp.masks.reach import reach_classes
from flexcp.masks.tables import scalar


class Chunked(Mask):
    def __init__(self, chunk_size: int, causal: bool):
        self.chunk_size, self.causal = chunk_size, causal
        self._chunk_size = scalar(chunk_size)

    def __call__(self, b, h, q_idx, kv_idx):
        same = q_idx // self._chunk_size == kv_idx // self._chunk_size
        return same & (kv_idx <= q_idx) if self.causal else same

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        size = self.chunk_size
        kv_first, kv_last = kv_lo // size, (kv_hi - 1) // size
        if self.causal:
            return reach_classes(q_lo, q_hi, kv_lo, kv_hi, (kv_last + 1) * size, (kv_first + 1) * size)
        q_first, q_last = (q_lo // size)[:, None], ((q_hi - 1) // size)[:, None]
        return (q_first <= kv_last) & (kv_first <= q_last), (q_first == kv_last) & (kv_first == q_last)

    def __repr__(self) -> str:
        return f"chunked({self.chunk_size}{'' if self.causal else ', causal=False'})"


def chunked(chunk_size: int, *, causal: bool = True) -> Mask:
    """Tokens see their own chunk of the sequence, up to themselves.

        chunk_size 2
        kv 0 1 2 3
      q 0  #
        1  # #
        2      #
        3      # #

    Args:
        chunk_size: in tokens, at least 1.
        causal: kv <= q; False: the whole chunk.

    Returns:
        A Mask for any sequence length. Its classes are exact.

    Raises:
        ValueError: chunk_size is not an int of at least 1, or causal is not a bool.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.chunked(2)(0, 0, torch.tensor(3), torch.arange(4)).int().tolist()
        [0, 0, 1, 1]

    Source: the local layers of Llama 4 (Meta 2025, "The Llama 4 herd", iRoPE).
    """
    return Chunked(quantity("chunked", "chunk_size", chunk_size), flag("chunked", "causal", causal))
