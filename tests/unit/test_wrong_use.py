"""Wrong uses that once gave a foreign traceback, a huge allocation or a changed value."""

import functools

import numpy as np
import pytest
import torch

import flexcp
from flexcp import masks
from flexcp.agreement import mask_digest
from flexcp.cost import CostModel, Shape


def test_a_plans_own_token_is_no_mask_for_another() -> None:
    plan = flexcp.plan(masks.causal(), 100, 1)
    with pytest.raises(ValueError, match="pass the mask itself"):
        flexcp.plan(plan.block_mask, plan.local_len, 1)


@pytest.mark.parametrize(
    "keywords", [{"batch": 0}, {"batch": "2"}, {"heads": -1}, {"head_groups": 1.5}, {"rank": "1"}, {"block_size": 2.5}]
)
def test_numbers_are_checked(keywords) -> None:
    with pytest.raises(ValueError, match=next(iter(keywords))):
        flexcp.plan(masks.causal(), 100, 2, **keywords)


def test_more_tokens_than_indices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"below 2\^31"):
        flexcp.plan(masks.causal(), 2**31, 2)


def test_like_is_a_plan() -> None:
    with pytest.raises(TypeError, match=r"earlier flexcp\.Plan, got str"):
        flexcp.plan(masks.causal(), 100, 2, like="ring")


def test_one_head_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match="1 query heads cannot be shared evenly by the 2 ranks"):
        flexcp.plan(masks.causal(), 100, 2, comm="ulysses", cost=CostModel(Shape(1, 1, 16)))


def test_a_mask_that_fails_past_the_first_pair_is_named() -> None:
    table = torch.arange(5)

    def short_table(b, h, q, kv):
        return table[q] >= table[kv]

    with pytest.raises(ValueError, match="mask_mod short_table raised IndexError"):
        flexcp.plan(short_table, 100, 1)


@pytest.mark.parametrize(("dtype", "pad"), [(torch.uint8, -100), (torch.int64, 0.5)])
def test_pad_that_the_dtype_cannot_hold_is_refused(dtype: torch.dtype, pad: float) -> None:
    plan = flexcp.plan(masks.causal(), 100, 1)
    with pytest.raises(ValueError, match="cannot be held"):
        plan.shard(torch.zeros(100, dtype=dtype), dim=0, pad=pad)


@pytest.mark.skipif(torch.__version__ >= (2, 14), reason="torch 2.14 refuses a score that is not floating point")
def test_a_score_of_another_dtype_is_taken_as_torch_takes_it() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    plan = flexcp.plan(masks.causal(), 128, 1)
    x = torch.randn(1, 1, 128, 16, requires_grad=True)
    with flexcp.context_parallel(plan):
        flex_attention(x, x, x, score_mod=lambda s, b, h, q, kv: kv - q, block_mask=plan.block_mask).sum().backward()
    assert x.grad is not None


def test_mixed_dtypes_are_refused() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    plan = flexcp.plan(masks.causal(), 128, 1)
    x = torch.randn(1, 1, 128, 16)
    with flexcp.context_parallel(plan), pytest.raises(ValueError, match="cast them to one dtype"):
        flex_attention(x, x, x.bfloat16(), block_mask=plan.block_mask)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_dtypes_that_attention_would_truncate_are_refused(dtype: torch.dtype) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    plan = flexcp.plan(masks.causal(), 128, 1)
    x = torch.ones(1, 1, 128, 16, dtype=dtype)
    with pytest.raises(ValueError, match="cast them to one of"):
        flexcp.flex_attention(x, x, x, plan)
    with flexcp.context_parallel(plan), pytest.raises(ValueError):  # torch's own sentence, or ours
        flex_attention(x, x, x, block_mask=plan.block_mask)


def call_through(door: str, **keywords) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    plan = flexcp.plan(masks.causal(), 128, 1)
    x = torch.randn(1, 1, 128, 16, requires_grad=True)
    if door == "operator":
        return flexcp.flex_attention(x, x, x, plan, **keywords)
    with flexcp.context_parallel(plan):
        return flex_attention(x, x, x, block_mask=plan.block_mask, **keywords)


@pytest.mark.parametrize("door", ["context", "operator"])
@pytest.mark.parametrize("scale", ["a", [0.5], 1j])
def test_a_scale_that_is_no_number(scale, door: str) -> None:
    with pytest.raises(ValueError, match=r"^scale is .*; it is a number, the factor on q @ k, or None"):
        call_through(door, scale=scale)


@pytest.mark.parametrize("door", ["context", "operator"])
def test_numbers_of_other_libraries_are_scales(door: str) -> None:
    torch.manual_seed(0)
    expected = call_through(door, scale=0.5)
    for scale in (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)):
        torch.manual_seed(0)
        assert torch.equal(call_through(door, scale=scale), expected)


@pytest.mark.parametrize("door", ["context", "operator"])
def test_a_score_mod_that_returns_no_tensor(door: str) -> None:
    def forgot(score, b, h, q_idx, kv_idx):
        score + q_idx

    for wrong in (forgot, functools.partial(forgot), lambda *args: forgot(*args)):
        for _ in range(2):  # once it is known, too
            with pytest.raises(ValueError, match=r"^score_mod .* returned None; it is a function .* returns the new"):
                call_through(door, score_mod=wrong)
    with pytest.raises(ValueError, match=r"^score_mod is 'alibi'; it is a function"):
        call_through(door, score_mod="alibi")


@pytest.mark.parametrize("shape", [(0, 1, 128, 16), (1, 0, 128, 16), (1, 1, 128, 0)])
def test_empty_inputs_are_refused(shape: tuple[int, ...]) -> None:
    plan = flexcp.plan(masks.causal(), 128, 1)
    x = torch.ones(shape)
    with pytest.raises(ValueError, match="at least one row, head and dim"):
        flexcp.flex_attention(x, x, x, plan)


@pytest.mark.parametrize("comm", ["gather", "exchange"])
def test_keys_that_nobody_sees_reach_no_row_whatever_they_hold(comm: str) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    plan = flexcp.plan(lambda b, h, q, kv: (q >= kv) & (kv % 50 != 7), 200, 1, comm=comm)
    good = [plan.shard(torch.randn(1, 2, 200, 16), dim=2) for _ in range(3)]
    bad = [x.clone() for x in good]
    for x in bad[1:]:
        x[:, :, plan.positions[0] % 50 == 7] = torch.nan
    results = []
    for leaves in (good, bad):
        leaves = [x.requires_grad_() for x in leaves]
        with flexcp.context_parallel(plan):
            out = flex_attention(*leaves, block_mask=plan.block_mask)
            results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, other in zip(*results):
        assert torch.equal(one[:, :, plan.valid[0]], other[:, :, plan.valid[0]])


class Window:
    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, b, h, q, kv):
        return q - kv < self.width

    def mask(self, b, h, q, kv):
        return q - kv < self.width


def within(width: int, b, h, q, kv):
    return q - kv < width


def read_from(config: Window):
    return lambda b, h, q, kv: (lambda: q - kv < config.width)()


@pytest.mark.parametrize(
    "make",
    [lambda n: functools.partial(within, n), Window, lambda n: Window(n).mask, lambda n: read_from(Window(n))],
    ids=["partial", "object", "method", "nested"],
)
def test_ranks_notice_what_a_mask_captures(make) -> None:
    assert mask_digest(make(3)) == mask_digest(make(3))
    assert mask_digest(make(3)) != mask_digest(make(43))
