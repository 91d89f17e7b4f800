"""A hundred steps of new documents compile nothing after the first: counted in programs and by torch's own counters.

One GPU stands for one rank of eight: the plan, the stages and their kernels are real, the keys that would arrive are
random numbers in the memory layout in which `movement` hands them over.
"""

import numpy as np
import pytest
import torch
from torch import Tensor

import flexcp
from flexcp import kernel, kernel_gpu, masks
from flexcp.headgroups import head_groups
from flexcp.kernel import Score

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own internals
]

S, CP, RANK, H, G, D, BLOCK = 16_384, 8, 3, 8, 4, 64, 128


def documents(seed: int, longest: int) -> masks.Mask:
    """Packed documents of long-tailed lengths."""
    generator, lengths = np.random.default_rng(seed), []
    while (left := S - sum(lengths)) > 0:
        lengths.append(min(left, longest, max(1, int(generator.lognormal(np.log(1500), 1.2)))))
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (masks.causal() & masks.document(ids)).to("cuda")


def by_distance(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, slopes: Tensor) -> Tensor:
    return s - slopes[h] * (q - kv)


def keys(comm: str, rows: int, heads: int) -> tuple[Tensor, Tensor]:
    """As `Exchanging.wait` and `Gathering.wait` return them."""
    if comm == "exchange":
        both = torch.randn(1, heads, rows, 2 * D, device="cuda", dtype=torch.bfloat16)
        return both[..., :D], both[..., D:]
    k, v = (torch.randn(1, heads, rows, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return k, v


def step(plan: flexcp.Plan, score: Score) -> int:
    """Forward and backward of every stage of every head group; returns how many stages there were."""
    schedule = plan.schedules["mask"]
    q, dout = (torch.randn(1, H, plan.local_len, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    calls = 0
    for group in head_groups(schedule, H, G):
        heads = group.queries
        for stage in group.stages:
            k, v = keys(plan.comm, stage.kv_start.numel() * BLOCK, group.keys.stop - group.keys.start)
            some = q[:, heads], k, v
            out, lse = kernel.forward(*some, stage, group.score(score), D**-0.5)
            out = out.to(q.dtype)
            kernel.backward(*some, out, lse, dout[:, heads], None, stage, group.score(score), D**-0.5)
            calls += 1
    return calls


def compiled() -> dict[str, int]:
    """What torch says it has compiled so far, whatever compiled it."""
    found = {}
    for room in ("frames", "inductor", "aot_autograd", "stats"):
        for name, count in torch._dynamo.utils.counters[room].items():
            found[f"{room} {name}"] = count
    return found


@pytest.mark.parametrize("with_score", [False, True], ids=["no_score", "learned_slopes"])
@pytest.mark.parametrize(("comm", "groups"), [("exchange", 1), ("gather", 1), ("exchange", 2), ("gather", 4)])
def test_a_hundred_packings_compile_nothing(comm: str, groups: int, with_score: bool) -> None:
    slopes = torch.rand(H, device="cuda") * 0.01
    score = Score(by_distance, (slopes,), (True,)) if with_score else Score(None)
    plan, before, stages = None, None, []
    for seed in range(100):
        # The first documents are short: later ones need more keys than the first plan has room for.
        mask = documents(seed, longest=12_000 if seed else 300)
        keywords = {"balance": "contiguous", "head_groups": groups, "block_size": BLOCK, "device": "cuda"}
        plan = flexcp.plan(mask, S, CP, rank=RANK, comm=comm, like=plan, **keywords)
        stages.append(step(plan, score) // groups)
        now = len(kernel_gpu._programs), compiled()
        if before is None:
            before = now
        assert now[0] == before[0], f"step {seed} made a program"
        changed = {name: count for name, count in now[1].items() if count != before[1].get(name, 0)}
        assert not changed, f"step {seed}: {changed}"
    print(f"{comm} in {groups}: {before[0]} programs, stages a step: {sorted(set(stages))}, counters {before[1]}")
    assert max(stages) == (2 if comm == "exchange" else 1)
