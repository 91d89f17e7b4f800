"""Some of the query heads of a mask: what a rank computes where ranks share the heads (`ulysses`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flexcp.blocksource import BlockSource
from flexcp.maskmods import MaskMod
from flexcp.table import Table


class SomeHeads(BlockSource):
    """The same mask for heads first ... last - 1 alone, which are then numbered from 0.

    The mask_mod still sees their global numbers.
    """

    def __init__(self, source: BlockSource, first: int, last: int) -> None:
        mask_mod = shifted_mask_mod(source.mask_mod, torch.tensor(first, dtype=torch.int32))
        super().__init__(mask_mod, source.seq_len, source.block_size, source.batch, last - first)
        self.whole, self.first, self.last = source, first, last
        self.needs_pairs = source.needs_pairs

    def inner_classes(self, q_start: Tensor, kv_start: Tensor) -> Tensor:
        return self.whole.inner_classes(q_start, kv_start)[:, self.first : self.last]

    def global_mask_mod(self, device: torch.device) -> MaskMod:
        return self._shifted(self.whole.global_mask_mod(device), device)

    def local_mask_mod(self, q_start: Tensor, kv_start: Tensor) -> MaskMod:
        return self._shifted(self.whole.local_mask_mod(q_start, kv_start), q_start.device)

    def _shifted(self, mask_mod: MaskMod, device: torch.device) -> MaskMod:
        return shifted_mask_mod(mask_mod, torch.tensor(self.first, dtype=torch.int32, device=device))


def shifted_mask_mod(mask_mod: MaskMod, first: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask_mod for tensors that hold the heads from `first` on only; `first` is a tensor, so that it is data."""

    def shifted(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_mod(b, h + first, q, kv)

    return shifted


def share_of_source(source: BlockSource, ranks: int, index: int) -> BlockSource:
    """What rank `index` of `ranks` that share the heads sees of a mask.

    Raises:
        ValueError: the mask's heads cannot be shared evenly.
    """
    if source.heads == 1 or ranks == 1:
        return source
    check_heads(source.heads, ranks)
    each = source.heads // ranks
    return SomeHeads(source, index * each, (index + 1) * each)


def share_of_table(table: Table, ranks: int, index: int) -> Table:
    """As `share_of_source`, for what the query blocks see; the counts stay those of all heads."""
    if table.heads == 1 or ranks == 1:
        return table
    each = table.heads // ranks
    return replace(table, bits=table.bits[index * each : (index + 1) * each])


def check_heads(num_heads: int, ranks: int) -> None:
    """Raises ValueError where ranks cannot share the heads evenly."""
    if num_heads % ranks:
        raise ValueError(
            f"{num_heads} query heads cannot be shared evenly by the {ranks} ranks of ulysses; pass a ulysses= that "
            "divides them, or another comm (gather, ring, exchange)"
        )
