"""Real ranks over NCCL, a GPU each: every schedule in bf16 equals dense float64 attention as one GPU does."""

import pytest
import torch

from tests import real_ranks
from tests.matrix import Case

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS < 2, reason=f"needs two CUDA devices, and there are {GPUS}"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own internals
]

BF16 = real_ranks.Where("cuda", torch.bfloat16, 64, most=0.01)
SEQ_LEN = 2000

# By mask: its score, its KV heads, and whether lse has a gradient. FLASH is the kernel where it is installed and can do
# the case: without an lse, a learned score or a score that reads indices.
MASKS = {
    "causal": ("none", "all", False),
    "document": ("distance", "two", False),
    "window": ("bias", "two", True),
    "per_head": ("slope_by_head", "all", False),
    "full": ("bias", "all", False),
    "prefix": ("window_by_inf", "two", True),
    "per_batch": ("none", "two", True),
    "dead_rows": ("none", "two", True),
}
# Kind of communication (*n: in n groups of KV heads) and layout.
SCHEDULES = {
    "gather": "head_tail",
    "gather*2": "per_document",
    "ring": "head_tail",
    "exchange": "contiguous",
    "exchange*2": "affinity",
    "ulysses": "contiguous",
}
SOME = {"full": ("gather*2", "ulysses"), "prefix": ("ring", "exchange*2"), "per_batch": ("gather", "exchange")}
SOME |= {"dead_rows": ("ring", "exchange")}


def cases(cp: int, few: bool) -> list:
    """(case, with_lse); few: each mask once, with a schedule of its own."""
    found = []
    for number, (mask, (score, kv_heads, with_lse)) in enumerate(MASKS.items()):
        for place, (comm, balance) in enumerate(SCHEDULES.items()):
            if place == number % len(SCHEDULES) if few else comm in SOME.get(mask, SCHEDULES):
                case = Case(mask, comm, balance, cp, kv_heads, SEQ_LEN, 128, score)
                found.append(pytest.param(case, with_lse, id=str(case)))
    return found


@pytest.mark.parametrize(("case", "with_lse"), cases(2, few=False))
def test_two_gpus_equal_the_oracle_as_well_as_one_does(ranks, case: Case, with_lse: bool) -> None:
    told, _ = ranks(2, "nccl").run(real_ranks.check, case, BF16, with_lse)
    print("\n".join(told))


@pytest.mark.parametrize(("case", "with_lse"), cases(4, few=True) + cases(8, few=True))
def test_more_gpus_equal_the_oracle_as_well_as_one_does(ranks, case: Case, with_lse: bool) -> None:
    if case.cp > GPUS:
        pytest.skip(f"needs {case.cp} CUDA devices")
    told, *_ = ranks(case.cp, "nccl").run(real_ranks.check, case, BF16, with_lse)
    print("\n".join(told))
