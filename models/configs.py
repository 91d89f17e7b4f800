"""The shapes of the models flexcp trains, and what can be said of them without building them.

A config is only numbers, so that a plan, a memory estimate or a refusal costs nothing: `llama3-8b` is counted
here without allocating a byte.
"""

import difflib
from dataclasses import dataclass


@dataclass(frozen=True)
class Llama3Config:
    """The shape of a Llama 3 decoder.

    Raises:
        ValueError: where the numbers do not fit each other; the sentence names the field.
    """

    vocab_size: int  # rows of the embedding and of the head
    dim: int  # width of the residual stream
    num_layers: int  # decoder layers
    num_heads: int  # query heads (H)
    num_kv_heads: int  # key/value heads (G); each serves num_heads / num_kv_heads query heads
    ffn_dim: int  # hidden width of SwiGLU
    head_dim: int  # width of one head (D); num_heads * head_dim need not equal dim
    rope_theta: float = 500_000.0  # base of the rotary frequencies
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    tied_head: bool = False  # the head is the embedding matrix itself
    init_std: float = 0.02  # of the truncated normal that fills the matrices

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}: "
                "each KV head serves the same number of query heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}: RoPE rotates pairs of features")

    @property
    def num_params(self) -> int:
        """Parameters of the model, a tied head counted once."""
        attention = self.dim * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.dim * self.ffn_dim
        layer = attention + mlp + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied_head else 2)
        return embeddings + self.num_layers * layer + self.dim


CONFIGS: dict[str, Llama3Config] = {
    # Two layers of bytes: quick enough that a laptop's CPU trains it in seconds.
    "llama3-debug": Llama3Config(
        vocab_size=256, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=384, head_dim=32
    ),
    # Llama 3 8B (Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3).
    "llama3-8b": Llama3Config(
        vocab_size=128_256,
        dim=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        ffn_dim=14_336,
        head_dim=128,
    ),
}


def get_config(name: str) -> Llama3Config:
    """The config of a model by its name.

    >>> get_config("llama3-8b").num_params
    8030261248

    Raises:
        ValueError: for a name that is not known; the sentence offers the nearest ones.
    """
    if name in CONFIGS:
        return CONFIGS[name]
    near = difflib.get_close_matches(name, CONFIGS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(CONFIGS)}."
    raise ValueError(f"unknown model {name!r}: {hint}")
