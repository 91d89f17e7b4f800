"""masks: the protocol, the combinators, parse and the first five masks, against brute force over pairs."""

import doctest
import importlib
import pkgutil

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flexcp import masks

torch.set_num_threads(1)


def dense(mask, seq_len, batch=1, heads=1):
    """[batch, heads, S, S] by broadcasting."""
    b, h = torch.arange(batch)[:, None, None, None], torch.arange(heads)[None, :, None, None]
    i = torch.arange(seq_len)
    return mask(b, h, i[:, None], i).expand(batch, heads, seq_len, seq_len)


def ranges(seq_len, size):
    lo = torch.arange(0, seq_len, size)
    return lo, (lo + size).clamp(max=seq_len)


def brute_classes(pairs, q, kv):
    some = torch.stack(
        [torch.stack([pairs[..., a:b, c:d].any(-1).any(-1) for c, d in zip(*kv)], -1) for a, b in zip(*q)], -2
    )
    every = torch.stack(
        [torch.stack([pairs[..., a:b, c:d].all(-1).all(-1) for c, d in zip(*kv)], -1) for a, b in zip(*q)], -2
    )
    return some, every


S = 48
DOCS = torch.tensor([5] * 7 + [2] * 16 + [9] + [0] * 24)
DOCS2 = torch.stack([DOCS, torch.arange(S) // 10])
SCATTERED = torch.tensor([0, 0, 1, 1, 0, 2, 2, 0] * 6)
EXACT = [
    masks.causal(),
    masks.full(),
    masks.sliding_window(1),
    masks.sliding_window(5),
    masks.sliding_window(100),
    masks.sliding_window(5, two_sided=True),
    masks.sliding_window(3, dilation=4),
    masks.sliding_window(4, two_sided=True, dilation=3),
    masks.document(DOCS),
    masks.document(DOCS2),
    masks.prefix_lm(0),
    masks.prefix_lm(10),
    masks.prefix_lm(100),
    masks.prefix_lm(torch.tensor([3, 40])),
    ~masks.sliding_window(5),
]
CONSERVATIVE = [
    masks.document(SCATTERED),
    masks.causal() & masks.document(DOCS),
    masks.causal() & masks.document(DOCS2) | masks.prefix_lm(torch.tensor([3, 20])),
    masks.sliding_window(7) ^ masks.document(DOCS),
    masks.causal() ^ masks.full(),
    masks.causal() & (lambda b, h, q, k: (q + k) % 3 == 0),
    (lambda b, h, q, k: (q + k) % 3 == 0) | ~masks.causal(),
]
SIZES = [(1, 1), (1, 8), (8, 1), (8, 8), (16, 4), (5, 7), (48, 48)]


@pytest.mark.parametrize("mask", EXACT, ids=repr)
def test_classes_of_closed_forms_are_exact(mask):
    pairs = dense(mask, S, mask.batch or 1, mask.heads or 1)
    for q_size, kv_size in SIZES:
        q, kv = ranges(S, q_size), ranges(S, kv_size)
        got, want = mask.classify(*q, *kv), brute_classes(pairs, q, kv)
        for g, w in zip(got, want):
            assert g.dtype == torch.bool
            assert torch.equal(g.expand(w.shape), w), (q_size, kv_size)


@pytest.mark.parametrize("mask", CONSERVATIVE, ids=repr)
def test_classes_never_call_a_box_full_or_empty_wrongly(mask):
    pairs = dense(mask, S, mask.batch or 1, mask.heads or 1)
    for q_size, kv_size in SIZES:
        q, kv = ranges(S, q_size), ranges(S, kv_size)
        (some, every), (true_some, true_every) = mask.classify(*q, *kv), brute_classes(pairs, q, kv)
        assert not (~some & true_some).any()
        assert not (every & ~true_every).any()


@pytest.mark.parametrize("mask", EXACT + CONSERVATIVE, ids=repr)
def test_create_block_mask_and_eager_flex_attention_accept_a_mask(mask):
    batch = mask.batch or 1
    pairs = dense(mask, S, batch)
    block_mask = create_block_mask(mask, mask.batch, None, S, S, device="cpu", BLOCK_SIZE=16)
    some, every = brute_classes(pairs, ranges(S, 16), ranges(S, 16))
    assert torch.equal(block_mask.to_dense().bool(), some)
    assert torch.equal(block_mask.full_kv_num_blocks.long(), every.sum(-1))
    q, k, v = torch.randn(3, batch, 2, S, 16, generator=torch.Generator().manual_seed(0)).unbind()
    out = flex_attention(q, k, v, block_mask=block_mask)
    scores = (q @ k.mT / 4).masked_fill(~pairs, -torch.inf)
    assert torch.allclose(out, (scores.softmax(-1).nan_to_num() @ v), atol=1e-5)


def test_boxes_need_not_tile_the_sequence():
    q = torch.tensor([3, 40, 0]), torch.tensor([11, 48, 48])
    kv = torch.tensor([20, 5]), torch.tensor([21, 30])
    for mask in EXACT:
        pairs = dense(mask, S, mask.batch or 1)
        for got, want in zip(mask.classify(*q, *kv), brute_classes(pairs, q, kv)):
            assert torch.equal(got.expand(want.shape), want), mask


def test_repr_reads_like_the_expression():
    a, b, c = masks.causal(), masks.full(), masks.prefix_lm(3)
    for text in [
        "causal() & (full() | prefix_lm(3))",
        "causal() & full() | prefix_lm(3)",
        "~(causal() ^ full()) & ~prefix_lm(3)",
        "causal() & full() & prefix_lm(3)",
        "sliding_window(8, two_sided=True, dilation=2)",
    ]:
        assert repr(masks.parse(text)) == text
    assert repr((a | b) | c) == repr(a | (b | c)) == "causal() | full() | prefix_lm(3)"
    assert repr(masks.document(DOCS2)) == "document(doc_ids[2, 48])"


def test_compositions_carry_batch_heads_length_and_need_of_pairs():
    per_head = masks.lift(lambda b, h, q, k: q - k < h, heads=4)
    mask = ~(masks.causal() & masks.document(DOCS2)) | per_head
    assert (mask.batch, mask.heads, mask.seq_len, mask.needs_pairs) == (2, 4, S, True)
    mask = masks.causal() & masks.document(DOCS)
    assert (mask.batch, mask.heads, mask.seq_len, mask.needs_pairs) == (None, None, S, False)
    assert masks.document(DOCS[None]).batch is None


def test_to_moves_every_captured_tensor_and_leaves_the_original():
    mask = masks.causal() & ~masks.document(DOCS) | masks.prefix_lm(2) ^ masks.sliding_window(3)
    moved = mask.to("meta")

    def devices(m):
        for value in vars(m).values():
            if isinstance(value, masks.Mask):
                yield from devices(value)
            elif isinstance(value, torch.Tensor):
                yield value.device.type

    assert set(devices(moved)) == {"meta"}
    assert set(devices(mask)) == {"cpu"}


def test_document_is_safe_on_padded_indices():
    i = torch.arange(S + 9)
    assert masks.document(DOCS)(0, 0, i[:, None], i).shape == (S + 9, S + 9)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: masks.sliding_window(0), "window must be at least 1, got 0"),
        (lambda: masks.sliding_window(True), "window must be an int, got True"),
        (lambda: masks.sliding_window(2.0), "window must be an int, got 2.0"),
        (lambda: masks.sliding_window(2, two_sided=1), "two_sided must be True or False"),
        (lambda: masks.document(torch.zeros(4)), "convert it with .long"),
        (lambda: masks.document(torch.zeros(0, dtype=torch.int64)), "not be empty"),
        (lambda: masks.document(torch.zeros(1, 2, 3, dtype=torch.int64)), r"got \[1, 2, 3\]"),
        (lambda: masks.document("ids"), "pass torch.tensor"),
        (lambda: masks.prefix_lm(-1), "prefix_len must be at least 0"),
        (lambda: masks.prefix_lm(torch.tensor([1, -2])), "prefix_len must be at least 0, got -2"),
        (lambda: masks.causal() & 3, "A mask is needed"),
        (lambda: masks.lift(lambda score, b, h, q, k: score), "score_mod"),
        (lambda: masks.lift(lambda b, h, q, k: q >= k, heads=0), "heads must be at least 1"),
        (
            lambda: masks.document(DOCS) & masks.document(DOCS[1:]),
            "for 48 tokens, the other for 47",
        ),
    ],
)
def test_wrong_arguments_get_a_sentence(call, says):
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("docment", "did you mean document"),
        ("document", "needs doc_ids"),
        ("causal &", "not valid"),
        ("", "expression is needed"),
        ("causal(3)", "too many positional"),
        ("causal.x", "only names of masks"),
        ("causal + full", "only names of masks"),
        ("sliding_window(2**9)", "Cannot read '2\\*\\*9'"),
        ("sliding_window(**{})", "not allowed"),
        ("__import__('os')", "Unknown mask"),
        ("(lambda: causal)()", "only names of masks"),
        ("~" * 4000 + "causal", "nested"),
        ("causal" * 1000, "at most 4096"),
    ],
)
def test_parse_refuses_what_is_not_in_the_grammar(text, says):
    with pytest.raises(ValueError, match=says):
        masks.parse(text)


def test_parse_binds_arguments_masks_and_functions():
    mine = masks.parse("causal & mine & other", mine=lambda b, h, q, k: q != k, other=masks.prefix_lm(3))
    assert mine.needs_pairs
    assert repr(masks.parse("document(ids)", ids=DOCS)) == "document(doc_ids[48])"
    assert repr(masks.parse("document", doc_ids=DOCS)) == "document(doc_ids[48])"
    assert repr(masks.parse("causal()&full", doc_ids=DOCS)) == "causal() & full()"


def test_every_example_in_a_docstring_runs():
    for module in pkgutil.iter_modules(importlib.import_module("flexcp.masks").__path__):
        result = doctest.testmod(importlib.import_module(f"flexcp.masks.{module.name}"))
        assert result.failed == 0, module.name
