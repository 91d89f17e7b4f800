"""masks: what must stay cheap. Classes at a million tokens in bools, and no new program for a new number."""

import time

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode

from flexcp import masks
from flexcp.masks import scores


class LargestResult(TorchDispatchMode):
    """The size of the largest tensor that an operator returns, in bytes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple) else (result,):
            if isinstance(each, torch.Tensor):
                self.largest = max(self.largest, each.numel() * each.element_size())
        return result


SEQ_LEN, BLOCK = 1 << 20, 128
STARTS = torch.randint(0, SEQ_LEN, (300,), generator=torch.Generator().manual_seed(0))
DOC_IDS = torch.zeros(SEQ_LEN, dtype=torch.int64).index_fill(0, STARTS, 1).cumsum(0)


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() & masks.document(DOC_IDS),
        masks.document(DOC_IDS, causal=True),
        masks.document(DOC_IDS % 20),
        masks.sliding_window(4096),
        masks.attention_sink(4, 4096),
        masks.natten((1024, 1024), (13, 13)),
        masks.sliding_tile((64, 128, 128), (12, 24, 24), (4, 8, 8)),
        masks.block_diffusion(SEQ_LEN // 2, 256),
        masks.global_local(512, DOC_IDS % 50 == 7),
    ],
    ids=repr,
)
def test_a_million_tokens_are_classified_in_bools(mask):
    """One rank of 8 has 1024 x 8192 boxes: 8 MiB of bools. One int64 a box would be 64 MiB."""
    kv_lo = torch.arange(0, SEQ_LEN, BLOCK)
    q_lo = kv_lo[3072:4096]
    began = time.perf_counter()
    with LargestResult() as seen:
        some, every = mask.classify(q_lo, q_lo + BLOCK, kv_lo, kv_lo + BLOCK)
    assert some.numel() == every.numel() == 1024 * 8192
    assert seen.largest <= max(1024 * 8192, 8 * SEQ_LEN)
    assert time.perf_counter() - began < 5  # measured: 0.05 to 0.25 s on one core; the rest is for a busy machine


def programs(calls):
    """How many programs torch.compile makes for these callables, called one after the other on the same indices."""
    torch._dynamo.reset()
    counter = CompileCounter()
    i = torch.arange(64)
    zero = torch.zeros(1, 1, dtype=torch.int64)

    @torch.compile(backend=counter, fullgraph=True)
    def evaluate(mod, *score):
        return mod(*score, zero, zero, i[:, None], i)

    for mod, *score in calls:
        assert torch.equal(evaluate(mod, *score), mod(*score, zero, zero, i[:, None], i))
    torch._dynamo.reset()
    return counter.frame_count


DOCS = [torch.arange(64) // size for size in (3, 10, 20)]
FAMILIES = {
    "sliding_window": [masks.sliding_window(n) for n in (3, 9, 20)],
    "dilated": [masks.sliding_window(n, two_sided=True, dilation=d) for n, d in ((3, 2), (9, 4), (4, 5))],
    "per_head_window": [masks.per_head_window(torch.tensor([n])) for n in (3, 9, 20)],
    "attention_sink": [masks.attention_sink(n, 2 * n) for n in (1, 5, 9)],
    "chunked": [masks.chunked(n) for n in (3, 9, 20)],
    "block_causal": [masks.block_causal(n) for n in (3, 9, 20)],
    "document": [masks.causal() & masks.document(ids) for ids in DOCS],
    "packed": [masks.document(ids, causal=True) for ids in DOCS],
    "prefix_lm": [masks.prefix_lm(n) for n in (3, 9, 20)],
    "padding": [masks.padding(n) for n in (3, 9, 20)],
    "natten": [masks.natten((8, 8), kernel) for kernel in ((3, 3), (5, 3), (2, 8))],
    "natten, grids": [masks.natten(shape, (3, 3)) for shape in ((8, 8), (16, 4), (4, 16))],
    "sliding_tile": [masks.sliding_tile((8, 8), (4, n), (2, 2)) for n in (2, 4, 8)],
    "block_diffusion": [masks.block_diffusion(32, n) for n in (3, 9, 20)],
    "random_blocks": [masks.random_blocks(2, 8, 64, seed=n) for n in (3, 9, 20)],
    "offset": [masks.offset(masks.causal(), q=n) for n in (3, 9, 20)],
    "within_documents": [masks.within_documents(masks.prefix_lm(2), ids) for ids in DOCS],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_number_is_no_new_program(family):
    assert programs((mask,) for mask in FAMILIES[family]) == 1


def test_a_new_sequence_length_is_one_more_program_at_most():
    lengths = [masks.document(torch.arange(n) // 7) for n in (64, 80, 96, 128, 200)]
    assert programs((mask,) for mask in lengths) <= 2


def test_a_new_number_in_a_score_is_no_new_program():
    score = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    for family in (
        [scores.softcap(n) for n in (1.0, 5.0, 30.0)],
        [scores.alibi(n) for n in (4, 4)],
        [scores.hash_dropout(0.1 * n, seed=n) for n in (1, 2, 3)],
        [scores.sink(torch.tensor([float(n)]), position=n) for n in (0, 5, 9)],
        [scores.distance_bias(torch.full((1, 8), float(n))) for n in (1, 2, 3)],
    ):
        assert programs((each, score) for each in family) == 1
