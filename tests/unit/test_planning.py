"""Properties of layouts, classes, schedules and the merge, over arbitrary lengths, sizes and masks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

import flexcp
from flexcp import balance as balancing
from flexcp import masks
from flexcp.blockmask import EMPTY, FULL, block_classes
from flexcp.blocksource import block_source
from flexcp.layout import LAYOUTS
from flexcp.merge import merge
from flexcp.planner import visible_work

layouts = st.builds(
    lambda name, seq_len, cp, align: LAYOUTS[name](seq_len, cp, align),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 300),
    st.integers(1, 9),
    st.sampled_from([1, 2, 8, 24]),
)


@st.composite
def any_mask(draw: st.DrawFn, seq_len: int):
    """A mask of the library, a composition or a plain function, and whether it is plain."""
    ids = torch.tensor(sorted(draw(st.lists(st.integers(0, 4), min_size=seq_len, max_size=seq_len))))
    leaf = st.sampled_from(
        [masks.causal(), masks.full(), masks.sliding_window(5), masks.prefix_lm(7), masks.document(ids)]
    )
    one, other = draw(leaf), draw(leaf)
    shift = draw(st.integers(-3, 3))
    plain = masks.lift(lambda b, h, q, kv: (q * 7 + kv * 3 + shift) % 5 < 2)
    return draw(st.sampled_from([one, one & other, one | other, ~one, one ^ other, one & plain, plain, other | ~plain]))


def dense(mask, seq_len: int) -> torch.Tensor:
    zero, i = torch.zeros((), dtype=torch.int64), torch.arange(seq_len)
    return mask(zero, zero, i[:, None], i[None, :]).expand(seq_len, seq_len)


@given(layouts)
def test_permute_and_restore_are_inverses_and_every_token_has_one_owner(layout) -> None:
    permutation, restoration = layout.permutation(), layout.restoration()
    identity = torch.arange(layout.padded_len)
    assert torch.equal(permutation[restoration], identity)
    assert torch.equal(restoration[permutation], identity)
    assert layout.local_len * layout.cp_size == layout.padded_len >= layout.seq_len


@given(layouts, st.sampled_from([1, 2, 3, 4, 8]))
def test_block_starts_are_the_positions_of_first_rows(layout, block_size: int) -> None:
    if layout.chunk_size % block_size:
        with pytest.raises(ValueError, match="does not divide"):
            layout.starts(0, block_size)
        return
    for rank in range(layout.cp_size):
        assert torch.equal(layout.starts(rank, block_size), layout.positions(rank)[::block_size])


@st.composite
def plans(draw: st.DrawFn):
    """(mask, seq_len, every rank's plan)"""
    seq_len = draw(st.integers(1, 60))
    mask = draw(any_mask(seq_len))
    cp = draw(st.integers(1, 5))
    keywords = {
        "block_size": (draw(st.sampled_from([1, 2, 4, 6])), draw(st.sampled_from([1, 2, 3, 8]))),
        "balance": draw(st.sampled_from(balancing.BALANCES)),
        "comm": draw(st.sampled_from(["gather", "ring", "exchange"])),
    }
    return mask, seq_len, [flexcp.plan(mask, seq_len, cp, rank=rank, **keywords) for rank in range(cp)]


@settings(max_examples=150, deadline=None)
@given(plans())
def test_every_visible_pair_is_computed_once_and_no_other(case) -> None:
    mask, seq_len, every = case
    padded = every[0].layout.padded_len
    # Room for the slots of an exchange that hold nothing.
    count = torch.zeros(padded, padded + every[0].layout.chunk_size, dtype=torch.int64)
    for plan in every:
        for stage in plan.schedules["mask"].stages:
            if stage.block_mask is None:
                continue
            q_len, kv_len = stage.block_mask.seq_lengths
            q_local, kv_local = torch.arange(q_len), torch.arange(kv_len)
            q_size, kv_size = stage.block_mask.BLOCK_SIZE
            classes = block_classes(stage.block_mask)[0, 0]
            classes = classes.repeat_interleave(q_size, 0).repeat_interleave(kv_size, 1)
            zero = torch.zeros((), dtype=torch.int64)
            seen = stage.block_mask.mask_mod(zero, zero, q_local[:, None], kv_local[None, :])
            visible = (classes == FULL) | ((classes != EMPTY) & seen)
            q = plan.layout.positions(plan.rank)
            kv = (stage.kv_start[:, None] + torch.arange(kv_size)).flatten()
            count[q[:, None], kv] += visible.long()
    want = torch.zeros_like(count)
    want[:seq_len, :seq_len] = dense(mask, seq_len).long()
    assert torch.equal(count, want)


@settings(max_examples=60, deadline=None)
@given(plans())
def test_senders_and_readers_agree_and_only_needed_keys_travel(case) -> None:
    _, _, every = case
    if every[0].comm != "ring":
        return
    sent = {(p.rank, s.send_to, t) for p in every for t, s in enumerate(p.schedules["mask"].stages)}
    received = {(s.receive_from, p.rank, t) for p in every for t, s in enumerate(p.schedules["mask"].stages)}
    sent = {message for message in sent if message[1] is not None}
    assert sent == {message for message in received if message[0] is not None}
    # "Needed" is what the classes say: a mask such as a ^ a cannot say of itself that it is empty.
    source = every[0].schedules["mask"].source
    for owner, reader, _ in sent:
        q_start, kv_start = (every[0].layout.starts(r, n) for r, n in zip((reader, owner), source.block_size))
        assert (source.classes(q_start, kv_start) != EMPTY).any()


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 50), st.sampled_from([1, 3, 8]), st.sampled_from([1, 4, 7]))
def test_no_block_is_called_full_or_empty_wrongly(data, seq_len: int, q_size: int, kv_size: int) -> None:
    mask = data.draw(any_mask(seq_len))
    source = block_source(mask, seq_len, (q_size, kv_size))
    q_start, kv_start = torch.arange(0, seq_len, q_size), torch.arange(0, seq_len + 5, kv_size)
    classes = source.classes(q_start, kv_start)[0, 0]
    visible = dense(mask, seq_len)
    for i, q in enumerate(q_start.tolist()):
        for j, kv in enumerate(kv_start.tolist()):
            block = visible[q : q + q_size, kv : kv + kv_size]
            if classes[i, j] == EMPTY:
                assert not block.any()
            if classes[i, j] == FULL:
                assert block.all()
                assert block.shape == (q_size, kv_size), "padding in a full block"


@pytest.mark.parametrize("mask", [masks.causal(), masks.sliding_window(200), masks.prefix_lm(130)], ids=repr)
@pytest.mark.parametrize("block_size", [128, 64, (128, 64)])
def test_local_mask_is_the_slice_of_torchs_global_one(mask, block_size) -> None:
    seq_len = 1024
    whole = create_block_mask(mask, None, None, seq_len, seq_len, device="cpu", BLOCK_SIZE=block_size)
    sizes = whole.BLOCK_SIZE
    for rank in range(2):
        plan = flexcp.plan(mask, seq_len, 2, rank=rank, block_size=block_size, balance="head_tail", comm="gather")
        (stage,) = plan.schedules["mask"].stages
        rows, columns = stage.q_start // sizes[0], stage.kv_start // sizes[1]
        assert torch.equal(block_classes(stage.block_mask), block_classes(whole)[:, :, rows][..., columns])


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 7))
def test_merge_is_associative_and_its_identity_is_a_row_that_sees_nothing(seed: int, dead: int) -> None:
    g = torch.Generator().manual_seed(seed)
    parts = []
    for bit in range(3):
        out, lse = torch.randn(1, 1, 2, 4, generator=g).double(), torch.randn(1, 1, 2, generator=g).double() * 20
        if dead >> bit & 1:
            out, lse = torch.zeros_like(out), torch.full_like(lse, -math.inf)
        parts.append((out, lse))
    a, b, c = parts
    left, right = merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c))
    torch.testing.assert_close(left, right)
    empty = torch.zeros_like(a[0]), torch.full_like(a[1], -math.inf)
    torch.testing.assert_close(merge(*a, *empty), a)
    torch.testing.assert_close(merge(*empty, *a), a)
    assert not left[0].isnan().any()


def test_head_tail_balances_causal_and_auto_prefers_it() -> None:
    work = {}
    for balance in ("contiguous", "head_tail", "auto"):
        every = [flexcp.plan(masks.causal(), 4096, 4, rank=rank, balance=balance) for rank in range(4)]
        work[balance] = [visible_work(plan.schedules["mask"]) for plan in every]
    assert len(set(work["head_tail"])) == 1
    assert max(work["contiguous"]) > 1.5 * max(work["head_tail"])
    assert work["auto"] == work["head_tail"]


def test_auto_keeps_contiguous_where_it_is_as_good() -> None:
    assert flexcp.plan(masks.full(), 4096, 4).layout.name == "contiguous"


def test_plan_by_size_needs_no_process_group() -> None:
    plan = flexcp.plan(lambda b, h, q, kv: q >= kv, 1000, 8, rank=7, comm="ring", balance="head_tail")
    assert plan.local_len == 256
    assert plan.positions.shape == plan.valid.shape == (1, 256)
    assert plan.positions.max() == 999
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("keywords", "sentence"),
    [
        ({"seq_len": 0}, "seq_len is the number of tokens"),
        ({"seq_len": 2.5}, "seq_len is the number of tokens"),
        ({"mesh": 0}, "at least 1 rank"),
        ({"mesh": "cp"}, "mesh is a DeviceMesh"),
        ({"rank": 2}, "below mesh=2"),
        ({"balance": "head_tial"}, "did you mean head_tail"),
        ({"comm": "rings"}, "did you mean ring"),
        ({"block_size": 0}, "block_size is a number of tokens"),
        ({"mask": {}}, "no mask at all"),
        ({"mask": 3}, "a mask is a mask_mod"),
        ({"mask": lambda b, h, q, kv: q - kv}, "a mask_mod returns bool"),
        ({"mask": lambda b, h, q, kv: q.nonsense}, "raised AttributeError"),
        ({"mask": lambda b, h, q: q}, "raised TypeError|positional argument"),
    ],
)
def test_wrong_arguments_get_a_sentence(keywords, sentence: str) -> None:
    arguments = {"mask": masks.causal(), "seq_len": 512, "mesh": 2} | keywords
    with pytest.raises((ValueError, TypeError), match=sentence):
        flexcp.plan(**arguments)
