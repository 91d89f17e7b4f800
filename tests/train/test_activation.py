"""Checkpoints of layers: the same gradients, less memory; and attention that is kept is not computed again."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import flexcp
from flexcp import kernel, masks
from flexcp.activation import MODES, checkpoint_layers
from flexcp.models import Llama3Config, build
from flexcp.offload import Store
from tests.live_memory import LiveMemory

SHAPE = Llama3Config(
    vocab_size=60, dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=256, head_dim=16, init_std=0.2
)
S = 260
TOKENS = torch.randint(60, (1, S), generator=torch.Generator().manual_seed(0))


def none(bias: Tensor) -> Any:
    return None


def softcap(bias: Tensor) -> Any:
    return lambda s, b, h, q, kv: torch.tanh(s / 2) * 2


def window_by_inf(bias: Tensor) -> Any:
    return lambda s, b, h, q, kv: torch.where(q - kv < 40, s, -float("inf"))


def learned(bias: Tensor) -> Any:
    return lambda s, b, h, q, kv: torch.tanh(s) + bias[h, (q - kv).clamp(0, 63)]


def step(mode: str, score: Any, offload: bool = False, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Loss, gradients, calls of the kernel, and the most memory of the step."""
    model = build(SHAPE, seed=0, dtype=dtype)
    bias = torch.nn.Parameter(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(dtype))
    store = Store("cpu") if offload else None
    checkpoint_layers(list(model.layers), mode, store)
    plan = flexcp.plan(masks.causal(), S, 1)
    tokens = plan.shard(TOKENS, pad=0)
    calls: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "backward"):
            original = getattr(kernel, name)
            patch.setattr(kernel, name, lambda *a, n=name, f=original, **k: calls.update([n]) or f(*a, **k))
        with flexcp.context_parallel(plan), LiveMemory() as memory:
            loss = model(tokens, plan.positions, plan.block_mask, score(bias)).square().mean()
            kept = memory.live_bytes - (store.host_bytes if store else 0)
            loss.backward()
    grads = [p.grad for p in (*model.parameters(), bias) if p.grad is not None]
    return {"loss": loss.detach(), "grads": grads, "calls": calls, "kept": kept, "store": store}


@pytest.mark.parametrize("score", [none, softcap, window_by_inf, learned])
def test_gradients_are_those_without_checkpoints(score: Any) -> None:
    """Scores that save tensors come out wrong where stock torch checkpoints them (FACTS)."""
    plain = step("none", score)
    assert len(plain["grads"]) == len(list(build(SHAPE, seed=0).parameters())) + (score is learned)
    for mode, offload in (("full", False), ("selective", False), ("selective", True)):
        other = step(mode, score, offload)
        assert torch.equal(other["loss"], plain["loss"])
        for one, two in zip(other["grads"], plain["grads"], strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-13)


def test_attention_that_is_kept_is_not_computed_again() -> None:
    layers = SHAPE.num_layers
    calls = {mode: step(mode, softcap)["calls"] for mode in MODES}
    assert all(count["backward"] == layers for count in calls.values())
    assert {mode: count["forward"] for mode, count in calls.items()} == {
        "none": layers,
        "full": 2 * layers,
        "selective": layers,
    }


def test_each_mode_keeps_less() -> None:
    kept = {mode: step(mode, none, dtype=torch.float32)["kept"] for mode in MODES}
    offloaded = step("selective", none, offload=True, dtype=torch.float32)
    for mode, size in kept.items():
        print(f"kept for backward under --ac {mode:<9} {size:>10,} bytes")
    print(f"and with --offload on {offloaded['kept']:>20,} bytes, {offloaded['store'].host_bytes:,} on the host")
    row = TOKENS.numel() * SHAPE.dim * 4
    assert kept["full"] < kept["selective"] < 0.5 * kept["none"]
    # Attention's output and lse of each layer; with the layers' inputs away, at least all but the newest leave.
    assert kept["selective"] - kept["full"] >= SHAPE.num_layers * row
    assert offloaded["kept"] <= kept["selective"] - (SHAPE.num_layers - 1) * row
    assert offloaded["store"].host_bytes >= (SHAPE.num_layers - 1) * row


def test_a_store_without_checkpoints_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to be stored"):
        checkpoint_layers([], "none", Store("cpu"))


def test_attention_of_the_second_door_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flexcp.flex_attention` in the place of torch's: an operator of another name."""
    import flexcp.models.llama3 as module

    monkeypatch.setattr(module, "flex_attention", flexcp.flex_attention)
    calls = {mode: step(mode, none)["calls"]["forward"] for mode in MODES}
    assert calls == {"none": SHAPE.num_layers, "full": 2 * SHAPE.num_layers, "selective": SHAPE.num_layers}
