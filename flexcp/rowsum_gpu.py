"""`rowsum` on a GPU, as one pass over memory: torch's embedding_bag loads 2-byte elements one by one."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 2048


@triton.jit(do_not_specialize=["num_received"])  # new documents, another number
def _sum_rows(received, own, sources, offsets, out, num_received, width, COLUMNS: tl.constexpr, WIDE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], tl.float64 if WIDE else tl.float32)
    for i in range(tl.load(offsets + row), tl.load(offsets + row + 1)):
        source = tl.load(sources + i)
        if source < num_received:
            here = received + source * width
        else:
            here = own + (source - num_received) * width
        total += tl.load(here + column, mask=inside, other=0.0).to(total.dtype)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def sum_rows(received: Tensor, own: Tensor, sources: Tensor, offsets: Tensor) -> Tensor:
    """See `flexcp.rowsum.sum_rows`."""
    rows, width = own.shape
    out = torch.empty_like(own)
    grid = rows, triton.cdiv(width, _COLUMNS)
    wide = own.dtype == torch.float64
    _sum_rows[grid](received, own, sources, offsets, out, len(received), width, COLUMNS=_COLUMNS, WIDE=wide)
    return out
