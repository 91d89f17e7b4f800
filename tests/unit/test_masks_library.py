"""masks: every mask of the library against brute force over pairs, torch's create_block_mask and eager attention."""

import inspect

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from flexcp import masks
from flexcp.masks.registry import library
from tests.unit.masks_oracle import (
    ARANGE,
    CONSERVATIVE,
    DOCS,
    EXACT,
    S,
    assert_classes,
    brute_classes,
    ranges,
)

SIZES = [(1, 1), (1, 8), (8, 1), (8, 8), (16, 4), (5, 7), (48, 48), (3, 16)]
ALL = [(mask, True, True) for mask in EXACT] + CONSERVATIVE


def names(cases):
    return [repr(case[0]) for case in cases]


@pytest.mark.parametrize(("mask", "exact_any", "exact_all"), ALL, ids=names(ALL))
def test_classes_agree_with_brute_force(mask, exact_any, exact_all):
    pairs = masks.to_dense(mask, S)
    for q_size, kv_size in SIZES:
        assert_classes(mask, pairs, ranges(S, q_size), ranges(S, kv_size), exact_any, exact_all)


@pytest.mark.parametrize(("mask", "exact_any", "exact_all"), ALL, ids=names(ALL))
def test_boxes_need_not_tile_the_sequence(mask, exact_any, exact_all):
    generator = torch.Generator().manual_seed(0)
    pairs = masks.to_dense(mask, S)
    ends = torch.randint(0, S, (4, 40), generator=generator)
    q, kv = (ends[:2].sort(0).values, ends[2:].sort(0).values)
    assert_classes(mask, pairs, (q[0], q[1] + 1), (kv[0], kv[1] + 1), exact_any, exact_all)


@pytest.mark.parametrize(("mask", "exact_any", "exact_all"), ALL, ids=names(ALL))
def test_a_range_may_end_in_the_padding(mask, exact_any, exact_all):
    """The last block of a sequence that is no multiple of the block size: nothing visible may be lost."""
    lo = torch.arange(0, S, 20)
    some, _ = mask.classify(lo, lo + 20, lo, lo + 20)
    true_some, _ = brute_classes(masks.to_dense(mask, S), ranges(S, 20), ranges(S, 20))
    assert not (~some.expand(true_some.shape) & true_some).any()


@pytest.mark.parametrize(("mask", "exact_any", "exact_all"), ALL, ids=names(ALL))
def test_refined_classes_are_those_of_create_block_mask(mask, exact_any, exact_all):
    q, kv = ranges(S, 16), ranges(S, 8)
    some, every = masks.classify(mask, *q, *kv, refine=True)
    block_mask = create_block_mask(mask, mask.batch, mask.heads, S, S, device="cpu", BLOCK_SIZE=(16, 8))
    assert torch.equal(block_mask.to_dense().bool(), some)
    assert torch.equal(block_mask.full_kv_num_blocks.long(), every.sum(-1))
    assert torch.equal(create_mask(mask, mask.batch, mask.heads, S, S, device="cpu"), masks.to_dense(mask, S))


@pytest.mark.parametrize(("mask", "exact_any", "exact_all"), ALL[::6], ids=names(ALL[::6]))
def test_eager_flex_attention_accepts_a_mask(mask, exact_any, exact_all):
    batch, heads = mask.batch or 1, mask.heads or 1
    block_mask = create_block_mask(mask, batch, heads, S, S, device="cpu", BLOCK_SIZE=16)
    q, k, v = torch.randn(3, batch, heads, S, 16, generator=torch.Generator().manual_seed(0)).unbind()
    out = flex_attention(q, k, v, block_mask=block_mask)
    scores = (q @ k.mT / 4).masked_fill(~masks.to_dense(mask, S), -torch.inf)
    assert torch.allclose(out, scores.softmax(-1).nan_to_num() @ v, atol=1e-5)


@pytest.mark.parametrize("mask", EXACT, ids=repr)
def test_padded_indices_are_safe(mask):
    b = torch.arange(mask.batch or 1)[:, None, None, None]
    h = torch.arange(mask.heads or 1)[:, None, None]
    i = torch.arange(2 * S)
    mask(b, h, i[:, None], i)


@pytest.mark.parametrize("mask", [mask for mask, *_ in ALL], ids=repr)
def test_to_moves_every_captured_tensor(mask):
    def tensors(value):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, masks.Mask):
            yield from tensors(tuple(vars(value).values()))
        elif isinstance(value, tuple):
            for item in value:
                yield from tensors(item)

    assert all(tensor.device.type == "meta" for tensor in tensors(mask.to("meta")))
    assert all(tensor.device.type == "cpu" for tensor in tensors(mask))
    moved = mask.to("cpu")
    assert torch.equal(masks.to_dense(moved, S), masks.to_dense(mask, S))
    q, kv = ranges(S, 8), ranges(S, 16)
    for ours, theirs in zip(moved.classify(*q, *kv), mask.classify(*q, *kv)):
        assert torch.equal(ours, theirs)


def test_nothing_that_call_reads_is_a_python_number():
    """torch.compile specialises on Python ints: a new window would be a new program."""
    allowed = {"batch", "heads", "seq_len"}  # read only as None or not
    for mask, *_ in ALL:
        read = set(mask.__call__.__code__.co_names)
        for name in read & set(vars(mask)) - allowed:
            assert not isinstance(vars(mask)[name], int | float) or isinstance(vars(mask)[name], bool), (mask, name)


def test_every_factory_is_documented_and_reexported():
    assert masks.names() == sorted(library())
    for name, factory in library().items():
        assert getattr(masks, name) is factory
        for section in ("Returns:", "Example:", "Source:", "q 0" if name not in ("causal", "full") else "#"):
            assert section in inspect.getdoc(factory), (name, section)


def test_every_factory_is_tested():
    text = " ".join(repr(mask) for mask, *_ in ALL)
    assert [name for name in masks.names() if name not in text and name != "bigbird"] == []


def test_a_16_by_4_grid_has_16_rows():
    seen = masks.to_dense(masks.natten((16, 4), (3, 3)), 64)[0, 0, 0].nonzero().flatten().tolist()
    assert seen == [0, 1, 2, 4, 5, 6, 8, 9, 10]


def test_every_natten_query_sees_a_whole_kernel():
    assert masks.to_dense(masks.natten((6, 8), (3, 4)), S).sum(-1).unique().tolist() == [12]


def test_random_blocks_depend_on_nothing_but_the_seed():
    draws = [masks.to_dense(masks.random_blocks(2, 4, S, seed=seed), S) for seed in (1, 1, 2)]
    torch.manual_seed(5)
    again = masks.to_dense(masks.random_blocks(2, 4, S, seed=1), S)
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], again)
    assert not torch.equal(draws[0], draws[2])
    assert draws[0].sum(-1).unique().tolist() == [8]


def test_documents_from_ids_offsets_and_positions_are_the_same():
    ids = torch.tensor([4] * 5 + [1] * 30 + [0] * 13)
    positions = torch.cat([torch.arange(5), torch.arange(30), torch.arange(13)])
    for causal in (False, True):
        want = masks.to_dense(masks.document(ids, causal=causal), S)
        assert torch.equal(masks.to_dense(masks.document_offsets(torch.tensor([0, 5, 35, 48]), causal=causal), S), want)
        assert torch.equal(masks.to_dense(masks.document_positions(positions, causal=causal), S), want)


def test_packed_causal_is_causal_and_document():
    for ids in (DOCS, torch.stack([DOCS, ARANGE // 9])):
        composed = masks.causal() & masks.document(ids)
        assert torch.equal(masks.to_dense(masks.document(ids, causal=True), S), masks.to_dense(composed, S))


def test_within_documents_counts_from_each_beginning():
    seen = masks.to_dense(masks.within_documents(masks.prefix_lm(4), DOCS), S)[0, 0]
    for lo, hi in ((0, 7), (7, 23), (23, 24), (24, 48)):
        assert torch.equal(seen[lo:hi, lo:hi], masks.to_dense(masks.prefix_lm(4), hi - lo)[0, 0])
        assert seen[lo:hi].sum() == seen[lo:hi, lo:hi].sum()
    packed = masks.to_dense(masks.within_documents(masks.causal(), DOCS), S)
    assert torch.equal(packed, masks.to_dense(masks.document(DOCS, causal=True), S))


def test_tree_tokens_see_their_ancestors():
    parents = [-1, 0, 0, 2, 1, -1, 5, 3]
    seen = masks.to_dense(masks.tree(torch.tensor(parents)), 8)[0, 0]
    for node in range(8):
        ancestors, up = set(), node
        while up >= 0:
            ancestors.add(up)
            up = parents[up]
        assert set(seen[node].nonzero().flatten().tolist()) == ancestors


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: masks.attention_sink(0, 4), "num_sinks must be at least 1"),
        (lambda: masks.chunked(4, causal="yes"), "causal must be True or False"),
        (lambda: masks.block_causal(torch.tensor([0, 2, 1])), "must not decrease"),
        (lambda: masks.document_offsets(torch.tensor([1, 4])), "rise from 0"),
        (lambda: masks.document_offsets(torch.tensor([0, 4, 2])), "rise from 0"),
        (lambda: masks.document_positions(torch.zeros(3)), "convert it with .long"),
        (lambda: masks.shared_prefix(DOCS, DOCS[1:]), "same shape"),
        (lambda: masks.shared_prefix(torch.tensor([0] * 3), torch.tensor([0, 1, 0])), "cut in two"),
        (lambda: masks.shared_prefix(torch.tensor([0] * 3), torch.tensor([1, 0, 0])), "after a continuation"),
        (lambda: masks.tree(torch.tensor([-1, 1])), "before its child"),
        (lambda: masks.tree(torch.tensor([-2])), "before its child"),
        (lambda: masks.padding(-1), "lengths must be at least 0"),
        (lambda: masks.padding(torch.tensor([3, -1])), "lengths must be at least 0, got -1"),
        (lambda: masks.global_local(3, torch.tensor([1, 0])), "bool tensor"),
        (lambda: masks.random_blocks(9, 8, S), "exceeds the 6 blocks"),
        (lambda: masks.random_blocks(1, 8, S, seed=-1), "seed must be at least 0"),
        (lambda: masks.bigbird(4, 0, 1, 8, S), "num_global must be at least 1"),
        (lambda: masks.block_sparse(torch.ones(2, 2), 8), "bool tensor"),
        (lambda: masks.block_sparse(BLOCK, (8, 8, 8)), "block_size must be an int or"),
        (lambda: masks.natten((4, 4), (3,)), "must have 2 axes"),
        (lambda: masks.natten((4, 4), (5, 3)), "exceeds the grid"),
        (lambda: masks.natten((2, 2, 2, 2), 1), "1 to 3"),
        (lambda: masks.natten((4, 4), (3, 3), tile=(3, 2)), "must divide the shape"),
        (lambda: masks.natten((4, 4), (3, 3), causal=(True,)), "a bool or 2 of them"),
        (lambda: masks.sliding_tile((8, 8), (4, 3), (2, 2)), "must divide the kernel"),
        (lambda: masks.sliding_tile((4, 4), (8, 4), (2, 2)), "exceeds the grid"),
        (lambda: masks.block_diffusion(0, 4), "clean_len must be at least 1"),
        (lambda: masks.image_cross_attention(torch.tensor([[3, 1]]), 4), "0 <= from <= until"),
        (lambda: masks.image_cross_attention(torch.tensor([[0, 1]]), torch.tensor([1, 2])), "each of the 1 images"),
        (lambda: masks.where_head([3], masks.causal(), masks.full(), num_heads=3), r"lie in \[0, 3\)"),
        (lambda: masks.per_batch([]), "a list of masks"),
        (lambda: masks.per_batch([masks.padding(torch.tensor([1, 2]))]), "already distinguishes 2"),
        (lambda: masks.offset(masks.causal(), q=1.5), "must be an int"),
        (lambda: masks.within_documents(masks.padding(torch.tensor([1, 2])), DOCS), "works at any length"),
        (lambda: masks.per_head_window(torch.tensor([4, 0])), "every window must be at least 1"),
    ],
)
def test_wrong_arguments_get_a_sentence(call, says):
    with pytest.raises(ValueError, match=says):
        call()


BLOCK = torch.ones(2, 2, dtype=torch.bool)
