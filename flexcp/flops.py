"""Floating-point operations of a step, counted twice: on the pairs that the mask lets see each other, and on all S x S.

The first is what the step had to compute. The second is what the field reports (PaLM, appendix B; torchtitan), for
comparison with numbers from elsewhere; of a mask that hides half of the pairs it says twice as much attention.
Recomputation is counted in neither.
"""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

import flexcp
from flexcp import cost
from flexcp.models import Llama3Config

# Of partial blocks so many are evaluated on each rank; of more, as many evenly chosen ones.
_MOST_BLOCKS = 4096
_PAIRS_AT_ONCE = 1 << 22


def step_flops(model: Llama3Config, tokens: float, pairs: float) -> float:
    """Operations of a forward and a backward pass.

    A multiply-add is two; backward computes twice what forward does. Matrices: 6 for each of their elements and token.
    Attention: QK^T and PV are 4 per element of a head forward, so 12 for each pair.

    Args:
        tokens: that are not padding.
        pairs: (query, key) pairs, summed over rows and query heads, of one layer.
    """
    embedding = 0 if model.tied_head else model.vocab_size * model.dim  # is looked up, and not multiplied
    return 6 * (model.num_params - embedding) * tokens + 12 * model.num_layers * model.head_dim * pairs


class VisiblePairs:
    """Counts the pairs that this rank's queries see, once for each plan.

    Full blocks are counted. Of the partial ones the pairs are evaluated: all of them up to 4,096 on a rank; beyond, as
    many evenly chosen ones stand for the rest.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[flexcp.Plan, float] = WeakKeyDictionary()

    def __call__(self, plan: flexcp.Plan) -> float:
        """Pairs per row and query head of the model, on the average over those that the mask distinguishes.

        The sum over the ranks of a cp group is that of the whole sequence.
        """
        if plan not in self._known:
            schedules = plan.schedules.values()
            self._known[plan] = sum(map(_pairs_of, schedules)) / len(schedules)
        return self._known[plan]


def _pairs_of(schedule) -> float:
    source = schedule.source
    q_size, kv_size = source.block_size
    total = 0.0
    for stage in schedule.stages:
        if (mask := stage.block_mask) is None:
            continue
        total += int(mask.full_kv_num_blocks.sum()) * q_size * kv_size
        partial = _listed(mask.kv_num_blocks, mask.kv_indices)
        chosen = partial
        if len(partial) > _MOST_BLOCKS:
            chosen = partial[torch.linspace(0, len(partial) - 1, _MOST_BLOCKS, device=partial.device).long()]
        seen = sum(_seen(stage, some, q_size, kv_size) for some in chosen.split(_PAIRS_AT_ONCE // (q_size * kv_size)))
        total += seen * (len(partial) / max(1, len(chosen)))
    # With ulysses a rank has more rows, for its share of the heads.
    return total / (source.batch * source.heads * schedule.ulysses)


def _listed(num_blocks: Tensor, indices: Tensor) -> Tensor:
    """Ordered block lists as rows of (batch, head, query block, key block), int64."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < num_blocks[..., None]
    place = listed.nonzero()
    return torch.cat([place[:, :3], indices[listed].long()[:, None]], 1)


def _seen(stage, blocks: Tensor, q_size: int, kv_size: int) -> int:
    """Visible pairs in blocks [n, 4]."""
    if not len(blocks):
        return 0
    b, h, i, j = blocks.unbind(1)
    q = stage.q_start[i][:, None] + torch.arange(q_size, device=blocks.device)
    kv = stage.kv_start[j][:, None] + torch.arange(kv_size, device=blocks.device)
    over_keys = torch.vmap(stage.mask_mod, in_dims=(None, None, None, 0))
    over_blocks = torch.vmap(torch.vmap(over_keys, in_dims=(None, None, 0, None)))
    return int(over_blocks(b, h, q, kv).sum())


def peak_tflops(device_name: str, dtype: torch.dtype) -> float | None:
    """The nominal peak of a device's dense matrix products, in 10^12 operations a second; None where it is not known.

    Args:
        device_name: as torch.cuda.get_device_name gives it.
        dtype: of the parameters.
    """
    for device in cost.devices().values():
        if device.get("name", "\0") in device_name:
            return device["peak_tflops"].get(str(dtype).removeprefix("torch."))
    return None
