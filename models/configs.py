"""The shapes of the models flexcp trains, and what can be said of them without building them.

A config is only numbers, so that a plan, a memory estimate or a refusal costs nothing: `llama3-8b` is counted
here without allocating a byte.
"""

import difflib
import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for contexts longer than the pre-training's (`models/rope.py`).

    Raises:
        ValueError: where the numbers make no scaling; the sentence names the field.
    """

    kind: str  # "linear" or "llama3"
    factor: float  # by which frequencies are divided; llama3: those of long waves
    low_freq_factor: float = 1.0  # llama3: waves longer than original_max_positions / this are divided
    high_freq_factor: float = 4.0  # llama3: waves shorter than original_max_positions / this are left alone
    original_max_positions: int = 8192  # llama3: the context before the stretching, in tokens

    def __post_init__(self) -> None:
        if self.kind not in ("linear", "llama3"):
            raise ValueError(f"RoPE scaling {self.kind!r} is not supported: linear and llama3 are")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_positions"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} of the RoPE scaling must be more than 0, not {getattr(self, name)}")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} of the RoPE scaling must be below "
                f"high_freq_factor={self.high_freq_factor}"
            )


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
    rope_scaling: RopeScaling | None = None  # of the frequencies, for long contexts
    rope_precision: str = "exact"  # "exact": phases in float64; "hf": in float32, bit for bit as transformers
    max_positions: int = 8192  # the context that the weights were made for, in tokens; limits nothing here
    norm_eps: float = 1e-5  # added to the mean square in RMSNorm
    tied_head: bool = False  # the head is the embedding matrix itself
    init_std: float = 0.02  # of the truncated normal that fills the matrices

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_layers", "num_heads", "num_kv_heads", "ffn_dim", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("rope_theta", "norm_eps", "max_positions"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")
        if self.rope_precision not in ("exact", "hf"):
            raise ValueError(f"rope_precision must be exact or hf, not {self.rope_precision!r}")
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


# Llama 3 8B, 70B and 405B (Grattafiori et al., "The Llama 3 Herd of Models", 2024, table 3).
_8B = Llama3Config(
    vocab_size=128_256, dim=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_dim=14_336, head_dim=128
)
_70B = replace(_8B, dim=8192, num_layers=80, num_heads=64, ffn_dim=28_672)
_405B = replace(_8B, dim=16_384, num_layers=126, num_heads=128, ffn_dim=53_248)
# Their 128K context, as in the config.json of the released 3.1 and 3.2 checkpoints.
_128K = {"rope_scaling": RopeScaling("llama3", factor=8.0), "max_positions": 131_072}
# The small ones of 3.2 share one matrix between embedding and head.
_SMALL = {"rope_scaling": RopeScaling("llama3", factor=32.0), "max_positions": 131_072, "tied_head": True}

CONFIGS: dict[str, Llama3Config] = {
    # Two layers of bytes: quick enough that a laptop's CPU trains it in seconds.
    "llama3-debug": Llama3Config(
        vocab_size=256, dim=128, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=384, head_dim=32
    ),
    "llama3-8b": _8B,
    "llama3-70b": _70B,
    "llama3-405b": _405B,
    "llama3.1-8b": replace(_8B, **_128K),
    "llama3.1-70b": replace(_70B, **_128K),
    "llama3.1-405b": replace(_405B, **_128K),
    "llama3.2-1b": replace(_8B, dim=2048, num_layers=16, ffn_dim=8192, head_dim=64, **_SMALL),
    "llama3.2-3b": replace(_8B, dim=3072, num_layers=28, num_heads=24, ffn_dim=8192, **_SMALL),
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
