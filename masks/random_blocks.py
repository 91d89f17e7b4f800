"""random_blocks and bigbird: every block of queries sees a few blocks of keys, drawn once from a seed."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import quantity
from flexcp.masks.core import Mask
from flexcp.masks.global_local import global_local
from flexcp.masks.tables import clamped, scalar, take


class RandomBlocks(Mask):
    def __init__(self, num_random: int, block_size: int, seq_len: int, seed: int):
        self.num_random, self.block_size, self.seq_len, self.seed = num_random, block_size, seq_len, seed
        num_blocks = -(-seq_len // block_size)
        # The choices of each block, distinct: num_random tables [num_blocks].
        self._chosen = _choose(num_blocks, num_random, seed).unbind(1)
        self._block_size = scalar(block_size)
        self._clamp_to = scalar(seq_len - 1)

    def __call__(self, b, h, q_idx, kv_idx):
        q_block = clamped(q_idx, self._clamp_to) // self._block_size
        kv_block = clamped(kv_idx, self._clamp_to) // self._block_size
        visible = self._chosen[0][q_block] == kv_block
        for chosen in self._chosen[1:]:
            visible = visible | (chosen[q_block] == kv_block)
        return visible

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        last = self._chosen[0].numel() - 1
        q_first = q_lo // self.block_size
        q_last = ((q_hi - 1) // self.block_size).clamp(max=last)
        kv_first = kv_lo // self.block_size
        kv_last = ((kv_hi - 1) // self.block_size).clamp(max=last)
        wanted = kv_last - kv_first + 1
        some = torch.zeros(q_lo.numel(), kv_lo.numel(), dtype=torch.bool, device=q_lo.device)
        every = ~some
        for step in range(int((q_last - q_first).max()) + 1):
            block = torch.minimum(q_first + step, q_last)  # past its last block a range repeats it
            hits = torch.zeros_like(some, dtype=torch.int16)
            for chosen in self._chosen:
                choice = take(chosen, block)[:, None]
                hits += (choice >= kv_first) & (choice <= kv_last)
            some |= hits > 0
            every &= hits == wanted
        return some, every

    def __repr__(self) -> str:
        return f"random_blocks({self.num_random}, {self.block_size}, {self.seq_len}, seed={self.seed})"


def _choose(num_blocks: int, num_random: int, seed: int) -> Tensor:
    """num_random distinct blocks for each block, uniformly: Floyd's sampling, one column at a time."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.empty(num_blocks, num_random, dtype=torch.int32)
    for step in range(num_random):
        top = num_blocks - num_random + step
        draw = torch.randint(0, top + 1, (num_blocks,), generator=generator, dtype=torch.int32)
        taken = (chosen[:, :step] == draw[:, None]).any(1)
        chosen[:, step] = draw.masked_fill(taken, top)
    return chosen


def random_blocks(num_random: int, block_size: int, seq_len: int, *, seed: int = 0) -> Mask:
    """Every block of queries sees num_random distinct blocks of keys, the same on every rank and device for
    one seed.

        num_random 1, block_size 1
        kv 0 1 2 3
      q 0      #
        1  #
        2      #
        3    #

    Args:
        num_random: blocks of keys for each block of queries, at least 1, at most the number of blocks.
        block_size: in tokens, at least 1.
        seq_len: S, in tokens.
        seed: of the draw, at least 0.

    Returns:
        A Mask for sequences of exactly seq_len tokens. Not causal. Its classes are exact.

    Raises:
        ValueError: an argument is not an int in its range.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.random_blocks(2, 4, 16)
        >>> mask(0, 0, torch.tensor(5), torch.arange(16)).sum().item()
        8

    Source: Zaheer et al. 2020, "Big Bird", 2.
    """
    for name, value in (("num_random", num_random), ("block_size", block_size), ("seq_len", seq_len)):
        quantity("random_blocks", name, value)
    quantity("random_blocks", "seed", seed, least=0)
    num_blocks = -(-seq_len // block_size)
    if num_random > num_blocks:
        raise ValueError(
            f"random_blocks: num_random={num_random} exceeds the {num_blocks} blocks of {block_size} tokens that "
            f"{seq_len} tokens have; ask for fewer or smaller blocks."
        )
    return RandomBlocks(num_random, block_size, seq_len, seed)


def bigbird(window: int, num_global: int, num_random: int, block_size: int, seq_len: int, *, seed: int = 0) -> Mask:
    """A window, the first num_global tokens global, and random blocks.

        window 2, num_global 1, num_random 1, block_size 1
        kv 0 1 2 3 4
      q 0  # # # # #
        1  # # #   #
        2  # # # #
        3  #   # # #
        4  # #   # #

    Args:
        window: keys on each side, the query itself included, in tokens, at least 1.
        num_global: tokens at the start that see and are seen by every token, at least 1.
        num_random, block_size, seq_len, seed: as in `random_blocks`.

    Returns:
        `global_local(...) | random_blocks(...)` for exactly seq_len tokens. "empty" is exact; "full" is
        conservative where window and random blocks only together fill a box.

    Raises:
        ValueError: an argument is not an int in its range.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.bigbird(3, 1, 1, 4, 16)
        global_local(3, is_global[16]) | random_blocks(1, 4, 16, seed=0)

    Source: Zaheer et al. 2020, "Big Bird", 2 (internal transformer construction).
    """
    quantity("bigbird", "num_global", num_global)
    quantity("bigbird", "seq_len", seq_len)
    is_global = torch.arange(seq_len) < num_global
    return global_local(window, is_global) | random_blocks(num_random, block_size, seq_len, seed=seed)
