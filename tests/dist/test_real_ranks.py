"""What tests/gpu/test_ranks.py runs over NCCL, over gloo: the same checks in fp32."""

import dataclasses

import pytest
import torch

from tests import real_ranks
from tests.gpu.test_ranks import cases
from tests.matrix import Case

FP32 = real_ranks.Where("cpu", torch.float32, 16, most=1e-5)


@pytest.mark.parametrize(("case", "with_lse"), cases(2, few=True))
def test_real_ranks_equal_the_oracle_as_well_as_one_does(ranks, case: Case, with_lse: bool) -> None:
    case = dataclasses.replace(case, seq_len=500)
    told, other = ranks(2, "gloo").run(real_ranks.check, case, FP32, with_lse)
    assert len(told) == 5 + with_lse
    assert other == []


def test_an_error_above_one_ranks_own_is_seen(ranks) -> None:
    """Ranks that lose the lowest half of every digit are found out, though the result is within the largest error."""
    case = Case("causal", "ring", "head_tail", 2, "two", 500, 128, "none")
    for told in ranks(2).run(rounded, case):
        assert "one rank" in told


def rounded(case: Case) -> str:
    """What `check` says where the ranks' results, and not one rank's, are rounded to bf16."""
    real = real_ranks.matrix.flexcp_results

    def rough(*args, **how):
        results = real(*args, **how)
        return results if how.get("alone") else {name: x.bfloat16().float() for name, x in results.items()}

    real_ranks.matrix.flexcp_results = rough
    try:
        real_ranks.check(case, dataclasses.replace(FP32, most=0.01), False)
    except AssertionError as error:
        return str(error)
    finally:
        real_ranks.matrix.flexcp_results = real
    return "one rank" if torch.distributed.get_rank() else "nothing"
