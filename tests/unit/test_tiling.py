"""Token-wise functions in tiles: the same numbers, one gradient a parameter, and memory for one tile."""

import pytest
import torch
from torch import Tensor

from flexcp.models import Llama3Config
from flexcp.models.llama3 import Layer
from flexcp.models.rope import rope_table
from flexcp.tiling import tiled
from tests.live_memory import LiveMemory

CONFIG = Llama3Config(
    vocab_size=60, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=96, head_dim=16, init_std=0.2
)
S = 70


def layer_of(dtype: torch.dtype) -> Layer:
    torch.manual_seed(0)
    return Layer(CONFIG).to(dtype)


def before(layer: Layer, x: Tensor, tile: int) -> tuple[Tensor, ...]:
    cos, sin = rope_table(torch.arange(S)[None], 16, 1e4, x.dtype)
    projections = (layer.attn.q_proj, layer.attn.k_proj, layer.attn.v_proj, layer.attn_norm)
    parameters = [module.weight for module in projections]
    return tiled(layer.before_attention, [x, cos, sin], parameters, tile, dims=(1, 2, 2), out_dims=(2, 2, 2))


def after(layer: Layer, x: Tensor, tile: int) -> tuple[Tensor, ...]:
    out = x.repeat(1, 1, 2)
    parameters = [*layer.mlp.parameters(), layer.mlp_norm.weight, layer.attn.o_proj.weight]
    return (tiled(layer.after_attention, [x, out], parameters, tile),)


def run(part, dtype: torch.dtype, tile: int) -> tuple[list[Tensor], list[Tensor], dict[str, int], int]:
    """Results, gradients, how often each parameter's hook fired, and the peak memory."""
    layer = layer_of(dtype)
    x = torch.randn(2, S, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    fired: dict[str, int] = {}
    for name, parameter in layer.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: fired.update({name: fired.get(name, 0) + 1}))
    with LiveMemory() as memory:
        results = part(layer, x, tile)
        sum((y.square() * (i + 1)).sum() for i, y in enumerate(results)).backward()
    grads = [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
    return [y.detach() for y in results], grads, fired, memory.peak_bytes


@pytest.mark.parametrize("part", [before, after])
@pytest.mark.parametrize("tile", [1, 7, 64])
def test_tiles_change_no_number_and_hooks_fire_once(part, tile: int) -> None:
    want, want_grads, want_fired, _ = run(part, torch.float64, 0)
    got, got_grads, got_fired, _ = run(part, torch.float64, tile)
    for one, other in zip((*got, *got_grads), (*want, *want_grads), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    assert got_fired == want_fired
    assert set(got_fired.values()) == {1}


def test_bf16_weights_sum_their_tiles_in_fp32() -> None:
    _, want, _, _ = run(after, torch.float64, 0)
    _, whole, _, _ = run(after, torch.bfloat16, 0)
    _, tiles, _, _ = run(after, torch.bfloat16, 1)
    for exact, one, other in zip(want, whole, tiles, strict=True):
        # 140 parts added in bf16 would be off by several times the error of one product.
        allowed = 2 * (one.double() - exact).abs().max() + 2**-9 * exact.abs().max()
        assert (other.double() - exact).abs().max() <= allowed


def test_tiles_save_memory() -> None:
    peaks = {tile: run(after, torch.float32, tile)[3] for tile in (0, 10)}
    hidden = 2 * S * CONFIG.ffn_dim * 4
    print(f"peak of norm + MLP over {2 * S} tokens: whole {peaks[0]:,} bytes, tiles of 20 {peaks[10]:,}")
    # The whole keeps gate, up, silu and their product; tiles keep a seventh of that at a time.
    assert peaks[0] - peaks[10] > 3 * hidden


def test_frozen_parameters_and_inputs_get_nothing() -> None:
    layer = layer_of(torch.float32)
    layer.mlp.down_proj.weight.requires_grad_(False)
    x = torch.randn(1, S, 32)
    tiled(layer.after_attention, [x, x.repeat(1, 1, 2)], list(layer.parameters()), 16).sum().backward()
    assert layer.mlp.down_proj.weight.grad is None
    assert x.grad is None
    assert layer.mlp.up_proj.weight.grad is not None
