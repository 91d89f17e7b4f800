"""Inputs that broke other systems (shared/cases.md, by number): equal to one device, or a sentence saying why not."""

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import flexcp
from flexcp import masks
from tests import oracle


def cp_mesh():
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("cp",))


def compare(plan: flexcp.Plan, visible: Tensor, heads=2, dim=16, score_mod=None, dense_score=None, views=False, **more):
    """Out and gradients of flexcp on this group against dense float64."""
    g = torch.Generator().manual_seed(7)
    batch = visible.shape[0]
    shape = (batch, plan.seq_len, heads, dim) if views else (batch, heads, plan.seq_len, dim)
    full = [torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(4)]
    if views:
        full = [x.transpose(1, 2) for x in full]
    leaves = [plan.shard(x, dim=2).requires_grad_() for x in full[:3]]
    with flexcp.context_parallel(plan):
        out = flex_attention(*leaves, score_mod=score_mod, block_mask=plan.block_mask, **more)
        grads = torch.autograd.grad((out * plan.shard(full[3], dim=2)).sum(), leaves)
    copies = [x.detach().clone().requires_grad_() for x in full[:3]]
    want, _ = oracle.attention(*copies, visible, dense_score)
    wanted = torch.autograd.grad((want * full[3]).sum(), copies)
    for got, expected in zip((out.detach(), *grads), (want.detach(), *wanted)):
        torch.testing.assert_close(plan.unshard(got, dim=2), expected, rtol=0, atol=1e-10)


def index(seq_len: int) -> tuple[Tensor, Tensor]:
    return torch.arange(seq_len)[:, None], torch.arange(seq_len)


def causal(b, h, q, kv):
    return q >= kv


# 1, 2: scores that use indices get global ones; the matrix has more of them.
def distance_score(comm: str) -> None:
    q, kv = index(512)
    compare(
        flexcp.plan(masks.causal(), 512, cp_mesh(), comm=comm, balance="head_tail"),
        (q >= kv)[None, None],
        score_mod=lambda s, b, h, q, kv: s - (q - kv).abs() * 0.05,
        dense_score=lambda s: s - (q - kv).abs() * 0.05,
    )


@pytest.mark.parametrize("comm", ["gather", "ring", "exchange"])
def test_01_score_sees_global_indices(ranks, comm: str) -> None:
    ranks(2).run(distance_score, comm)


# 3: block sizes are kept.
def block_sizes(size) -> None:
    block_mask = create_block_mask(causal, None, None, 1024, 1024, device="cpu", BLOCK_SIZE=size)
    plan = flexcp.plan(block_mask, 1024, cp_mesh(), balance="head_tail")
    pair = (size, size) if isinstance(size, int) else size
    assert pair == plan.schedules["mask"].stages[0].block_mask.BLOCK_SIZE
    q, kv = index(1024)
    compare(plan, (q >= kv)[None, None])


@pytest.mark.parametrize("size", [256, (128, 64), (64, 256), (64, 96)])
def test_03_block_size_is_kept(ranks, size) -> None:
    ranks(2).run(block_sizes, size)


# 5: a BlockMask without mask_mod stays sparse.
def from_kv_blocks() -> None:
    counts = torch.tensor([[[1, 1, 2, 2]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 9, 9, 9], [1, 9, 9, 9], [0, 2, 9, 9], [1, 3, 9, 9]]]], dtype=torch.int32)
    dense = torch.zeros(4, 4, dtype=torch.bool)
    for row, column in ((0, 0), (1, 1), (2, 0), (2, 2), (3, 1), (3, 3)):
        dense[row, column] = True
    mask = BlockMask.from_kv_blocks(counts, indices.clamp(max=3), BLOCK_SIZE=128)
    for balance in ("contiguous", "head_tail"):
        plan = flexcp.plan(mask, 512, cp_mesh(), balance=balance)
        compare(plan, dense.repeat_interleave(128, 0).repeat_interleave(128, 1)[None, None])


def test_05_block_mask_without_mask_mod_stays_sparse(ranks) -> None:
    ranks(2).run(from_kv_blocks)


# 8: many lengths and windows one after another.
def lengths_and_windows() -> None:
    for seq_len in range(256, 3073, 256):
        plan = flexcp.plan(masks.causal(), seq_len, cp_mesh())
        x = torch.randn(1, 1, plan.local_len, 16, requires_grad=True)
        with flexcp.context_parallel(plan):
            flex_attention(x, x, x, block_mask=plan.block_mask).sum().backward()
    q, kv = index(512)
    for window in range(64, 769, 64):
        visible = (q >= kv) & (q - kv < window)
        compare(flexcp.plan(masks.sliding_window(window), 512, cp_mesh()), visible[None, None])
        bound = torch.tensor(window)
        plan = flexcp.plan(masks.causal(), 512, cp_mesh())
        compare(
            plan,
            (q >= kv)[None, None],
            score_mod=lambda s, b, h, q, kv, bound=bound: torch.where(q - kv < bound, s, -float("inf")),
            dense_score=lambda s, visible=visible: torch.where(visible, s, -torch.inf),
        )


def test_08_many_lengths_and_windows(ranks) -> None:
    ranks(2).run(lengths_and_windows)


# 9, 10: layers alternate two masks on one layout.
def two_masks() -> None:
    ids = torch.repeat_interleave(torch.arange(2), torch.tensor([4, 8]))
    document, q, kv = masks.document(ids) & masks.causal(), *index(12)
    named = {"full": document, "sliding": document & masks.sliding_window(3)}
    plan = flexcp.plan(named, 12, cp_mesh(), block_size=1, balance="head_tail")
    same = (q >= kv) & (ids[:, None] == ids)
    dense = {"full": same, "sliding": same & (q - kv < 3)}
    x = [torch.randn(1, 1, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(s)) for s in range(3)]
    for name, visible in dense.items():
        with flexcp.context_parallel(plan):
            out = flex_attention(*(plan.shard(t, dim=2) for t in x), block_mask=plan.block_masks[name])
        torch.testing.assert_close(plan.unshard(out, dim=2), oracle.attention(*x, visible)[0])
    with pytest.raises(ValueError, match=r"plan\.block_masks\[name\]"):
        _ = plan.block_mask


def test_10_two_masks_one_layout(ranks) -> None:
    ranks(2).run(two_masks)


# 11: tables that end with the sequence.
def table_with_padded_tail() -> None:
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([1000, 1000, 46]))
    q, kv = index(2046)
    visible = ((q >= kv) & (ids[:, None] == ids))[None, None]
    plan = flexcp.plan(lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv), 2046, cp_mesh(), balance="head_tail")
    compare(plan, visible, heads=1)


def test_11_captured_table_is_not_read_past_its_end(ranks) -> None:
    ranks(2).run(table_with_padded_tail)


# 12: a mask made from already sharded positions.
def test_12_mask_of_the_local_length_is_refused() -> None:
    local = masks.document(torch.zeros(1024, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"made for a sequence of 1024 tokens, but seq_len is 2048"):
        flexcp.plan(local, 2048, 2)


# 13, 6: masks that read b or h say so.
@pytest.mark.parametrize(
    ("mask", "argument"),
    [(lambda b, h, q, kv: q >= kv + b, "batch"), (lambda b, h, q, kv: (q >= kv) & (q - kv < (h + 1) * 64), "heads")],
)
def test_13_mask_that_reads_an_undeclared_index_is_refused(mask, argument: str) -> None:
    with pytest.raises(ValueError, match=f"plan needs {argument}="):
        flexcp.plan(mask, 512, 2)


# 16: tensors that are not contiguous.
def not_contiguous() -> None:
    q, kv = index(500)
    compare(flexcp.plan(masks.causal(), 500, cp_mesh(), comm="ring"), (q >= kv)[None, None], views=True)
    plan = flexcp.plan(masks.causal(), 500, cp_mesh(), comm="ring")
    wide = torch.randn(1, 2, plan.local_len + 128, 16, requires_grad=True)
    x = torch.randn(1, 2, plan.local_len, 16)
    with flexcp.context_parallel(plan):
        (part,) = torch.autograd.grad(
            flex_attention(x, wide[:, :, :-128], x, block_mask=plan.block_mask).square().sum(), wide
        )
        copy = wide.detach()[:, :, :-128].contiguous().requires_grad_()
        (whole,) = torch.autograd.grad(flex_attention(x, copy, x, block_mask=plan.block_mask).square().sum(), copy)
    torch.testing.assert_close(part[:, :, :-128], whole)
    assert not part[:, :, -128:].any()


def test_16_views_and_slices(ranks) -> None:
    ranks(2).run(not_contiguous)


# 17: two forms of one pattern.
def two_forms() -> None:
    q, kv = index(2048)
    table = q >= kv
    for mask in (causal, lambda b, h, q, kv: table[q, kv]):
        compare(flexcp.plan(mask, 2048, cp_mesh(), balance="head_tail"), table[None, None], heads=1, dim=8)


def test_17_function_and_table_agree(ranks) -> None:
    ranks(2).run(two_forms)


# 18: shards and first blocks that see nothing.
def nothing_seen(comm: str) -> None:
    q, kv = index(512)
    for mask, visible in (
        (lambda b, h, q, kv: (q >= kv) & (q < 256), (q >= kv) & (q < 256)),
        (lambda b, h, q, kv: (kv >= 200) & (q >= 0), ((kv >= 200) & (q >= 0))),
        (lambda b, h, q, kv: q < 0, q + kv < 0),
    ):
        compare(flexcp.plan(mask, 512, cp_mesh(), comm=comm, balance="contiguous"), visible[None, None])


@pytest.mark.parametrize("comm", ["gather", "ring", "exchange"])
def test_18_shards_and_blocks_that_see_nothing(ranks, comm: str) -> None:
    ranks(2).run(nothing_seen, comm)


# 7, 19: masks of other lengths.
@pytest.mark.parametrize("lengths", [(4096, 4096), (512, 1024), (1024, 512)])
def test_19_mask_of_another_length_is_refused(lengths) -> None:
    mask = create_block_mask(causal, None, None, *lengths, device="cpu")
    with pytest.raises(ValueError, match="make it for the whole sequence"):
        flexcp.plan(mask, 512 if 512 in lengths else 1000, 2)


# 20: a grid of 16 x 4, and rectangular blocks.
def grid() -> None:
    q, kv = index(64)
    rows, columns = (q // 4 - kv // 4).abs() <= 2, (q % 4 - kv % 4).abs() <= 1
    mask = lambda b, h, q, kv: ((q // 4 - kv // 4).abs() <= 2) & ((q % 4 - kv % 4).abs() <= 1)  # noqa: E731
    compare(flexcp.plan(mask, 64, cp_mesh(), block_size=(8, 16), balance="head_tail"), (rows & columns)[None, None])


def test_20_grid_with_rectangular_blocks(ranks) -> None:
    ranks(2).run(grid)


# 22, 23, 24: any length and rank count comes back whole.
def round_trip(seq_len: int) -> None:
    for balance in ("contiguous", "head_tail"):
        plan = flexcp.plan(masks.causal(), seq_len, cp_mesh(), balance=balance)
        x = torch.arange(seq_len)
        local = plan.shard(x, dim=0, pad=-1)
        assert local.shape == (plan.local_len,)
        assert torch.equal(plan.unshard(local, dim=0), x)
        assert torch.equal(local[plan.valid[0]], plan.positions[0][plan.valid[0]])
        assert (local[~plan.valid[0]] == -1).all()
        with pytest.raises(ValueError, match="takes the whole sequence"):
            plan.shard(torch.zeros(1, seq_len + 1), dim=1)
        with pytest.raises(ValueError, match="pass pad="):
            flexcp.plan(masks.causal(), 129, cp_mesh()).shard(torch.arange(129), dim=0)
        grid = torch.randn(2, seq_len, 3, generator=torch.Generator().manual_seed(seq_len))
        assert torch.equal(plan.unshard(plan.shard(grid, dim=1), dim=1), grid)


@pytest.mark.parametrize(("cp", "seq_len"), [(2, 7), (2, 384), (2, 1), (4, 57_826), (3, 1000)])
def test_24_every_length_comes_back_whole(ranks, cp: int, seq_len: int) -> None:
    ranks(cp).run(round_trip, seq_len)


def three_ranks(comm: str, balance: str) -> None:
    q, kv = index(500)
    compare(flexcp.plan(masks.causal(), 500, cp_mesh(), comm=comm, balance=balance), (q >= kv)[None, None])


@pytest.mark.parametrize("comm", ["gather", "ring", "exchange"])
@pytest.mark.parametrize("balance", ["contiguous", "head_tail"])
def test_22_three_ranks(ranks, comm: str, balance: str) -> None:
    ranks(3).run(three_ranks, comm, balance)


# 26: forgetting the context on one rank stops it with a sentence; the others do not wait for ever.
def forgetful() -> str:
    plan = flexcp.plan(masks.causal(), 512, cp_mesh(), comm="ring")
    x = torch.randn(1, 1, plan.local_len, 16)
    if plan.rank == 1:
        flex_attention(x, x, x, block_mask=plan.block_mask)
    return "computed"


def test_26_a_rank_that_forgot_the_context_raises(ranks) -> None:
    outcomes = ranks(2).outcomes(forgetful)
    assert outcomes[0] == (True, "computed")
    assert not outcomes[1][0]
    assert "outside its context" in outcomes[1][1]


def unshard_gradients() -> None:
    """replicated: one loss computed alike on every rank; partial: the ranks' losses add up."""
    plan = flexcp.plan(masks.causal(), 10, cp_mesh(), block_size=2, balance="head_tail")
    full = torch.randn(1, 10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = torch.randn(2, 1, 10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    local = plan.shard(full, dim=1).requires_grad_()
    (grad,) = torch.autograd.grad((plan.unshard(local, dim=1, grad="replicated") * weights[0]).sum(), local)
    torch.testing.assert_close(plan.unshard(grad, dim=1), weights[0])
    (grad,) = torch.autograd.grad((plan.unshard(local, dim=1, grad="partial") * weights[plan.rank]).sum(), local)
    torch.testing.assert_close(plan.unshard(grad, dim=1), weights.sum(0))
    with pytest.raises(ValueError, match="grad='replicated'"):
        plan.unshard(local, dim=1)


def test_unshard_has_both_gradients(ranks) -> None:
    ranks(2).run(unshard_gradients)


def with_dtensor() -> str:
    from torch.distributed.tensor import Replicate, distribute_tensor

    plan = flexcp.plan(masks.causal(), 512, cp_mesh())
    x = torch.randn(1, 1, plan.local_len, 16)
    q = distribute_tensor(x, cp_mesh(), [Replicate()])
    try:
        with flexcp.context_parallel(plan):
            flex_attention(q, q, q, block_mask=plan.block_mask)
    except TypeError as error:
        return str(error)
    return "computed"


def test_dtensor_inputs_are_refused(ranks) -> None:
    assert all("call .to_local() first" in answer for answer in ranks(2).run(with_dtensor))
