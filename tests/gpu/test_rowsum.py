"""On a GPU rows are summed by a kernel of our own: in their order, and rounded once."""

import pytest
import torch

from flexcp.rowsum import sum_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [64, 5000])
def test_sums_equal_a_loop(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    high = torch.float64 if dtype == torch.float64 else torch.float32
    for count in (0, 1, 16, 37):
        received, own = (torch.randn(n, width, device="cuda", dtype=dtype) for n in (count, 6))
        row = torch.cat([torch.randint(6, (count,)), torch.arange(6)])
        sources = row.argsort(stable=True)
        offsets = torch.searchsorted(row[sources], torch.arange(7))
        got = sum_rows(received, own, sources.cuda(), offsets.cuda())
        rows = torch.cat([received, own])
        for i, some in enumerate(sources.tensor_split(offsets[1:-1])):
            want = torch.zeros(width, device="cuda", dtype=high)
            for source in some.tolist():
                want += rows[source]
            assert torch.equal(got[i], want.to(dtype))
