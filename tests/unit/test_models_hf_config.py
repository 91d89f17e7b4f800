"""config.json: read by name, refused by name, written so that it is read back; RoPE against transformers."""

import contextlib
import json
from pathlib import Path

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexcp.models import CONFIGS, CheckpointError, RopeScaling, config_from_hf, config_to_hf, get_config, read_config
from flexcp.models.rope import inverse_frequencies, rope_table

MINIMAL = {
    "model_type": "llama",
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_published_sizes() -> None:
    """The parameter counts of the released checkpoints."""
    counts = {
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
        "llama3.1-8b": 8_030_261_248,
        "llama3.1-70b": 70_553_706_496,
        "llama3.1-405b": 405_853_388_800,
        "llama3.2-1b": 1_235_814_400,
        "llama3.2-3b": 3_212_749_824,
    }
    for name, count in counts.items():
        assert get_config(name).num_params == count, name


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_written_and_read_back(name: str) -> None:
    config = get_config(name)
    fields = json.loads(json.dumps(config_to_hf(config, torch.bfloat16)))
    assert config_from_hf(fields) == config
    assert fields["torch_dtype"] == "bfloat16"


def test_left_out_fields_mean_what_transformers_means() -> None:
    config = config_from_hf(MINIMAL)
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.norm_eps) == (4, 8, 10_000.0, 1e-6)
    assert (config.tied_head, config.rope_scaling, config.max_positions) == (False, None, 2048)
    assert config_from_hf(MINIMAL | {"head_dim": 16}).head_dim == 16


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_parameters": {"type": "llama3", "rope_theta": 500000, **LLAMA3}, "rope_scaling": None},
    ],
)
def test_the_spellings_of_a_scaling(fields: dict) -> None:
    config = config_from_hf(MINIMAL | fields)
    assert config.rope_scaling == RopeScaling("llama3", 8.0)
    assert config.rope_theta == 500_000.0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention_bias": True}, "attention_bias is true, which is not supported: only false is"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"pretraining_tp": 2}, "pretraining_tp is 2"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"model_type": "mistral"}, 'model_type is "mistral", which is not supported: only "llama" is'),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"logit_softcap": 30}, "the field 'logit_softcap' (30) is unknown"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, 'hidden_size is "32", and must be an integer'),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"hidden_size": 33}, "hidden_size=33 is no multiple of num_attention_heads=4"),
        ({"num_key_value_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, and must be true or false"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
        ({"rope_theta": -1}, "rope_theta is -1, and must be more than 0"),
        ({"rope_scaling": "llama3"}, 'rope_scaling is "llama3", and must be an object'),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"factor": 4.0}}, "has no rope_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "type": "llama3", "factor": 8.0}}, "name no one type"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1}}, "'mscale' (1) is not supported"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}},
            "low_freq_factor=4.0 of the RoPE scaling must be below high_freq_factor=4.0",
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "contradict each other"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}},
            "rope_parameters and rope_scaling contradict each other",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        config_from_hf(MINIMAL | fields, "x/config.json")
    assert words in str(caught.value)
    assert str(caught.value).startswith("x/config.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\xff", '{"a": ' * 3000])
def test_a_config_that_is_no_json_object(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json (is not JSON|holds a)"):
        read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_config(tmp_path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)
rope_fields = st.sampled_from(["rope_type", "type", "factor", *LLAMA3, "rope_theta", "x"])


@settings(max_examples=400, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [*config_to_hf(get_config("llama3-debug"), torch.float32), "rope_parameters", "sliding_window"]
        ),
        values | st.dictionaries(rope_fields, values | st.sampled_from(["llama3", "linear", "default"]), max_size=5),
        max_size=4,
    )
)
def test_any_field_is_read_or_refused(fields: dict) -> None:
    """Never another exception than the one with the sentence."""
    with contextlib.suppress(CheckpointError):
        config_from_hf(MINIMAL | fields)


def test_hf_precision_has_the_bits_of_transformers() -> None:
    hf = pytest.importorskip("tests.hf")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.tensor([[0, 1, 77, 8191, 131_071, 1_000_003]])
    linear = {"rope_type": "linear", "factor": 4.0}
    for scaling in (None, hf.LLAMA3_ROPE, linear):
        config = hf.llama(scaling=scaling, head_dim=64).config
        ours = config_from_hf(config.to_dict(), rope_precision="hf")
        for dtype in (torch.float32, torch.bfloat16):
            expected = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=dtype), positions)
            got = rope_table(positions, 64, ours.rope_theta, dtype, ours.rope_scaling, ours.rope_precision)
            for one, other in zip(got, expected):
                assert torch.equal(one[:, 0], other)
            exact = rope_table(positions[:, :4], 64, ours.rope_theta, dtype, ours.rope_scaling)
            for one, other in zip(exact, got):
                assert (one - other[..., :4, :]).abs().max() < (2e-3 if dtype == torch.float32 else 2e-2)


def test_scaled_phases_hold_at_16_million() -> None:
    """Against 50 digits: short waves as they were, long ones slowed down, and those between."""
    config = get_config("llama3.1-8b")
    assert config.rope_scaling is not None
    position = 16_777_215
    cos, _ = rope_table(torch.tensor([[position]]), 128, config.rope_theta, torch.float64, config.rope_scaling)
    kinds = set()
    with mpmath.workdps(50):
        for pair in range(64):
            plain = mpmath.mpf(500_000) ** (mpmath.mpf(-2 * pair) / 128)
            wave = 2 * mpmath.pi / plain
            share = min(max((8192 / wave - 1) / 3, mpmath.mpf(0)), mpmath.mpf(1))
            kinds.add("slow" if share == 0 else "short" if share == 1 else "between")
            phase = position * plain * ((1 - share) / 8 + share)
            assert abs(cos[0, 0, 0, pair] - float(mpmath.cos(phase))) < 1e-7
    assert kinds == {"slow", "short", "between"}


def test_linear_scaling_divides() -> None:
    plain, scaled = inverse_frequencies(16, 1e4), inverse_frequencies(16, 1e4, RopeScaling("linear", 4.0))
    assert torch.equal(scaled, plain / 4)
