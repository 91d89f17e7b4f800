"""Llama 3 as one plain module: RMSNorm, RoPE, grouped-query attention, SwiGLU.

It knows nothing of context parallelism. It calls PyTorch's public `flex_attention` with the mask it is given,
and takes the position of each token as an argument, because under context parallelism a rank's rows are not
0, 1, 2.

Shapes: B batch, S tokens here, H query heads, G KV heads, D head dim, C dim, F ffn dim, V vocabulary.

Parameters stand one to one beside the Hugging Face names (`models/hf_names.py`), the matrices in the same
orientation and RoPE in the same "rotate half" convention, so that weights move over unchanged.
"""

import functools
import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from flexcp.models.configs import Llama3Config, get_config
from flexcp.models.rope import apply_rope, rope_table

_BLOCK = 128

# From a parameter's name and itself to this rank's part of it and to where that begins in the whole.
Place = Callable[[str, nn.Parameter], tuple[Tensor, tuple[int, ...]]]


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


@functools.lru_cache(maxsize=8)
def causal_block_mask(seq_len: int, device: torch.device) -> BlockMask:
    """The causal BlockMask over `seq_len` tokens, written down from its indices.

    `create_block_mask` would evaluate S x S entries for a pattern that is known: blocks below the diagonal
    are full, the diagonal is partial.
    """
    num_blocks = -(-seq_len // _BLOCK)
    row = torch.arange(num_blocks, dtype=torch.int32, device=device)
    # An unfinished last row of blocks is partial throughout, as in create_block_mask: full ones go unchecked.
    full_rows = row < seq_len // _BLOCK
    below = row[None, :] < row[:, None]
    seen, is_full = below | (row[None, :] == row[:, None]), below & full_rows[:, None]

    def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
        # Counts, and indices with the set ones first; these must be as wide as the number of KV blocks.
        indices = torch.argsort(blocks.to(torch.int32), dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], indices.to(torch.int32)[None, None]

    return BlockMask.from_kv_blocks(
        *ordered(seen & ~is_full),
        *ordered(is_full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_causal,
        seq_lengths=(seq_len, seq_len),
    )


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, computed in fp32 at least and returned in the dtype of x."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return normed.to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped-query attention through the public flex_attention.

    Attributes:
        attend: the function that is called; another one takes q, k, v, score_mod, block_mask and enable_gqa alike.
    """

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.attend: Callable[..., Tensor] = flex_attention
        self.head_dim = config.head_dim
        self.ratio = config.num_heads // config.num_kv_heads
        q_dim, kv_dim = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.dim, q_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, config.dim, bias=False)

    def forward(
        self, x_BSC: Tensor, cos: Tensor, sin: Tensor, block_mask: BlockMask, score_mod: Callable | None
    ) -> Tensor:
        q_BHSD, k_BGSD, v_BGSD = self.project(x_BSC, cos, sin)
        out_BHSD = self.attend(
            q_BHSD, k_BGSD, v_BGSD, score_mod=score_mod, block_mask=block_mask, enable_gqa=self.ratio > 1
        )
        return self.o_proj(rearrange(out_BHSD, "b h s d -> b s (h d)"))

    def project(
        self, x_BSC: Tensor, cos: Tensor, sin: Tensor, keys: slice | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, S, D], k and v [B, G, S, D], rotated; only those of some KV heads where `keys` names them."""
        if keys is None:
            parts = self.q_proj(x_BSC), self.k_proj(x_BSC), self.v_proj(x_BSC)
        else:
            if any(type(proj) is not nn.Linear for proj in (self.q_proj, self.k_proj, self.v_proj)):
                raise ValueError(
                    f"some heads of a {type(self.q_proj).__name__} cannot be taken alone: attention head group by head "
                    "group needs plain projections"
                )
            parts = (
                F.linear(x_BSC, proj.weight[keys.start * heads * self.head_dim : keys.stop * heads * self.head_dim])
                for proj, heads in ((self.q_proj, self.ratio), (self.k_proj, 1), (self.v_proj, 1))
            )
        q_BHSD, k_BGSD, v_BGSD = (rearrange(part, "b s (h d) -> b h s d", d=self.head_dim) for part in parts)
        return apply_rope(q_BHSD, cos, sin), apply_rope(k_BGSD, cos, sin), v_BGSD


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.up_proj = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.down_proj = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BSC: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSC)) * self.up_proj(x_BSC))


class Layer(nn.Module):
    """One decoder layer: attention, then SwiGLU, each behind its norm and beside its residual.

    What stands before and after attention can also be called by itself: it treats every token alone, so that a long
    sequence can go through it a tile at a time.
    """

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config)
        self.mlp_norm = RMSNorm(config.dim, config.norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self, x_BSC: Tensor, cos: Tensor, sin: Tensor, block_mask: BlockMask, score_mod: Callable | None
    ) -> Tensor:
        x_BSC = x_BSC + self.attn(self.attn_norm(x_BSC), cos, sin, block_mask, score_mod)
        return x_BSC + self.mlp(self.mlp_norm(x_BSC))

    def before_attention(
        self, x_BSC: Tensor, cos: Tensor, sin: Tensor, keys: slice | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, S, D], k and v [B, G, S, D]; only those of some KV heads where `keys` names them."""
        return self.attn.project(self.attn_norm(x_BSC), cos, sin, keys)

    def after_attention(self, x_BSC: Tensor, out_BSA: Tensor) -> Tensor:
        """The layer's result from its input and the heads' output side by side, [B, S, H * D]."""
        x_BSC = x_BSC + self.attn.o_proj(out_BSA)
        return x_BSC + self.mlp(self.mlp_norm(x_BSC))


class Llama3(nn.Module):
    """A Llama 3 decoder.

    >>> model = build("llama3-debug", seed=0)
    >>> with torch.no_grad():
    ...     model(torch.zeros(1, 16, dtype=torch.int64)).shape
    torch.Size([1, 16, 256])

    Args:
        config: the shape. Under `with torch.device("meta")` nothing is allocated; `to_empty` and
            `init_weights` then make it real (`build` does all three).
    """

    def __init__(self, config: Llama3Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        # A tied head has no module of its own: `to_empty` would tear two names of one parameter apart.
        self.head = None if config.tied_head else nn.Linear(config.dim, config.vocab_size, bias=False)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        block_mask: BlockMask | None = None,
        score_mod: Callable | None = None,
        head: Callable[[Tensor, nn.Module, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits [B, S, V] in the dtype of the parameters, or what `head` makes instead of them.

        Args:
            tokens: [B, S] int64.
            positions: [B or 1, S] int64, the place of each token for RoPE; 0, 1, 2, ... where left out.
            block_mask: what each token sees; causal over the given tokens where left out, never full.
                Under context parallelism this is `plan.block_mask`.
            score_mod: changes the scores, as in flex_attention.
            head: called with the residual stream [B, S, C] before the last norm, that norm, and the weight [V, C] of
                the head, where logits of all tokens would be too large (`flexcp.loss`).

        Raises:
            ValueError: where the shapes of tokens and positions do not fit.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be [B, S] with S >= 1, not {list(tokens.shape)}")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        if positions.ndim != 2 or positions.shape[1] != tokens.shape[1] or positions.shape[0] not in (1, len(tokens)):
            raise ValueError(
                f"positions must be [B or 1, S] as tokens {list(tokens.shape)}, not {list(positions.shape)}"
            )
        if block_mask is None:
            block_mask = causal_block_mask(tokens.shape[1], tokens.device)

        x_BSC = self.embed(tokens)
        shape = self.config
        cos, sin = rope_table(
            positions, shape.head_dim, shape.rope_theta, x_BSC.dtype, shape.rope_scaling, shape.rope_precision
        )
        for layer in self.layers:
            x_BSC = layer(x_BSC, cos, sin, block_mask, score_mod)
        if head is not None:
            return head(x_BSC, self.norm, self.embed.weight if self.head is None else self.head.weight)
        return self.unembed(self.norm(x_BSC))

    def unembed(self, x_BSC: Tensor) -> Tensor:
        """Logits [B, S, V] of the normed residual stream."""
        return F.linear(x_BSC, self.embed.weight) if self.head is None else self.head(x_BSC)

    @torch.no_grad()
    def init_weights(self, seed: int, place: Place | None = None, draw_on: torch.device | str = "cpu") -> None:
        """Fills every parameter: norms with 1, matrices with a normal cut off at 3 sigma.

        The matrices that write into the residual stream (o_proj, down_proj) are scaled by 1/sqrt(2 *
        num_layers), so that its variance does not grow with depth. Each parameter draws from a generator of
        its own, on the CPU and in fp32, seeded by `seed` and its name: the weights are the same on every
        rank, device and group size, and do not depend on the order or on which of them a rank holds.
        Drawn on a GPU, they are others, and the same on GPUs of one kind.

        Args:
            place: where a rank holds only parts of parameters, as in `load_weights`: from a name and a parameter to the
                part, a tensor to be filled, and to where it begins in the whole.
            draw_on: the device that draws; a CPU takes minutes for billions of parameters.
        """
        for name, param in self.named_parameters():
            part, first = (param, (0,) * param.ndim) if place is None else place(name, param)
            if param.ndim == 1:
                part.fill_(1.0)
                continue
            std = self.config.init_std
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * self.config.num_layers) ** 0.5
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator(draw_on).manual_seed(int.from_bytes(digest[:7], "big"))
            values = torch.empty(param.shape, dtype=torch.float32, device=draw_on)
            nn.init.trunc_normal_(values, std=std, a=-3 * std, b=3 * std, generator=generator)
            part.copy_(values[tuple(slice(at, at + size) for at, size in zip(first, part.shape))])


def build(
    model: str | Llama3Config,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Llama3:
    """A model with fresh weights: made on the meta device, then allocated once, where and as it will be used.

    Args:
        model: a name of `CONFIGS`, or a config.
        seed: of the weights; the same seed gives the same weights everywhere.
        dtype: of the parameters.
        device: of the parameters.

    Raises:
        ValueError: for an unknown model name.
    """
    config = get_config(model) if isinstance(model, str) else model
    with torch.device("meta"):
        module = Llama3(config).to(dtype)
    module.to_empty(device=device)
    module.init_weights(seed)
    return module
