"""The names of Llama 3 parameters here and at Hugging Face: one to one, same shapes, same orientation.

embed.weight                      model.embed_tokens.weight
layers.N.attn_norm.weight         model.layers.N.input_layernorm.weight
layers.N.attn.{q,k,v,o}_proj      model.layers.N.self_attn.{q,k,v,o}_proj
layers.N.mlp_norm.weight          model.layers.N.post_attention_layernorm.weight
layers.N.mlp.{gate,up,down}_proj  model.layers.N.mlp.{gate,up,down}_proj
norm.weight                       model.norm.weight
head.weight                       lm_head.weight   (no parameter of its own where tied)
"""

_PARTS = {
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "embed": "embed_tokens",
}
_PARTS_BACK = {theirs: ours for ours, theirs in _PARTS.items()}


def to_hf(name: str) -> str:
    """The Hugging Face name of a parameter.

    >>> to_hf("layers.3.attn.q_proj.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    if name == "head.weight":
        return "lm_head.weight"
    return "model." + ".".join(_PARTS.get(part, part) for part in name.split("."))


def from_hf(name: str) -> str:
    """The name here of a Hugging Face parameter; the inverse of `to_hf`.

    Raises:
        ValueError: for a name that no Llama decoder has.
    """
    if name == "lm_head.weight":
        return "head.weight"
    if not name.startswith("model."):
        raise ValueError(f"{name!r} is no parameter of a Hugging Face Llama decoder")
    return ".".join(_PARTS_BACK.get(part, part) for part in name.removeprefix("model.").split("."))
