"""masks: the algebra of masks, parse, and the sentences for wrong arguments."""

import doctest
import importlib
import pkgutil
import re

import pytest
import torch

from flexcp import masks
from tests.unit.masks_oracle import DOCS, DOCS2, EXACT, S


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


def test_a_mask_without_tables_reads_back_from_its_repr():
    read_back = 0
    for mask in EXACT:
        text = repr(mask)
        if re.search(r"(ids|positions|offsets|is_global|table|parents|intervals|image)\[", text):
            continue
        again = masks.parse(text)
        assert repr(again) == text
        assert torch.equal(masks.to_dense(again, S), masks.to_dense(mask, S))
        read_back += 1
    assert read_back > 25


def test_parse_fills_parameters_of_every_kind():
    bound = {"doc_ids": DOCS, "seq_len": S, "is_global": DOCS == 9}
    for text, want in {
        "document(causal=True)": "document(doc_ids[48], causal=True)",
        "where_head([0], causal & document, sliding_window(8), num_heads=2)": (
            "where_head([0], causal() & document(doc_ids[48]), sliding_window(8), num_heads=2)"
        ),
        "per_batch([causal, ~full])": "per_batch([causal(), ~full()])",
        "offset(causal, q=-2)": "offset(causal(), q=-2, kv=0)",
        "natten((12, 4), 3)": "",
        "random_blocks(2, 8, seed=3)": "random_blocks(2, 8, 48, seed=3)",
        "global_local(8) & within_documents(prefix_lm(4))": (
            "global_local(8, is_global[48]) & within_documents(prefix_lm(4), doc_ids[48])"
        ),
    }.items():
        if want:
            assert repr(masks.parse(text, **bound)) == want
        else:
            with pytest.raises(ValueError, match="must have 2 axes"):
                masks.parse(text, **bound)
