"""masks: random masks of the library, randomly composed, against brute force over pairs (hypothesis)."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from flexcp import masks
from tests.unit.masks_oracle import assert_classes, brute_classes

S, B, H = 24, 2, 2
sizes = st.integers(1, S + 4)
QUIET = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def cuts(draw, num=4):
    """S positions in up to num + 1 runs, numbered from 0."""
    starts = torch.zeros(S, dtype=torch.int64)
    starts[draw(st.lists(st.integers(1, S - 1), max_size=num, unique=True))] = 1
    return starts.cumsum(0)


@st.composite
def rows(draw, make, dtype=torch.int64):
    """[S], or [B, S]."""
    tables = [torch.as_tensor(make(draw)).to(dtype) for _ in range(draw(st.sampled_from([1, B])))]
    return tables[0] if len(tables) == 1 else torch.stack(tables)


@st.composite
def shared_prefixes(draw):
    groups, branches = cuts(draw, 2), torch.zeros(S, dtype=torch.int64)
    for group in groups.unique():
        inside = (groups == group).nonzero().flatten()
        branches[inside] = cuts(draw, 3)[: len(inside)]
        branches[inside] -= branches[inside[0]].clone()
    return masks.shared_prefix(groups, branches)


@st.composite
def grids(draw):
    shape = draw(st.sampled_from([(24,), (6, 4), (4, 6), (2, 12), (2, 3, 4), (4, 3, 2), (4, 2, 3)]))
    kernel = tuple(draw(st.integers(1, size)) for size in shape)
    tile = tuple(draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0])) for size in shape)
    if draw(st.booleans()):
        causal = tuple(draw(st.booleans()) for _ in shape)
        return masks.natten(shape, kernel, causal=causal, tile=draw(st.sampled_from([None, tile])))
    kernel = tuple(draw(st.integers(1, size // each)) * each for size, each in zip(shape, tile))
    return masks.sliding_tile(shape, kernel, tile, in_tiles=draw(st.booleans()))


def trees(draw):
    """Depth first: the parent of each node is the one before it or one of that one's ancestors."""
    parents = [-1]
    for node in range(1, S):
        line, up = [], node - 1
        while up >= 0:
            line.append(up)
            up = parents[up]
        parents.append(draw(st.sampled_from([*line, -1])))
    return parents


def bools(draw):
    return draw(st.lists(st.booleans(), min_size=S, max_size=S))


exact = st.one_of(
    st.just(masks.causal()),
    st.just(masks.full()),
    st.builds(masks.sliding_window, sizes, two_sided=st.booleans(), dilation=st.integers(1, 4)),
    st.builds(
        lambda windows, two: masks.per_head_window(torch.tensor(windows), two_sided=two),
        st.lists(sizes, min_size=H, max_size=H),
        st.booleans(),
    ),
    st.builds(masks.attention_sink, sizes, sizes),
    st.builds(masks.chunked, sizes, causal=st.booleans()),
    st.builds(masks.block_causal, sizes | rows(cuts)),
    st.builds(masks.document, rows(cuts), causal=st.booleans()),
    st.builds(masks.prefix_lm, st.integers(0, S + 4)),
    st.builds(lambda n: masks.prefix_lm(torch.tensor(n)), st.lists(st.integers(0, S), min_size=B, max_size=B)),
    st.builds(masks.padding, st.integers(0, S + 4), queries=st.booleans()),
    shared_prefixes(),
    st.builds(masks.tree, rows(trees)),
    st.builds(masks.global_local, sizes, rows(bools, torch.bool)),
    st.builds(masks.random_blocks, st.integers(1, 3), st.integers(1, 8), st.just(S), seed=st.integers(0, 9)),
    st.builds(masks.block_diffusion, st.just(S // 2), sizes),
    grids(),
)
atoms = exact | st.builds(
    lambda n: masks.lift(lambda b, h, q, kv: (q * 3 + kv + b + h) % n == 0, B, H), st.integers(1, 4)
)


def without_batch(mask):
    return mask.batch is None


def anywhere(mask):
    return mask.batch is None and mask.seq_len is None


masks_of_any_kind = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds(lambda a, b: a & b, inner, inner),
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, b: a ^ b, inner, inner),
        st.builds(lambda a: ~a, inner),
        st.builds(lambda a, b: masks.where_head([1], a, b, num_heads=H), inner, inner),
        st.builds(lambda a, b: masks.per_batch([a, b]), *[inner.filter(without_batch)] * 2),
        st.builds(masks.within_documents, inner.filter(anywhere), rows(cuts)),
        st.builds(lambda a, q, kv: masks.offset(a, q=q, kv=kv), inner, *[st.integers(-6, 6)] * 2),
    ),
    max_leaves=5,
)


@st.composite
def boxes(draw):
    """Tiles of any size, or arbitrary ranges."""
    if draw(st.booleans()):
        size = draw(st.integers(1, S))
        lo = torch.arange(0, S, size)
        return lo, (lo + size).clamp(max=S)
    ends = draw(st.lists(st.tuples(st.integers(0, S - 1), st.integers(0, S - 1)), min_size=1, max_size=6))
    pairs = torch.tensor(ends).sort(-1).values
    return pairs[:, 0], pairs[:, 1] + 1


@QUIET
@given(exact, boxes(), boxes())
def test_closed_forms_are_exact(mask, q, kv):
    assert_classes(mask, masks.to_dense(mask, S), q, kv, exact_any=True, exact_all=True)


@QUIET
@given(masks_of_any_kind)
def test_whoever_asks_about_tokens_alone_sees_the_same_pairs(mask):
    assert torch.equal(masks.to_dense(mask.inside(), S), masks.to_dense(mask, S))


@QUIET
@given(masks_of_any_kind, boxes(), boxes())
def test_compositions_are_never_wrong_and_exact_once_refined(mask, q, kv):
    pairs = masks.to_dense(mask, S)
    assert_classes(mask, pairs, q, kv, exact_any=False, exact_all=False)
    for refined, true in zip(masks.classify(mask, *q, *kv, refine=True), brute_classes(pairs, q, kv)):
        assert torch.equal(refined, true)


@settings(QUIET, max_examples=60)
@given(masks_of_any_kind)
def test_compositions_agree_with_create_block_mask(mask):
    lo = torch.arange(0, S, 8)
    some, every = masks.classify(mask, lo, lo + 8, lo, lo + 8, refine=True)
    block_mask = create_block_mask(mask, mask.batch, mask.heads, S, S, device="cpu", BLOCK_SIZE=8)
    assert torch.equal(block_mask.to_dense().bool(), some)
    assert torch.equal(block_mask.full_kv_num_blocks.long(), every.sum(-1))
