"""The reference kernel: exact, in bounded memory, and skipping the blocks that the mask leaves empty.

Queries are taken a tile of rows at a time. A tile gathers the key blocks that any of its rows sees, so its softmax is
complete and needs no running maximum; the scores of one tile are all that is ever materialised.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexcp.blockmask import EMPTY, FULL, PARTIAL, block_classes
from flexcp.blocksource import row_positions
from flexcp.compat import autograd_enabled, over_pairs
from flexcp.planner import Stage

if TYPE_CHECKING:
    from flexcp.kernel import Score

_TILE_ROWS = 256
_TILE_SCORES = 1 << 24  # scores in one tile: 64 MiB in fp32


@dataclass(frozen=True)
class _Tile:
    """Some query rows and the keys they see.

    Attributes:
        rows: slice of the local query rows.
        columns: the key rows of the buffer that any of the tile's rows sees: a slice where they are one run.
        q_pos, kv_pos: global indices of both.
        hidden: bool [B or 1, H or 1, rows, columns], True where the pair is invisible; None where all is visible.
    """

    rows: slice
    columns: slice | Tensor
    q_pos: Tensor
    kv_pos: Tensor
    hidden: Tensor | None

    def keys(self, x: Tensor) -> Tensor:
        """The rows of keys or values that the tile sees; those that no query sees as 0, whatever stands there."""
        rows = x[:, :, self.columns]
        return rows if self.unseen is None else rows.masked_fill(self.unseen[:, None], 0.0)

    @cached_property
    def unseen(self) -> Tensor | None:
        """bool [columns]: keys hidden from all of the tile's queries, which share a block with others that are not."""
        if self.hidden is None:
            return None
        unseen = self.hidden.all(2).flatten(0, 1).all(0)
        return unseen if unseen.any() else None


def forward(q: Tensor, k: Tensor, v: Tensor, stage: Stage, score: "Score", scale: float) -> tuple[Tensor, Tensor]:
    """See `flexcp.kernel.forward`."""
    q, k, v = _upcast(q), _upcast(k), _upcast(v)
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf)
    for tile in _tiles(stage, q.shape[0] * q.shape[1]):
        scores = _score(_products(q[:, :, tile.rows] * scale, tile.keys(k)), tile, score, score.buffers)
        if tile.hidden is not None:
            scores = scores.masked_fill(tile.hidden, -torch.inf)
        lse_tile = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - _finite(lse_tile, 0.0)[..., None])
        out[:, :, tile.rows] = _weighted(weights, tile.keys(v))
        lse[:, :, tile.rows] = lse_tile
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    stage: Stage,
    score: "Score",
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor | None]]:
    """See `flexcp.kernel.backward`."""
    q, k, v, out, dout = (_upcast(x) for x in (q, k, v, out, dout))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    dbuffers: list[Tensor | None] = [
        torch.zeros_like(x, dtype=q.dtype) if needed else None for x, needed in zip(score.buffers, score.needs_grad)
    ]
    delta = (out * dout).sum(-1)
    if dlse is not None:
        delta = delta - dlse
    # A row that sees nothing has lse -inf; +inf makes its weights exp(-inf) = 0.
    lse = _finite(lse, torch.inf)
    groups = k.shape[1]
    for tile in _tiles(stage, q.shape[0] * q.shape[1]):
        rows = tile.rows
        keys, values = tile.keys(k), tile.keys(v)
        products = _products(q[:, :, rows] * scale, keys)
        scores, pull_back = _differentiable_score(products, tile, score)
        weights = torch.exp(scores - lse[:, :, rows, None])
        if tile.hidden is not None:
            weights = weights.masked_fill(tile.hidden, 0.0)
        dscores = weights * (_products(dout[:, :, rows], values) - delta[:, :, rows, None])
        dproducts, dtile_buffers = pull_back(dscores)
        if tile.hidden is not None and score.function is not None:
            # A score_mod may have no finite slope where the mask hides the pair.
            dproducts = dproducts.masked_fill(tile.hidden, 0.0)
        dq[:, :, rows] = _weighted(dproducts, keys) * scale
        _add_keys(dk, tile, _onto_keys(dproducts, q[:, :, rows], groups) * scale)
        _add_keys(dv, tile, _onto_keys(weights, dout[:, :, rows], groups))
        for total, part in zip(dbuffers, dtile_buffers):
            if total is not None and part is not None:
                total += part
    return dq, dk, dv, dbuffers


def _tiles(stage: Stage, num_heads: int) -> Iterator[_Tile]:
    """Cuts the stage's query rows into tiles; rows that see nothing are left out."""
    assert stage.block_mask is not None
    classes = block_classes(stage.block_mask)
    q_size, kv_size = stage.block_mask.BLOCK_SIZE
    q_pos, kv_pos = row_positions(stage.q_start, q_size), row_positions(stage.kv_start, kv_size)
    mask_mod = over_pairs(stage.mask_mod, with_score=False)
    row = 0
    while row < q_pos.numel():
        first = row // q_size
        # As many whole blocks as fit, or a part of one.
        rows = min(max(q_size, _TILE_ROWS // q_size * q_size), q_pos.numel() - row)
        seen = (classes[:, :, first : first + -(-rows // q_size)] != EMPTY).flatten(0, 2).any(0)
        fit = max(1, _TILE_SCORES // max(1, num_heads * int(seen.sum()) * kv_size))
        if fit < rows:
            rows = fit // q_size * q_size if fit >= q_size else min(fit, (first + 1) * q_size - row)
        end = row + rows
        last = -(-end // q_size)
        tile_classes = classes[:, :, first:last]
        blocks = (tile_classes != EMPTY).flatten(0, 2).any(0).nonzero().flatten()
        if blocks.numel():
            columns = _columns(blocks, kv_size)
            q_tile, kv_tile = q_pos[row:end], kv_pos[columns]
            tile_classes = tile_classes[..., blocks].repeat_interleave(q_size, 2)
            tile_classes = tile_classes[:, :, row - first * q_size : end - first * q_size]
            hidden = _hidden(tile_classes, mask_mod, q_tile, kv_tile, kv_size)
            # Padding is hidden, but a score_mod is asked for it all the same, and its tables end with the sequence.
            last_token = stage.seq_len - 1
            yield _Tile(slice(row, end), columns, q_tile.clamp(max=last_token), kv_tile.clamp(max=last_token), hidden)
        row = end


def _columns(blocks: Tensor, kv_size: int) -> slice | Tensor:
    first, last = int(blocks[0]), int(blocks[-1])
    if last - first + 1 == blocks.numel():
        return slice(first * kv_size, (last + 1) * kv_size)
    return row_positions(blocks * kv_size, kv_size)


def _hidden(classes: Tensor, mask_mod, q_pos: Tensor, kv_pos: Tensor, kv_size: int) -> Tensor | None:
    """Invisible pairs of a tile, whose classes are [B', H', rows, blocks]; asks the mask only where it must."""
    mixed = (classes != FULL).flatten(0, 2).any(0)
    if not mixed.any():
        return None
    batch, heads = (torch.arange(n) for n in classes.shape[:2])
    hidden = torch.zeros(*classes.shape[:3], kv_pos.numel(), dtype=torch.bool)
    columns = mixed.repeat_interleave(kv_size).nonzero().flatten()
    classes = classes[..., mixed].repeat_interleave(kv_size, -1)
    visible = mask_mod(batch, heads, q_pos, kv_pos[columns])
    hidden[..., columns] = ~((classes == FULL) | ((classes == PARTIAL) & visible))
    return hidden


def _score(products: Tensor, tile: _Tile, score: "Score", buffers: tuple) -> Tensor:
    if score.function is None:
        return products
    batch, heads = (torch.arange(n) for n in products.shape[:2])
    lifted = over_pairs(score.function, with_score=True, num_buffers=len(buffers))
    return lifted(products, batch, heads, tile.q_pos, tile.kv_pos, *buffers).to(products.dtype)


def _differentiable_score(products: Tensor, tile: _Tile, score: "Score"):
    """The modified scores, and a function from their gradient to that of the products and of each buffer.

    The score_mod is differentiated afresh here. The joint graph that torch hands to the backward operator was traced
    under whatever saved-tensor hooks were active, and under non-reentrant checkpointing it is wrong.
    """
    if score.function is None:
        return products, lambda dscores: (dscores, [None] * len(score.buffers))
    with autograd_enabled():
        leaf = products.detach().requires_grad_()
        buffers = tuple(
            x.detach().requires_grad_() if needed else x for x, needed in zip(score.buffers, score.needs_grad)
        )
        scores = _score(leaf, tile, score, buffers)
    wanted = [leaf] + [x for x, needed in zip(buffers, score.needs_grad) if needed]

    def pull_back(dscores: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        if not scores.requires_grad:  # the score_mod ignores the score and every buffer
            return torch.zeros_like(products), [None] * len(buffers)
        with autograd_enabled():
            grads = iter(torch.autograd.grad(scores, wanted, dscores.to(scores.dtype), allow_unused=True))
        dproducts = next(grads)
        dproducts = torch.zeros_like(products) if dproducts is None else dproducts
        return dproducts, [next(grads) if needed else None for needed in score.needs_grad]

    return scores.detach().to(products.dtype), pull_back


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """[B, H, T, D] with [B or 1, G, N, D] -> [B, H, T, N]."""
    return _by_group(rows, keys.shape[1]).matmul(keys.transpose(-2, -1)).reshape(*rows.shape[:3], -1)


def _weighted(weights: Tensor, values: Tensor) -> Tensor:
    """[B, H, T, N] with [B or 1, G, N, D] -> [B, H, T, D]."""
    return _by_group(weights, values.shape[1]).matmul(values).reshape(*weights.shape[:3], -1)


def _onto_keys(weights: Tensor, rows: Tensor, groups: int) -> Tensor:
    """[B, H, T, N] with [B, H, T, D] -> [B, G, N, D], summed over the query heads that share a KV head."""
    return _by_group(weights, groups).transpose(-2, -1).matmul(_by_group(rows, groups))


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, H, T, N] -> [B, G, H / G * T, N]: the query heads of one KV head lie one after the other."""
    batch, _, _, width = x.shape
    return x.reshape(batch, groups, -1, width)


def _add_keys(total: Tensor, tile: _Tile, part: Tensor) -> None:
    if isinstance(tile.columns, slice):
        total[:, :, tile.columns] += part
    else:
        total.index_add_(2, tile.columns, part)


def _finite(lse: Tensor, instead: float) -> Tensor:
    return torch.where(lse == -torch.inf, instead, lse)


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
