"""Brute force over pairs, and one instance or more of every mask of the library. Used by the masks' tests."""

import torch

from flexcp import masks

S = 48
ARANGE = torch.arange(S)


def ranges(seq_len, size):
    lo = torch.arange(0, seq_len, size)
    return lo, (lo + size).clamp(max=seq_len)


def box_reduce(pairs, q, kv, how):
    """[..., nQ, nK] of any or all over the pairs [..., S, S] of each box."""
    along_kv = torch.stack([how(pairs[..., lo:hi], dim=-1) for lo, hi in zip(*kv)], -1)
    return torch.stack([how(along_kv[..., lo:hi, :], dim=-2) for lo, hi in zip(*q)], -2)


def brute_classes(pairs, q, kv):
    return box_reduce(pairs, q, kv, torch.any), box_reduce(pairs, q, kv, torch.all)


def assert_classes(mask, pairs, q, kv, exact_any, exact_all):
    """Never wrong; exact where promised."""
    (some, every), (true_some, true_every) = mask.classify(*q, *kv), brute_classes(pairs, q, kv)
    assert some.dtype == every.dtype == torch.bool
    some, every = some.expand(true_some.shape), every.expand(true_every.shape)
    assert not (~some & true_some).any(), f"{mask!r} calls a box empty that is not"
    assert not (every & ~true_every).any(), f"{mask!r} calls a box full that is not"
    if exact_any:
        assert torch.equal(some, true_some), f"{mask!r} misses an empty box"
    if exact_all:
        assert torch.equal(every, true_every), f"{mask!r} misses a full box"


DOCS = torch.tensor([5] * 7 + [2] * 16 + [9] + [0] * 24)
DOCS2 = torch.stack([DOCS, ARANGE // 10])
SCATTERED = torch.tensor([0, 0, 1, 1, 0, 2, 2, 0] * 6)
GROUPS = torch.tensor([0] * 20 + [1] * 28)
BRANCHES = torch.tensor([0] * 6 + [1] * 9 + [2] * 5 + [0] * 10 + [3] * 1 + [1] * 17)
CHAIN_THEN_TREE = torch.tensor([-1, *range(11)] + [11, 12, 13, 12, 15, 11, 17, 17, 11] + list(range(20, 47)))
LEVELS = torch.tensor([-1] + [(i - 1) // 2 for i in range(1, S)])
GLOBAL = torch.zeros(S, dtype=torch.bool).index_fill(0, torch.tensor([0, 17, 18]), True)
BLOCKS = torch.rand(2, 3, 6, 8, generator=torch.Generator().manual_seed(0)) < 0.4

# Every mask with exact classes, and whether S = 48 queries and keys make sense of it.
EXACT = [
    masks.causal(),
    masks.full(),
    masks.sliding_window(1),
    masks.sliding_window(5),
    masks.sliding_window(100),
    masks.sliding_window(5, two_sided=True),
    masks.sliding_window(3, dilation=4),
    masks.sliding_window(4, two_sided=True, dilation=3),
    masks.causal() & masks.sliding_window(3, dilation=4),
    masks.per_head_window(torch.tensor([1, 7, 60])),
    masks.per_head_window(torch.tensor([2, 9]), two_sided=True),
    masks.attention_sink(1, 1),
    masks.attention_sink(5, 9),
    masks.attention_sink(60, 2),
    masks.chunked(7),
    masks.chunked(16, causal=False),
    masks.block_causal(7),
    masks.block_causal(DOCS2[1]),
    masks.block_causal(torch.stack([ARANGE // 5, ARANGE // 17])),
    masks.document(DOCS),
    masks.document(DOCS2),
    masks.document(DOCS, causal=True),
    masks.document(DOCS2, causal=True),
    masks.document_offsets(torch.tensor([0, 3, 3, 20, 48])),
    masks.document_positions(torch.cat([torch.arange(9), torch.arange(39)]), causal=True),
    masks.prefix_lm(0),
    masks.prefix_lm(10),
    masks.prefix_lm(100),
    masks.prefix_lm(torch.tensor([3, 40])),
    masks.shared_prefix(GROUPS, BRANCHES),
    masks.shared_prefix(torch.stack([GROUPS, GROUPS * 0]), torch.stack([BRANCHES, (ARANGE > 9) * 1])),
    masks.tree(CHAIN_THEN_TREE),
    masks.tree(torch.stack([CHAIN_THEN_TREE, ARANGE - 1])),
    masks.padding(20),
    masks.padding(torch.tensor([0, 48, 13])),
    masks.padding(torch.tensor([20, 48]), queries=True),
    masks.global_local(4, GLOBAL),
    masks.global_local(3, torch.stack([GLOBAL, ~GLOBAL])),
    masks.random_blocks(2, 5, S, seed=3),
    masks.random_blocks(5, 8, S),
    masks.block_sparse(BLOCKS, (8, 6)),
    masks.block_sparse(BLOCKS[0, 0], (8, 6)),
    masks.natten(48, 5),
    masks.natten(48, 4, causal=True),
    masks.natten((12, 4), (3, 3)),
    masks.natten((4, 12), (3, 6), causal=(True, False)),
    masks.natten((8, 6), (5, 2), tile=(2, 3)),
    masks.natten((3, 4, 4), (3, 2, 3), causal=(True, False, False)),
    masks.natten((4, 4, 3), (3, 3, 1), tile=(2, 2, 1)),
    masks.sliding_tile((8, 6), (6, 6), (2, 3)),
    masks.sliding_tile((12, 4), (6, 2), (2, 2), in_tiles=False),
    masks.sliding_tile((6, 2, 4), (4, 2, 2), (2, 1, 2)),
    masks.block_diffusion(24, 5),
    masks.block_diffusion(24, 8),
    masks.image_cross_attention(torch.tensor([[0, 20], [9, 40], [33, 33], [40, 48]]), 12),
    masks.image_cross_attention(torch.tensor([[20, 48], [0, 9]]), torch.tensor([1, 47])),
    masks.where_head([0, 2], masks.causal(), masks.sliding_window(5, two_sided=True), num_heads=3),
    masks.per_batch([masks.causal(), masks.document(DOCS), masks.full()]),
    masks.offset(masks.causal(), q=10),
    masks.offset(masks.natten((6, 5), (3, 3)), q=-9, kv=-9),
    masks.offset(masks.document(DOCS), q=-3, kv=5),
    ~masks.sliding_window(5),
    ~masks.document(DOCS2),
]

# (mask, exact any, exact all): compositions and masks whose docstring says where they are conservative.
CONSERVATIVE = [
    (masks.document(SCATTERED), False, True),
    (masks.document(SCATTERED, causal=True), False, False),
    (masks.tree(LEVELS), False, True),
    (masks.within_documents(masks.prefix_lm(4), DOCS), False, False),
    (masks.within_documents(masks.per_head_window(torch.tensor([2, 5])), DOCS2), False, False),
    (masks.bigbird(4, 2, 1, 6, S), True, False),
    (masks.causal() & masks.document(DOCS), False, True),
    (masks.causal() & masks.document(DOCS2) | masks.prefix_lm(torch.tensor([3, 20])), False, False),
    (masks.sliding_window(7) ^ masks.document(DOCS), False, False),
    (masks.causal() ^ masks.full(), True, True),
    (masks.causal() & (lambda b, h, q, k: (q + k) % 3 == 0), False, False),
    ((lambda b, h, q, k: (q + k) % 3 == 0) | ~masks.causal(), False, False),
]
