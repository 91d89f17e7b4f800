"""Sums of rows in a given order, rounded once: how gradients that ranks sent home become one."""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag


def sum_rows(received: Tensor, own: Tensor, sources: Tensor, offsets: Tensor) -> Tensor:
    """Adds up rows of two tensors.

    Args:
        received: [n, width]; own: [m, width], of one dtype, contiguous.
        sources: int64, numbers of rows, those of `received` first and then, from n on, those of `own`.
        offsets: int64 [m + 1]; row i of the result is the sum of sources[offsets[i] : offsets[i + 1]], in that order.
    Returns:
        [m, width] in their dtype, added up in fp32 (fp64 for fp64).
    """
    if own.device.type == "cuda":
        from flexcp.rowsum_gpu import sum_rows as on_gpu  # Triton is not there on a CPU

        return on_gpu(received, own, sources, offsets)
    return embedding_bag(sources, torch.cat([received, own]), offsets, mode="sum", include_last_offset=True)
