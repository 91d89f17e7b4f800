"""config.json of a Hugging Face Llama: read field by field into a Llama3Config, and written back.

Every field is either understood, known to change nothing of what the model computes, or refused by name. A
field that is skipped unread is how a model turns silently into another one.
"""

import json
from pathlib import Path
from typing import Any

import torch

from flexcp.models.configs import Llama3Config, RopeScaling
from flexcp.models.errors import CheckpointError

# Their name -> (ours, what it must be).
_SHAPE = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "ffn_dim",
}
# What they mean where they are left out (transformers' LlamaConfig).
_DEFAULT_THETA, _DEFAULT_EPS, _DEFAULT_POSITIONS = 10_000.0, 1e-6, 2048
# Fields that ask for another computation unless they have this value.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "architectures": (["LlamaForCausalLM"], None),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "attention_dropout": (0, None),
    "pretraining_tp": (1, None),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "auto_map": (None,),
    "is_encoder_decoder": (False,),
    "is_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "chunk_size_feed_forward": (0,),
    "pruned_heads": ({}, None),
    "torchscript": (False,),
}
# Fields that change nothing of what the model computes; `config_to_hf` keeps them.
NEUTRAL = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id"),
    *("initializer_range", "use_cache", "torch_dtype", "dtype", "transformers_version", "name_or_path"),
    *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
    *("task_specific_params", "finetuning_task", "tokenizer_class", "prefix", "attn_implementation", "use_bfloat16"),
}
_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
_REST = {"num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"}


def read_json(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: a file that is missing, unreadable, no JSON, or no object.
    """
    try:
        # An index of a model of thousands of tensors has a megabyte; more is some other file.
        if path.stat().st_size > 1 << 28:
            raise CheckpointError(f"{path} has {path.stat().st_size:,} bytes, too many for a {what}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): a {what} is needed") from None
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} is not JSON ({reason}): a {what} is needed") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, and a {what} is a JSON object")
    return value


def read_config(folder: str | Path, rope_precision: str = "exact") -> Llama3Config:
    """The shape of the model in a folder, from its config.json.

    Args:
        folder: of a Hugging Face Llama.
        rope_precision: "exact" or "hf" (`models/rope.py`).

    Raises:
        CheckpointError: a config.json that is missing or malformed, or a field that is missing, unknown or
            asks for something that is not supported; the sentence names it.
    """
    path = Path(folder).expanduser() / "config.json"
    return config_from_hf(read_json(path, "model's config"), str(path), rope_precision)


def config_from_hf(fields: dict[str, Any], where: str = "config.json", rope_precision: str = "exact") -> Llama3Config:
    """As `read_config`, from the fields themselves; `where` stands in the sentences."""
    for name, value in fields.items():
        if name in _ONLY:
            if not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in _ONLY[name]):
                raise CheckpointError(
                    f"{where}: {name} is {_short(value)}, which is not supported: only {_short(_ONLY[name][0])} is"
                )
        elif name not in _SHAPE and name not in NEUTRAL | _ROPE | _REST and not name.startswith("_"):
            raise CheckpointError(
                f"{where}: the field {name!r} ({_short(value)}) is unknown, and may change what the model computes: "
                "remove it if it does not"
            )
    shape = {ours: _integer(fields, theirs, where) for theirs, ours in _SHAPE.items()}
    heads, dim = shape["num_heads"], shape["dim"]
    if fields.get("head_dim") is None and dim % heads:
        raise CheckpointError(f"{where}: hidden_size={dim} is no multiple of num_attention_heads={heads}")
    tied = fields.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise CheckpointError(f"{where}: tie_word_embeddings is {_short(tied)}, and must be true or false")
    max_positions = _integer(fields, "max_position_embeddings", where, _DEFAULT_POSITIONS)
    theta, scaling = _rope(fields, where, max_positions)
    try:
        return Llama3Config(
            **shape,
            num_kv_heads=_integer(fields, "num_key_value_heads", where, heads),
            head_dim=_integer(fields, "head_dim", where, dim // heads),
            rope_theta=theta,
            rope_scaling=scaling,
            rope_precision=rope_precision,
            max_positions=max_positions,
            norm_eps=_number(fields, "rms_norm_eps", where, _DEFAULT_EPS),
            tied_head=tied,
            init_std=_number(fields, "initializer_range", where, 0.02, at_least_0=True),
        )
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None


def _rope(fields: dict[str, Any], where: str, max_positions: int) -> tuple[float, RopeScaling | None]:
    """theta and the scaling, from rope_theta and rope_scaling or, since transformers 5, rope_parameters."""
    given = {name: fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name) is not None}
    thetas = {"rope_theta": _number(fields, "rope_theta", where)} if fields.get("rope_theta") is not None else {}
    found: list[tuple[str, RopeScaling | None]] = []
    for name, value in given.items():
        if not isinstance(value, dict):
            raise CheckpointError(f"{where}: {name} is {_short(value)}, and must be an object")
        at = f"{where}: {name}"
        if value.get("rope_theta") is not None:
            thetas[f"{name}.rope_theta"] = _number(value, "rope_theta", at)
        found.append((name, _scaling(value, at, max_positions)))
    if len(set(thetas.values())) > 1:
        raise CheckpointError(f"{where}: {' and '.join(f'{k}={v}' for k, v in thetas.items())} contradict each other")
    if len({scaling for _, scaling in found}) > 1:
        raise CheckpointError(f"{where}: rope_parameters and rope_scaling contradict each other: remove one")
    return next(iter(thetas.values()), _DEFAULT_THETA), found[0][1] if found else None


def _scaling(value: dict[str, Any], at: str, max_positions: int) -> RopeScaling | None:
    kinds = {name: value[name] for name in ("rope_type", "type") if value.get(name) is not None}
    if any(not isinstance(kind, str) for kind in kinds.values()) or len(set(kinds.values())) > 1:
        raise CheckpointError(f"{at}: {' and '.join(f'{k}={_short(v)}' for k, v in kinds.items())} name no one type")
    if not kinds and set(value) - {"rope_theta", "rope_type", "type", "partial_rotary_factor"}:
        raise CheckpointError(f"{at} has no rope_type: default, linear or llama3")
    kind = next(iter(kinds.values()), "default")
    known = {
        "default": set(),
        "linear": {"factor"},
        "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    }
    if kind not in known:
        raise CheckpointError(f"{at}: rope_type {kind!r} is not supported: default, linear and llama3 are")
    for name in value:
        if name == "partial_rotary_factor" and value[name] in (1, 1.0, None):
            continue
        if name not in known[kind] | {"rope_theta", "rope_type", "type"}:
            raise CheckpointError(f"{at}: the field {name!r} ({_short(value[name])}) is not supported for {kind}")
    if kind == "default":
        return None
    factor = _number(value, "factor", at)
    try:
        if kind == "linear":
            return RopeScaling("linear", factor)
        original = _integer(value, "original_max_position_embeddings", at, max_positions)
        low, high = _number(value, "low_freq_factor", at), _number(value, "high_freq_factor", at)
        return RopeScaling("llama3", factor, low, high, original)
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{at}: {error}") from None


def config_to_hf(config: Llama3Config, dtype: torch.dtype, kept: dict[str, Any] | None = None) -> dict[str, Any]:
    """The fields of a config.json that transformers 4.43 and later read.

    Args:
        config: the shape. `rope_precision` has no counterpart.
        dtype: of the weights beside it.
        kept: fields of the config.json that the model came from; those that change no computation (token ids)
            are taken over.
    """
    fields: dict[str, Any] = {name: value for name, value in (kept or {}).items() if name in NEUTRAL}
    for name in ("dtype", "transformers_version"):
        fields.pop(name, None)
    fields |= {theirs: getattr(config, ours) for theirs, ours in _SHAPE.items()}
    fields |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied_head,
        "initializer_range": config.init_std,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if (scaling := config.rope_scaling) is not None:
        fields["rope_scaling"] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            fields["rope_scaling"] |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_positions,
            }
    for name in ("bos_token_id", "eos_token_id"):  # where left out, transformers takes those of Llama 2
        fields.setdefault(name, None)
    return dict(sorted(fields.items()))


def _integer(fields: dict[str, Any], name: str, where: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise CheckpointError(f"{where}: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
        raise CheckpointError(f"{where}: {name} is {_short(value)}, and must be an integer of at least 1")
    return value


def _number(
    fields: dict[str, Any], name: str, where: str, default: float | None = None, at_least_0: bool = False
) -> float:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if value is None:
        raise CheckpointError(f"{where}: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:  # nor is NaN
        raise CheckpointError(f"{where}: {name} is {_short(value)}, and must be a number")
    if value < 0 or (value == 0 and not at_least_0):
        raise CheckpointError(f"{where}: {name} is {_short(value)}, and must be more than 0")
    return float(value)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
