"""What the two doors cost, and what compiling a block gives; on one device, which is a group of one.

python scripts/bench_door.py [--device cuda] [--seq-len 8192] [--steps 100]
"""

import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import tyro
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import flex_attention

import flexcp
from flexcp import call, kernel, masks
from flexcp.kernel import Score
from flexcp.models import get_config
from flexcp.models.llama3 import Layer
from flexcp.models.rope import rope_table
from flexcp.tokens import token_by


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _host_ms(function: Callable[[], object], device: str, times: int = 1) -> float:
    """Of so many calls in a row, the time of one until it returns, which on a GPU is not until its kernels are done."""
    _wait(device)
    begun = time.perf_counter()
    for _ in range(times):
        function()
    return (time.perf_counter() - begun) * 1e3 / times


def _whole_ms(function: Callable[[], object], device: str, repeat: int) -> float:
    def done() -> None:
        function()
        _wait(device)

    return statistics.median([_host_ms(done, device) for _ in range(repeat + 3)][3:])


def overhead(device: str, seq_len: int, repeat: int, in_a_row: int) -> dict[str, float]:
    """Host milliseconds of a call and of its backward: the kernel alone, from the rule's entry, through each door.

    All have their turns, in a new order each round; medians.

    Args:
        in_a_row: calls of a turn, as a model's layers call one after the other. The first call of a turn finds the
            CPU's caches full of another's code.
    """
    plan = flexcp.plan(masks.causal(), seq_len, 1, device=device)
    token = token_by(plan.block_mask.handle)
    (stage,) = plan.schedules["mask"].stages
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, h, plan.local_len, 64, device=device, dtype=dtype) for h in (8, 2, 2))
    score, scale = Score(None), 64**-0.5
    out, lse = kernel.forward(q, k, v, stage, score, scale)
    dout, out, lse2 = torch.randn_like(q), out.to(dtype), lse / call.LN2
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    rest = plan, score, scale

    def first_door() -> Tensor:
        return flex_attention(*leaves, block_mask=plan.block_mask, enable_gqa=True)

    def second_door() -> Tensor:
        return flexcp.flex_attention(*leaves, plan, enable_gqa=True)

    context = partial(flexcp.context_parallel, plan)
    with context():
        ends = first_door(), second_door()
    back = [partial(torch.autograd.grad, end, leaves, dout, retain_graph=True) for end in ends]
    calls: dict[str, tuple[Callable[[], object], Callable[[], AbstractContextManager]]] = {
        "kernel forward": (partial(kernel.forward, q, k, v, stage, score, scale), nullcontext),
        "kernel backward": (partial(kernel.backward, q, k, v, out, lse, dout, None, stage, score, scale), nullcontext),
        "rule forward": (partial(call.forward, q, k, v, token, *rest), nullcontext),
        "rule backward": (partial(call.backward, q, k, v, out, lse2, dout, None, token, *rest, False), nullcontext),
        "second door forward": (second_door, nullcontext),
        "second door backward": (back[1], nullcontext),
        "first door forward": (first_door, context),
        "first door backward": (back[0], context),
    }
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(repeat + 3):
        for name in random.sample(list(calls), len(calls)):
            function, inside = calls[name]
            with inside():
                ms = _host_ms(function, device, in_a_row)
            if i >= 3:
                taken[name].append(ms)
    return {name: statistics.median(times) for name, times in taken.items()}


def block(device: str, model: str, seq_len: int, steps: int, repeat: int, backend: str) -> dict[str, float]:
    """One layer, eager and compiled with fullgraph: times, errors, and recompiles over steps with new documents."""
    config = replace(get_config(model), num_layers=1)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    layer = Layer(config).to(device, dtype)
    plan = _documents(seq_len, 0, device)
    x = torch.randn(1, plan.local_len, config.dim, device=device, dtype=dtype).requires_grad_()
    rope = rope_table(plan.positions, config.head_dim, config.rope_theta, dtype, config.rope_scaling)

    def step(plan: flexcp.Plan) -> tuple[Tensor, ...]:
        out = layer(x, *rope, plan.block_mask, None)
        return (out.detach(), *torch.autograd.grad(out.float().square().mean(), [x, *layer.parameters()]))

    layer.attn.attend = flexcp.flex_attention
    want = step(plan)
    eager_ms = _whole_ms(lambda: step(plan), device, repeat)
    torch._dynamo.reset()
    counters.clear()
    flexcp.compile(layer, fullgraph=True, backend=backend, blocks=[layer])
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(step(plan), want)]
    compiled_ms = _whole_ms(lambda: step(plan), device, repeat)
    before = counters["stats"]["unique_graphs"]
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(steps):
            step(_documents(seq_len, i + 1, device))
    return {
        "eager ms": eager_ms,
        "compiled ms": compiled_ms,
        "largest relative error": max(errors),
        "graphs": before,
        f"recompiles in {steps} steps": counters["stats"]["unique_graphs"] - before,
    }


def _documents(seq_len: int, seed: int, device: str) -> flexcp.Plan:
    cuts = torch.randint(0, 50, (seq_len,), generator=torch.Generator().manual_seed(seed))
    ids = (cuts == 0).cumsum(0)
    return flexcp.plan((masks.causal() & masks.document(ids)).to(device), seq_len, 1, device=device)


def main(
    device: str = "cuda",
    model: str = "llama3-8b",
    seq_len: int = 8192,
    steps: int = 100,
    repeat: int = 20,
    backend: str = "inductor",
) -> None:
    """Prints every figure, one a line."""
    for in_a_row in (16, 1):
        print(f"a call, of {in_a_row} in a row")
        found = overhead(device, seq_len, 5 * repeat, in_a_row)
        for name, ms in found.items():
            way = name.rpartition(" ")[2]
            print(f"{name:24} {ms:9.3f} ms   over the kernel {ms - found[f'kernel {way}']:8.3f} ms")
    for name, value in block(device, model, seq_len, steps, repeat, backend).items():
        print(f"{name:24} {value:9.4g}")


if __name__ == "__main__":
    tyro.cli(main)
