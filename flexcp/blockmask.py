"""Block classes as a BlockMask's lists, and back.

A *class* says what a block of queries sees of a block of keys: nothing (EMPTY), some of it (PARTIAL) or all (FULL).
PARTIAL is always safe, since the mask itself is applied inside partial blocks.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, noop_mask

from flexcp.maskmods import MaskMod

EMPTY, PARTIAL, FULL = 0, 1, 2


def block_classes(block_mask: BlockMask) -> Tensor:
    """The classes a BlockMask holds: uint8 [batch, heads, query blocks, key blocks]."""
    partial = _scatter(block_mask.kv_num_blocks, block_mask.kv_indices)
    # A BlockMask without a mask_mod sees its partial blocks whole.
    result = partial.to(torch.uint8) * (FULL if block_mask.mask_mod is noop_mask else PARTIAL)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _scatter(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        result = torch.where(full, FULL, result).to(torch.uint8)
    return result


def _scatter(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """Ordered block lists to a dense table: bool, the shape of `indices`."""
    columns = indices.shape[-1]
    listed = torch.arange(columns, device=indices.device) < num_blocks[..., None]
    # What stands behind a row's count is undefined: it is sent to a spare column.
    dense = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    dense.scatter_(-1, torch.where(listed, indices, columns).long(), True)
    return dense[..., :columns]


def _listed(dense: Tensor) -> tuple[Tensor, Tensor]:
    """A dense bool table to (counts int32 [.., rows], indices int32 [.., rows, columns]), indices ascending.

    Indices are as wide as the table, as the kernels need, but only the listed ones are ever touched.
    """
    counts = dense.sum(-1, dtype=torch.int32)
    indices = torch.zeros(dense.shape, dtype=torch.int32, device=dense.device)
    rows, columns = dense.flatten(0, -2).nonzero(as_tuple=True)
    per_row = counts.flatten().long()
    slots = torch.arange(rows.numel(), device=dense.device) - (per_row.cumsum(0) - per_row)[rows]
    indices.view(-1, dense.shape[-1])[rows, slots] = columns.to(torch.int32)
    return counts, indices


def local_block_mask(classes: Tensor, block_size: tuple[int, int], mask_mod: MaskMod) -> BlockMask:
    """The BlockMask of one stage: some query blocks of one rank against some key blocks.

    Args:
        classes: uint8 [batch, heads, nq, nk].
        block_size: (queries, keys) in a block.
        mask_mod: in the stage's local indices.
    Returns:
        a BlockMask over nq * block_size[0] queries and nk * block_size[1] keys, with its transposed lists; partial and
        full tables have one shape, as torch 2.11's Triton kernel needs.
    """
    partial, full = classes == PARTIAL, classes == FULL
    kv_num, kv_indices = _listed(partial)
    full_num, full_indices = _listed(full)
    q_num, q_indices = _listed(partial.transpose(-2, -1))
    full_q_num, full_q_indices = _listed(full.transpose(-2, -1))
    return BlockMask(
        seq_lengths=(classes.shape[2] * block_size[0], classes.shape[3] * block_size[1]),
        kv_num_blocks=kv_num,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_num,
        full_kv_indices=full_indices,
        q_num_blocks=q_num,
        q_indices=q_indices,
        full_q_num_blocks=full_q_num,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
    )
