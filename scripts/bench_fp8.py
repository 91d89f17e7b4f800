"""fp8 against bf16: a Llama layer's matrices alone, its MLP, and the whole layer, forward and backward, compiled.

scripts/bench fp8                                       Llama3-8B at 32K tokens, on a GPU
scripts/bench fp8 --device cpu --model llama3-debug --tokens 256 --repeats 1 --no-compiled

All recipes run in one process, in turn, in a new order each round. A turn is two calls, of which the second counts: the
first brings the GPU from the clocks of other work, which draws more power or less, to those of this. Medians are shown.
"""

import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import flexcp
from flexcp import masks
from flexcp.fp8 import convert
from flexcp.models import get_config
from flexcp.models.llama3 import Layer
from flexcp.models.rope import rope_table

RECIPES = ("none", "rowwise", "rowwise_with_gw_hp", "tensorwise")
PARTS = ("matrices", "MLP", "layer")


def fp8(
    device: str = "cuda",
    model: str = "llama3-8b",
    tokens: int = 32_768,
    repeats: int = 20,
    compiled: bool = True,
    modules: str = "all",
    parts: tuple[str, ...] = PARTS,
    recipes: tuple[str, ...] = RECIPES,
    seed: int = 0,
) -> dict[tuple[str, str], float]:
    """Milliseconds of forward and backward, by part and recipe; "none" is bf16.

    Args:
        modules: which products become fp8, as in `flexcp.train --fp8-modules`.
    """
    torch.manual_seed(seed)
    config = get_config(model)
    plan = flexcp.plan(masks.causal(), tokens, 1, device=device)
    runs: dict[tuple[str, str], Callable[[], None]] = {}
    for recipe in recipes:
        layer = Layer(config).to(device, torch.bfloat16)
        for param in layer.parameters():
            nn.init.trunc_normal_(param, std=0.02) if param.ndim > 1 else nn.init.ones_(param)
        convert([layer], recipe, device, modules)
        make = torch.compile if compiled else lambda function: function
        x = _input(layer.mlp.gate_proj, tokens)
        made = {
            "matrices": partial(_matrices, layer, tokens, make),
            "MLP": partial(_run, make(layer.mlp), layer, x),
            "layer": partial(_run, _whole(layer, config, plan, make), layer, x),
        }
        runs |= {(part, recipe): made[part]() for part in parts}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    # torchao's one `forward` is compiled for every recipe and shape; past the limit Dynamo would run it uncompiled.
    with torch._dynamo.config.patch(recompile_limit=64), flexcp.context_parallel(plan):
        for repeat in range(repeats + 1):
            for key in random.sample(list(runs), len(runs)):
                first, ms = (_time_ms(runs[key], device) for _ in range(2))
                if repeat == 0:
                    print(f"{' '.join(key)}: first call {first / 1e3:.1f} s", flush=True)
                else:
                    times[key].append(ms)
    medians = {key: statistics.median(values) for key, values in times.items()}
    _show(medians, config, tokens, device)
    return medians


def _input(linear: nn.Linear, tokens: int) -> Tensor:
    weight = linear.weight
    return torch.randn(1, tokens, linear.in_features, dtype=weight.dtype, device=weight.device, requires_grad=True)


def _run(function: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor) -> Callable[[], None]:
    """One forward and backward that leaves no gradient behind."""
    dy: list[Tensor] = []

    def run() -> None:
        y = function(x)
        if not dy:
            dy.append(torch.randn_like(y))
        y.backward(dy[0])
        x.grad = None
        for param in module.parameters():
            param.grad = None

    return run


def _matrices(layer: Layer, tokens: int, make: Callable) -> Callable[[], None]:
    """The seven products of a layer with nothing between them, in one graph; inputs are shared as in the layer."""
    attn, mlp = layer.attn, layer.mlp
    shared = [[attn.q_proj, attn.k_proj, attn.v_proj], [attn.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    inputs = [_input(some[0], tokens) for some in shared]
    dy: list[Tensor] = []
    products = make(lambda *inputs: tuple(linear(x) for some, x in zip(shared, inputs) for linear in some))

    def run() -> None:
        outputs = products(*inputs)
        dy.extend(torch.randn_like(y) for y in outputs[len(dy) :])
        torch.autograd.backward(outputs, dy)
        for x in (*inputs, *layer.parameters()):
            x.grad = None

    return run


def _whole(layer: Layer, config, plan: flexcp.Plan, make: Callable) -> Callable[[Tensor], Tensor]:
    """The layer compiled around attention, which runs through flexcp."""
    cos, sin = rope_table(plan.positions, config.head_dim, config.rope_theta, torch.bfloat16)
    before, after = make(layer.before_attention), make(layer.after_attention)

    def run(x: Tensor) -> Tensor:
        q, k, v = before(x, cos, sin)
        out = flex_attention(q, k, v, block_mask=plan.block_mask, enable_gqa=q.shape[1] != k.shape[1])
        return after(x, out.transpose(1, 2).flatten(2))

    return run


def _time_ms(run: Callable[[], None], device: str) -> float:
    if device == "cuda":
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        return start.elapsed_time(stop)
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def _show(medians: dict[tuple[str, str], float], config, tokens: int, device: str) -> None:
    attention = config.dim * config.head_dim * (2 * config.num_heads + 2 * config.num_kv_heads)
    mlp = 3 * config.dim * config.ffn_dim
    # Causal: half of the pairs; backward has five products where forward has two.
    pairs = 7 * tokens * tokens * config.num_heads * config.head_dim
    flops = {"matrices": 6 * tokens * (attention + mlp), "MLP": 6 * tokens * mlp}
    flops["layer"] = flops["matrices"] + pairs
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, emulated"
    table = Table(title=f"{tokens:,} tokens, forward + backward, {name}, torch {torch.__version__}")
    for column in ("part", "recipe", "ms", "TFLOP/s", "times bf16"):
        table.add_column(column, justify="left" if column in ("part", "recipe") else "right")
    for (part, recipe), ms in sorted(medians.items(), key=lambda item: PARTS.index(item[0][0])):
        ratio = f"{medians[part, 'none'] / ms:.2f}" if (part, "none") in medians else ""
        table.add_row(part, recipe.replace("none", "bf16"), f"{ms:.2f}", f"{flops[part] / ms / 1e9:.0f}", ratio)
    Console(width=100).print(table)
