"""tree: each token sees its ancestors; the verification of speculative decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from flexcp.masks.checks import integers
from flexcp.masks.core import Mask
from flexcp.masks.reach import Reach
from flexcp.masks.tables import clamped, columns, drop_single_row, extreme, last_index, rows


class Tree(Mask):
    """A tree whose tokens are not in depth-first order: [enter, leave) is a node's interval in that order."""

    def __init__(self, enter: Tensor, leave: Tensor, text: str):
        enter, leave = drop_single_row(enter), drop_single_row(leave)
        self._enter, self._leave = enter.to(torch.int32), leave.to(torch.int32)
        self._clamp_to = last_index(enter)
        self.batch = enter.shape[0] if enter.dim() == 2 else None
        self.seq_len = enter.shape[-1]
        self.text = text

    def __call__(self, b, h, q_idx, kv_idx):
        q_idx = clamped(q_idx, self._clamp_to)
        kv_idx = clamped(kv_idx, self._clamp_to)
        at = (lambda table, index: table[index]) if self.batch is None else (lambda table, index: table[b, index])
        here = at(self._enter, q_idx)
        return (at(self._enter, kv_idx) <= here) & (here < at(self._leave, kv_idx))

    def classify(self, q_lo, q_hi, kv_lo, kv_hi):
        q_first = rows(extreme(self._enter, q_lo, q_hi, largest=False))
        q_last = rows(extreme(self._enter, q_lo, q_hi, largest=True))
        first_enter = columns(extreme(self._enter, kv_lo, kv_hi, largest=False))
        last_enter = columns(extreme(self._enter, kv_lo, kv_hi, largest=True))
        first_leave = columns(extreme(self._leave, kv_lo, kv_hi, largest=False))
        last_leave = columns(extreme(self._leave, kv_lo, kv_hi, largest=True))
        some = (first_enter <= q_last) & (q_first < last_leave) & (kv_lo < q_hi[:, None])
        every = (last_enter <= q_first) & (q_last < first_leave)
        return some, every

    def __repr__(self) -> str:
        return self.text


def tree(parents: Tensor) -> Mask:
    """Each token sees itself and its ancestors, up to its root.

        parents -1 0 0 2      (0 has the children 1 and 2, 2 has the child 3)
        kv 0 1 2 3
      q 0  #
        1  # #
        2  #   #
        3  #   # #

    Args:
        parents: integer tensor [S] or [B, S]: index of each token's parent, below its own; -1 for a root. A
            prompt is a
            chain: parents[i] = i - 1.

    Returns:
        A Mask for sequences of exactly S tokens. Its classes are exact where tokens are in depth-first order
        (each subtree contiguous); in any other order, such as level by level, "full" is exact and "empty"
        conservative.

    Raises:
        ValueError: parents is not an integer tensor [S] or [B, S], or a parent does not come before its
        child.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> masks.tree(torch.tensor([-1, 0, 0, 2]))(0, 0, torch.tensor(3), torch.arange(4)).int().tolist()
        [1, 0, 1, 1]

    Source: Miao et al. 2024, "SpecInfer", 4.2; Cai et al. 2024, "Medusa", 2.1.2.
    """
    parents = integers("tree", "parents", parents, (1, 2), "[S] or [B, S]").long()
    own = torch.arange(parents.shape[-1], device=parents.device)
    if bool(((parents < -1) | (parents >= own)).any()):
        raise ValueError(
            "tree: every parent must come before its child, and roots have -1: each parents[i] is in [-1, i); "
            "order the tokens so that parents come first."
        )
    intervals = [_depth_first(row) for row in parents.reshape(-1, parents.shape[-1]).tolist()]
    enter, size = torch.tensor(intervals, device=parents.device).unbind(1)
    text = f"tree(parents{list(parents.shape)})"
    if torch.equal(enter, own.expand_as(enter)):
        return Reach(own + size, text)
    return Tree(enter, enter + size, text)


def _depth_first(parents: list[int]) -> tuple[list[int], list[int]]:
    """When each node is entered, children in order of index, and the size of its subtree."""
    size = [1] * len(parents)
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    enter, free, root_free = [0] * len(parents), [0] * len(parents), 0
    for node, parent in enumerate(parents):
        if parent < 0:
            enter[node], root_free = root_free, root_free + size[node]
        else:
            enter[node] = free[parent]
            free[parent] += size[node]
        free[node] = enter[node] + 1
    return enter, size
