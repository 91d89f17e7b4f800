"""The oracle on real ranks of any device: the same checks over gloo in fp32 and over NCCL in bf16."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from tests import matrix, oracle


@dataclass(frozen=True)
class Where:
    """What a rank computes on and in.

    Attributes:
        most: the largest error that is allowed, relative to the largest value.
    """

    device: str
    dtype: torch.dtype
    dim: int
    most: float


# One rank's own error, doubled, and what stands for none at all: sums in fp32, in another order.
TIMES_ALONE, ROUNDING = 2.0, 1e-6


def reference(case: matrix.Case, where: Where, with_lse: bool) -> dict[str, torch.Tensor]:
    """Dense float64 attention on inputs that have been rounded to the dtype."""
    batch = 2 if case.mask == "per_batch" else 1
    x = matrix.inputs(batch, case.heads, case.groups, case.seq_len, where.dim)
    x = {name: t.to(where.device, torch.float32 if name in ("bias", "dlse") else where.dtype) for name, t in x.items()}
    visible = matrix.dense_mask(case.mask, case.seq_len, case.heads).to(where.device)
    score = matrix.dense_score(case.score, case.seq_len, case.heads, where.device)
    dlse = x["dlse"] if with_lse else torch.zeros_like(x["dlse"])
    return oracle.results(x["q"], x["k"], x["v"], visible, score, x["bias"], x["dout"], dlse)


def check(case: matrix.Case, where: Where, with_lse: bool) -> list[str]:
    """Compares, on rank 0, the ranks' results and one rank's with the oracle's; a line for each tensor."""
    how = {"device": where.device, "dim": where.dim, "with_lse": with_lse}
    got = matrix.flexcp_results(case, where.dtype, **how)
    if dist.get_rank() != 0:
        return []
    alone = matrix.flexcp_results(case, where.dtype, **how, alone=True)
    want, told = reference(case, where, with_lse), []
    for name in got:
        right = want[name]
        dead = right == -torch.inf
        assert torch.equal(got[name] == -torch.inf, dead), f"{name}: rows that see nothing differ"
        mine, its = (torch.where(dead, 0.0, x[name].double() - right) for x in (got, alone))
        largest = torch.where(dead, 0.0, right).abs().max()
        most, mean, mean_alone = mine.abs().max(), mine.square().mean().sqrt(), its.square().mean().sqrt()
        line = f"{case} {name}: {mean:.1e}, one rank {mean_alone:.1e}; most {most:.1e} of {largest:.1e}"
        told.append(line)
        assert most <= where.most * largest, line
        # A bias's gradient is a sum of large parts that cancel, and next to free of error on one rank.
        assert name == "dbias" or mean <= TIMES_ALONE * mean_alone + ROUNDING * largest, line
    return told
