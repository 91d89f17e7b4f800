"""The model against a reference written from the formulas, in float64, without flex_attention."""

import dataclasses

import mpmath
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flexcp.models import CONFIGS, Llama3, Llama3Config, build, from_hf, get_config, to_hf
from flexcp.models.llama3 import RMSNorm, causal_block_mask
from flexcp.models.rope import rope_table

TINY = Llama3Config(vocab_size=50, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, head_dim=16)


def reference(model: Llama3, tokens: Tensor, positions: Tensor, visible: Tensor) -> Tensor:
    """Llama 3 with dense attention and rotation by complex numbers. visible: bool [S, S] or [B, 1, S, S]."""
    config, weights = model.config, {name: p.detach().double() for name, p in model.named_parameters()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name + ".weight"]

    def rotate(x: Tensor) -> Tensor:
        half = config.head_dim // 2
        angles = positions[:, None, :, None] * config.rope_theta ** (-torch.arange(half).double() / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1)

    def heads(x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, config.head_dim)).transpose(1, 2)

    x = weights["embed.weight"][tokens]
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        y = norm(x, at + "attn_norm")
        q, k, v = (
            heads(y @ weights[f"{at}attn.{name}_proj.weight"].T, count)
            for name, count in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads))
        )
        shared = config.num_heads // config.num_kv_heads
        q, k = rotate(q), rotate(k).repeat_interleave(shared, 1)
        scores = (q @ k.transpose(-1, -2) / config.head_dim**0.5).masked_fill(~visible, -torch.inf)
        out = scores.softmax(-1) @ v.repeat_interleave(shared, 1)
        x = x + out.transpose(1, 2).flatten(2) @ weights[at + "attn.o_proj.weight"].T
        y = norm(x, at + "mlp_norm")
        gate, up = (y @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x, "norm") @ weights["embed.weight" if config.tied_head else "head.weight"].T


def causal(size: int) -> Tensor:
    return torch.ones(size, size, dtype=torch.bool).tril()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_logits_equal_the_reference(num_kv_heads: int, tied: bool) -> None:
    config = dataclasses.replace(TINY, num_kv_heads=num_kv_heads, tied_head=tied, init_std=0.3)
    model = build(config, seed=1, dtype=torch.float64)
    tokens = torch.randint(50, (2, 150), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(150)[None]
    with torch.no_grad():
        assert torch.allclose(model(tokens), reference(model, tokens, positions, causal(150)), atol=1e-11, rtol=0)


def test_positions_and_mask_are_the_callers() -> None:
    """Two packed documents with positions of their own, a different cut in each row."""
    model = build(dataclasses.replace(TINY, init_std=0.3), seed=2, dtype=torch.float64)
    tokens = torch.randint(50, (2, 40), generator=torch.Generator().manual_seed(0))
    cuts = torch.tensor([[13], [30]])
    documents = (torch.arange(40) >= cuts).long()
    positions = torch.arange(40) - documents * cuts

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (documents[b, q_idx] == documents[b, kv_idx])

    mask = create_block_mask(mask_mod, 2, None, 40, 40, device="cpu")
    visible = (documents[:, :, None] == documents[:, None, :])[:, None] & causal(40)
    with torch.no_grad():
        logits = model(tokens, positions, mask)
        assert torch.allclose(logits, reference(model, tokens, positions, visible), atol=1e-11, rtol=0)
        alone = model(tokens[:1, 13:])
        assert torch.allclose(logits[:1, 13:], alone, atol=1e-11, rtol=0)


def test_score_mod_reaches_attention() -> None:
    model = build(dataclasses.replace(TINY, init_std=0.3), seed=2, dtype=torch.float64)
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        only_self = model(tokens, score_mod=lambda s, b, h, q, kv: torch.where(q == kv, s, -torch.inf))
        expected = reference(model, tokens, torch.arange(20)[None], torch.eye(20, dtype=torch.bool))
    assert torch.allclose(only_self, expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("seq_len", [1, 127, 128, 129, 300, 512])
def test_causal_mask_is_what_create_block_mask_makes(seq_len: int) -> None:
    made = causal_block_mask(seq_len, torch.device("cpu"))
    expected = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, seq_len, seq_len, device="cpu")
    assert made.seq_lengths == expected.seq_lengths
    assert torch.equal(made.to_dense(), expected.to_dense())
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name


def test_rope_phases_hold_at_16_million() -> None:
    """A float32 phase would be off by half a turn; the table is compared with 50 digits."""
    positions = torch.tensor([[0, 1, 1_000_003, 16_777_215]])
    cos, sin = rope_table(positions, 64, 500_000.0, torch.float64)
    with mpmath.workdps(50):
        for at, position in enumerate(positions[0].tolist()):
            for pair in (0, 1, 7, 31):
                phase = position * mpmath.mpf(500_000) ** (mpmath.mpf(-2 * pair) / 64)
                assert abs(cos[0, 0, at, pair] - float(mpmath.cos(phase))) < 1e-7
                assert abs(sin[0, 0, at, pair + 32] - float(mpmath.sin(phase))) < 1e-7


def test_norm_is_computed_in_fp32() -> None:
    norm = RMSNorm(64, 1e-5).to(torch.bfloat16)
    x = torch.full((1, 64), 300.0, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    expected = x.float() / x.float().square().mean(-1, keepdim=True).sqrt()
    assert norm(x).dtype == torch.bfloat16
    assert torch.equal(norm(x), expected.to(torch.bfloat16))


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_parameters_are_those_of_the_module(name: str) -> None:
    for tied in (False, True):
        config = dataclasses.replace(get_config(name), tied_head=tied)
        with torch.device("meta"):
            model = Llama3(config)
        assert all(p.is_meta for p in model.parameters())
        assert config.num_params == sum(p.numel() for p in model.parameters())


def test_8b_is_8b() -> None:
    assert get_config("llama3-8b").num_params == 8_030_261_248  # the published checkpoint's count


def test_weights_depend_on_the_seed_and_the_name_only() -> None:
    one, same, other = build(TINY, seed=5), build(TINY, seed=5), build(TINY, seed=6)
    torch.rand(3)
    for (name, p), q, r in zip(one.named_parameters(), same.parameters(), other.parameters()):
        assert torch.equal(p, q)
        assert p.ndim == 1 or not torch.equal(p, r), name
    deeper = build(dataclasses.replace(TINY, num_layers=3), seed=5)
    assert torch.equal(one.layers[1].attn.q_proj.weight, deeper.layers[1].attn.q_proj.weight)
    one.init_weights(6, draw_on="cpu")
    assert torch.equal(one.head.weight, other.head.weight)
    one.init_weights(5)
    assert torch.equal(build(TINY, seed=5, dtype=torch.bfloat16).head.weight, one.head.weight.to(torch.bfloat16))


def test_init_scales() -> None:
    model = build("llama3-debug", seed=0)
    layer = model.layers[0]
    # A normal cut off at 3 sigma has 0.9866 of its standard deviation.
    for weight, std in ((layer.mlp.up_proj.weight, 0.02), (layer.mlp.down_proj.weight, 0.02 / 2)):
        assert weight.std().item() == pytest.approx(0.9866 * std, rel=0.02)
        assert weight.abs().max() <= 3 * std * (1 + 1e-6)
    assert torch.equal(layer.attn_norm.weight, torch.ones(128))


def test_tied_head_is_the_embedding() -> None:
    model = build(dataclasses.replace(TINY, tied_head=True), seed=0)
    assert "head.weight" not in dict(model.named_parameters())


def test_hugging_face_names() -> None:
    names = [name for name, _ in build(TINY, seed=0).named_parameters()]
    theirs = [to_hf(name) for name in names]
    assert [from_hf(name) for name in theirs] == names
    layer = [
        *(f"self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
        *("input_layernorm.weight", "post_attention_layernorm.weight"),
    ]
    assert set(theirs) == {
        *("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
        *(f"model.layers.{n}.{part}" for n in range(2) for part in layer),
    }
    with pytest.raises(ValueError, match=r"transformer\.h\.0"):
        from_hf("transformer.h.0.weight")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim must be even, not 7"),
        ({"num_layers": 0}, "num_layers must be at least 1, not 0"),
    ],
)
def test_shapes_that_do_not_fit(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(TINY, **change)


def test_wrong_inputs_are_told() -> None:
    model = build(TINY, seed=0)
    with pytest.raises(ValueError, match=r"tokens must be \[B, S\] with S >= 1, not \[5\]"):
        model(torch.zeros(5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"positions must be .* not \[1, 4\]"):
        model(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="did you mean llama3-debug"):
        build("llama3-debgu", seed=0)
    with pytest.raises(ValueError, match=r"known are llama3-debug, llama3-8b, llama3-70b"):
        build("gpt", seed=0)
