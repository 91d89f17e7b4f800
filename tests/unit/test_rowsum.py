"""Rows of gradients that ranks sent home are added in their order, and rounded once."""

import torch

from flexcp.rowsum import sum_rows


def test_rows_are_summed_in_high_precision_from_both_tensors() -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        received, own = torch.randn(7, 50, dtype=dtype), torch.randn(4, 50, dtype=dtype)
        sources = torch.tensor([0, 3, 7, 8, 6, 9, 1, 2, 4, 5, 10])
        offsets = torch.tensor([0, 3, 4, 6, 11])
        got = sum_rows(received, own, sources, offsets)
        rows = torch.cat([received, own]).double()
        want = torch.stack([rows[some].sum(0) for some in sources.tensor_split(offsets[1:-1])])
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-15)


def test_nothing_received_leaves_what_a_rank_has() -> None:
    own = torch.randn(3, 8)
    got = sum_rows(own.new_empty(0, 8), own, torch.arange(3), torch.arange(4))
    assert torch.equal(got, own)
