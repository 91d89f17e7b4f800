"""masks: the algebra of masks, parse, and the sentences for wrong arguments."""

import doctest
import importlib
import pkgutil

import pytest
import torch

from flexcp import masks

torch.set_num_threads(1)


S = 48
DOCS = torch.tensor([5] * 7 + [2] * 16 + [9] + [0] * 24)
DOCS2 = torch.stack([DOCS, torch.arange(S) // 10])


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
