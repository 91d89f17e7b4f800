"""shared_prefix: several continuations of one prompt, without a copy of the prompt for each."""

from __future__ import annotations

from torch import Tensor

from flexcp.masks.checks import integers
from flexcp.masks.core import Mask
from flexcp.masks.reach import Reach
from flexcp.masks.tables import run_ends, runs_of


def shared_prefix(group_ids: Tensor, branch_ids: Tensor) -> Mask:
    """Causal; tokens see the prefix of their group and their own branch, not the other branches.

        group_ids  0 0 0 0    branch_ids 0 0 1 2
        kv 0 1 2 3
      q 0  #
        1  # #
        2  # # #
        3  # #   #

    Args:
        group_ids: integer tensor [S] or [B, S]: the prompt each token belongs to; neighbours of one id are
            one group.
        branch_ids: integer tensor of the same shape: 0 for the group's prefix, which comes first; any other
            number is a continuation, contiguous within its group.

    Returns:
        A Mask for sequences of exactly S tokens. Its classes are exact.

    Raises:
        ValueError: the two differ in shape, are not integers, a prefix comes after a continuation, or a
            continuation is cut in two.

    Example:
        >>> import torch
        >>> from flexcp import masks
        >>> mask = masks.shared_prefix(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 1, 2]))
        >>> mask(0, 0, torch.tensor(3), torch.arange(4)).int().tolist()
        [1, 1, 0, 1]

    Source: Juravsky et al. 2024, "Hydragen"; group sampling in Shao et al. 2024, "DeepSeekMath", 4.1.
    """
    group_ids = integers("shared_prefix", "group_ids", group_ids, (1, 2), "[S] or [B, S]").long()
    branch_ids = integers("shared_prefix", "branch_ids", branch_ids, (1, 2), "[S] or [B, S]").long()
    if group_ids.shape != branch_ids.shape:
        raise ValueError(
            f"shared_prefix: group_ids and branch_ids must have the same shape, got {list(group_ids.shape)} and "
            f"{list(branch_ids.shape)}."
        )
    groups = runs_of(group_ids)
    branch = branch_ids - branch_ids.min()
    pairs = groups * (branch.max() + 1) + branch  # one number for each branch of each group
    runs = runs_of(pairs)
    if bool((runs_of(pairs.sort(-1).values)[..., -1] != runs[..., -1]).any()):
        raise ValueError(
            "shared_prefix: a branch of a group is cut in two by another; put the tokens of each branch side by side."
        )
    is_prefix = branch_ids == 0
    late = is_prefix[..., 1:] & ~is_prefix[..., :-1] & (groups[..., 1:] == groups[..., :-1])
    if bool(late.any()):
        raise ValueError("shared_prefix: a prefix (branch 0) comes after a continuation; put it first in its group.")
    ends = run_ends(groups).where(is_prefix, run_ends(runs))
    return Reach(ends, f"shared_prefix(group_ids{list(group_ids.shape)}, branch_ids{list(branch_ids.shape)})")
