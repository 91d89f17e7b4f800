"""block_sparse: any pattern of whole blocks, from a table."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import quantity
from flexcp.masks.core import Mask
from flexcp.masks.tables import scalar


class BlockSparse(Mask):
    def __init__(self, table: Tensor, q_block: int, kv_block: int):
        self._table = table  # bool [nq, nk] or [B or 1, H or 1, nq, nk]
        self.q_block, self.kv_block = q_block, kv_block
        self._q_block, self._kv_block = scalar(q_block).to(table.device), scalar(kv_block).to(table.device)
        self._last_q, self._last_kv = (scalar(n - 1).to(table.device) for n in table.shape[-2:])
        if table.dim() == 4:
            self.batch, self.heads = (n if n > 1 else None for n in table.shape[:2])

    def __call__(self, b, h, q_idx, kv_idx):
        q = torch.minimum(q_idx // self._q_block, self._last_q)
        kv = torch.minimum(kv_idx // self._kv_block, self._last_kv)
        if self._table.dim() == 2:
            return self._table[q, kv]
        return self._table[0 if self.batch is None else b, 0 if self.heads is None else h, q, kv]

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        device = self._table.device
        num_q, num_kv = self._table.shape[-2:]
        q_first = (q_lo // self.q_block).clamp(max=num_q - 1).to(device)
        q_last = ((q_hi - 1) // self.q_block).clamp(max=num_q - 1).to(device)
        kv_first = (kv_lo // self.kv_block).clamp(max=num_kv - 1).to(device)
        kv_last = ((kv_hi - 1) // self.kv_block).clamp(max=num_kv - 1).to(device)
        # Rows first: how many visible blocks each row of the table has up to each column.
        counts = torch.zeros(*self._table.shape[:-1], num_kv + 1, dtype=torch.int32, device=device)
        torch.cumsum(self._table, -1, dtype=torch.int32, out=counts[..., 1:])
        some = every = None
        for step in range(int((q_last - q_first).max()) + 1):
            row = counts[..., torch.minimum(q_first + step, q_last), :]
            hits = row[..., kv_last + 1] - row[..., kv_first]
            any_here, all_here = hits > 0, hits == (kv_last - kv_first + 1)
            some = any_here if some is None else some | any_here
            every = all_here if every is None else every & all_here
        return some.to(q_lo.device), every.to(q_lo.device)

    def __repr__(self) -> str:
        return f"block_sparse(table{list(self._table.shape)}, ({self.q_block}, {self.kv_block}))"


def block_sparse(table: Tensor, block_size: int | tuple[int, int]) -> Mask:
    """Whole blocks by a table: visible where table[q // q_block, kv // kv_block].

        block_size 2, table [[1, 0], [1, 1]]
        kv 0 1 2 3
      q 0  # #
        1  # #
        2  # # # #
        3  # # # #

    Args:
        table: bool [nq, nk], or [B or 1, H or 1, nq, nk], the blocks that are visible (for example the top-k
            blocks that a coarse attention chose). Costs S^2 / block_size^2 bytes.
        block_size: tokens in a block, or (of queries, of keys), at least 1; need not be the attention's own.

    Returns:
        A Mask for sequences that the table covers; beyond it, its last row and column count. Its classes are
        exact.

    Raises:
        ValueError: table is not a bool tensor with 2 or 4 dims, or block_size is not an int or two.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.block_sparse(torch.tensor([[True, False], [True, True]]), 2)
        >>> mask(0, 0, torch.tensor(1), torch.arange(4)).int().tolist()
        [1, 1, 0, 0]

    Source: Child et al. 2019, "Sparse Transformers", 5; Zhang et al. 2025, "VSA: Faster Video Diffusion with
    Trainable Sparse Attention".
    """
    if not isinstance(table, Tensor) or table.dtype != torch.bool or table.dim() not in (2, 4) or not table.numel():
        given = f"{table.dtype} {list(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
        raise ValueError(f"block_sparse: table must be a bool tensor [nq, nk] or [B, H, nq, nk], got {given}.")
    sizes = (block_size, block_size) if isinstance(block_size, int) else block_size
    if not isinstance(sizes, list | tuple) or len(sizes) != 2:
        raise ValueError(f"block_sparse: block_size must be an int or (queries, keys), got {block_size!r}.")
    return BlockSparse(table, *(quantity("block_sparse", "block_size", size) for size in sizes))
