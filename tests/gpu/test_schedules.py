"""On a GPU the executor, rank by rank on one device, equals dense float64 attention; transfers overlap kernels."""

import pytest
import torch
from torch import Tensor

import flexcp
from flexcp import attention, masks
from flexcp.comm import Link
from flexcp.inturn import in_turn
from flexcp.kernel import Score
from tests import oracle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler warns of its own internals
]

S, CP, H, G, D = 2000, 8, 8, 4, 64


def by_head(s, b, h, q, kv, slopes):
    return s - slopes[h] * (q - kv).abs()


def ranks_in_turn(
    cp: int, mask: masks.Mask, score: Score, inputs: list[Tensor], dout: Tensor, how: dict
) -> dict[str, Tensor]:
    """out, dq, dk, dv, and the sum of the ranks' gradients of a learned tensor, whole, in float64."""
    plans = [flexcp.plan(mask, S, cp, rank=rank, device="cuda", **how) for rank in range(cp)]
    like = dict(zip(("out", "dq", "dk", "dv"), (inputs[0], *inputs)))
    total = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in like.items()}
    if score.buffers:
        total["dbias"] = torch.zeros_like(score.buffers[0], dtype=torch.float64)

    def rank(link, received) -> None:
        plan = plans[link.rank]
        mine = [plan.shard(x, dim=2) for x in inputs]
        schedule, scale = plan.schedules["mask"], D**-0.5
        out, lse = attention.forward(*mine, schedule, score, scale, link)
        out = out.to(dout.dtype)
        grads = attention.backward(*mine, out, lse, plan.shard(dout, dim=2), None, schedule, score, scale, link)
        rows, real = plan.positions[0], plan.valid.flatten()
        for name, x in zip(like, (out, *grads[:3])):
            total[name][:, :, rows[real]] = x[:, :, real].to(dout.dtype).double()
        for part in grads[3]:
            total["dbias"].add_(part)

    in_turn(cp, rank)
    return total


@pytest.mark.parametrize(
    "how",
    [
        {"comm": "gather", "head_groups": 4},
        {"comm": "exchange", "head_groups": 2, "balance": "affinity"},
        {"comm": "ulysses"},
        {"comm": "ring"},
    ],
    ids=lambda how: how["comm"],
)
@pytest.mark.parametrize("with_score", [False, True], ids=["plain", "slopes"])
def test_no_schedule_errs_more_than_twice_as_much_as_one_device(how: dict, with_score: bool) -> None:
    """Against dense float64 attention; the mean square of the errors, and the largest."""
    torch.manual_seed(0)
    make = lambda h: torch.randn(1, h, S, D, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    *inputs, dout = make(H), make(G), make(G), make(H)
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([700, 150, 900, 250]))
    mask = (masks.causal() & masks.document(ids)).to("cuda")
    slopes = torch.linspace(0.01, 0.2, H, device="cuda")
    score = Score(by_head, (slopes,), (True,)) if with_score else Score(None)
    alone = ranks_in_turn(1, mask, score, inputs, dout, {})
    got = ranks_in_turn(CP, mask, score, inputs, dout, how)
    i, zero = torch.arange(S, device="cuda"), torch.zeros((), dtype=torch.int64, device="cuda")
    dense_mask = mask(zero, zero, i[:, None], i[None, :])
    distance = (i[:, None] - i).abs()
    dense = (lambda s, x: s - x[:, None, None] * distance) if with_score else (lambda s, x: s)
    want = oracle.results(*inputs, dense_mask, dense, slopes, dout, torch.zeros(1, H, S, device="cuda"))
    for name, value in got.items():
        mine, its = value - want[name], alone[name] - want[name]
        largest = want[name].abs().max()
        mean, most, mean_alone, most_alone = (
            float(x) for error in (mine, its) for x in (error.square().mean().sqrt(), error.abs().max())
        )
        print(f"{how['comm']} {name}: {mean:.2e}, one device {mean_alone:.2e}; most {most:.2e}, {most_alone:.2e}")
        assert most <= 0.01 * largest
        if name != "dbias":  # 8 sums of large parts that cancel, with next to no error on one device
            assert mean <= 2 * mean_alone
            assert most <= 2 * most_alone


class Wire(Link):
    """Stands for a network: every transfer takes its time on a stream of its own, as NCCL's do."""

    def __init__(self, size: int) -> None:
        super().__init__(None)
        self.size = size
        self.stream = torch.cuda.Stream()
        self.transfers: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start_all_gather(self, x: Tensor) -> "Transfer":
        return self._transfer(x.expand(self.size, *x.shape))

    def start_all_to_all(self, rows: Tensor, send_counts, receive_counts) -> "Transfer":
        return self._transfer(rows)

    def _transfer(self, x: Tensor) -> "Transfer":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            begin.record()
            out = x.clone()
            torch.cuda._sleep(2_000_000)
            end.record()
        self.transfers.append((begin, end))
        return Transfer(out, end)


class Transfer:
    def __init__(self, out: Tensor, end: torch.cuda.Event) -> None:
        self.out, self.end = out, end

    def wait(self) -> Tensor:
        torch.cuda.current_stream().wait_event(self.end)
        return self.out


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_the_next_head_group_travels_while_this_one_is_computed(backward: bool, monkeypatch) -> None:
    seq_len, groups = 65_536, 8
    plan = flexcp.plan(masks.causal().to("cuda"), seq_len, 8, comm="gather", head_groups=groups, device="cuda")
    schedule, score, scale = plan.schedules["mask"], Score(None), 128**-0.5
    make = lambda h: torch.randn(1, h, seq_len // 8, 128, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    q, k, v = make(32), make(8), make(8)
    kernels: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    real = {name: getattr(attention.kernel, name) for name in ("forward", "backward")}

    def timed(name: str):
        def call(*args):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = real[name](*args)
            end.record()
            kernels.append((begin, end))
            return result

        return call

    for name in real:
        monkeypatch.setattr(attention.kernel, name, timed(name))
    for _ in range(2):  # the first builds the kernels
        wire = Wire(8)
        out, lse = attention.forward(q, k, v, schedule, score, scale, wire)
        if backward:
            torch.cuda.synchronize()
            wire = Wire(8)
            kernels.clear()
            attention.backward(q, k, v, out.to(q.dtype), lse, q, None, schedule, score, scale, wire)
        torch.cuda.synchronize()
        timeline = kernels[-groups:]
    incoming = wire.transfers if not backward else [wire.transfers[0], *wire.transfers[1 : 2 * groups - 1 : 2]]
    assert len(wire.transfers) == (2 * groups if backward else groups)
    for g in range(groups - 1):
        begins, computed = incoming[g + 1][0], timeline[g][1]
        assert begins.elapsed_time(computed) > 0, f"group {g + 1} set out after group {g} was computed"
    if backward:
        leaving = [wire.transfers[i] for i in range(2, 2 * groups, 2)]
        for g, (begins, _) in enumerate(leaving[: groups - 1]):
            assert begins.elapsed_time(timeline[g + 1][1]) > 0, f"gradients of group {g} left after group {g + 1}"
    busy = sum(begin.elapsed_time(end) for begin, end in (*timeline, *wire.transfers))
    first = min(wire.transfers[0][0], timeline[0][0], key=lambda e: wire.transfers[0][0].elapsed_time(e))
    assert first.elapsed_time(timeline[-1][1]) < 0.9 * busy
