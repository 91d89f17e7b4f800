"""What goes over the wire, counted in the communication layer."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import flex_attention

import flexcp
from flexcp import masks
from tests import matrix

S, HEADS, GROUPS, D = 1024, 4, 2, 16
SHARD_BYTES = GROUPS * (S // 4) * 2 * D * 4  # keys and values of a rank, fp32, cp 4


def traffic(mask_name: str, comm: str, balance: str, backward: bool) -> dict[str, int]:
    mask = {"full": masks.full(), "causal": masks.causal(), "window": masks.sliding_window(100)}[mask_name]
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    plan = flexcp.plan(mask, S, mesh, comm=comm, balance=balance)
    q, k, v = (torch.randn(1, h, plan.local_len, D, requires_grad=True) for h in (HEADS, GROUPS, GROUPS))
    with flexcp.context_parallel(plan):
        out = flex_attention(q, k, v, block_mask=plan.block_mask, enable_gqa=True)
        if backward:
            plan.link.counters.clear()
            out.sum().backward()
    c = plan.link.counters
    return {name: getattr(c, name) for name in ("p2p_messages", "p2p_bytes", "collective_calls", "peak_shards")}


def test_ring_sends_point_to_point_only_and_holds_two_shards(ranks) -> None:
    for counted in ranks(4).run(traffic, "full", "ring", "contiguous", False):
        assert counted == {
            "p2p_messages": 3,
            "p2p_bytes": 3 * SHARD_BYTES,
            "collective_calls": 0,
            "peak_shards": 2,
        }


def test_ring_sends_nothing_in_empty_steps(ranks) -> None:
    # Contiguous and causal: rank r is read by the ranks after it only.
    messages = [c["p2p_messages"] for c in ranks(4).run(traffic, "causal", "ring", "contiguous", False)]
    assert messages == [3, 2, 1, 0]
    # A window shorter than a shard: by its one neighbour.
    messages = [c["p2p_messages"] for c in ranks(4).run(traffic, "window", "ring", "contiguous", False)]
    assert messages == [1, 1, 1, 0]


def test_ring_backward_sends_keys_again_and_their_gradients_back(ranks) -> None:
    counted = ranks(4).run(traffic, "causal", "ring", "contiguous", True)
    # Rank r sends its keys to 3 - r readers and a gradient to each of the r ranks that it reads.
    assert [c["p2p_messages"] for c in counted] == [3, 3, 3, 3]
    assert [c["p2p_bytes"] for c in counted] == [3 * SHARD_BYTES] * 4
    assert all(c["collective_calls"] == 0 for c in counted)


def test_gather_is_one_collective_each_way(ranks) -> None:
    for backward in (False, True):
        for counted in ranks(4).run(traffic, "causal", "gather", "head_tail", backward):
            assert counted["p2p_messages"] == 0
            assert counted["collective_calls"] == (2 if backward else 1)


def exchanged(mask_name: str, balance: str, head_groups: int) -> list[int]:
    """Bytes that this rank sends forward and backward; and what brute force over all pairs says of both."""
    mask, more = matrix.flexcp_mask(mask_name, S)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    keywords = {"comm": "exchange", "balance": balance, "block_size": 64, "head_groups": head_groups}
    plan = flexcp.plan(mask, S, mesh, **keywords, **more)
    batch = more.get("batch", 1)
    q, k, v = (
        torch.randn(batch, h, plan.local_len, D, dtype=torch.bfloat16, requires_grad=True)
        for h in (HEADS, GROUPS, GROUPS)
    )
    sent = []
    with flexcp.context_parallel(plan):
        plan.link.counters.clear()
        out = flex_attention(q, k, v, block_mask=plan.block_mask, enable_gqa=True)
        sent.append(plan.link.counters.collective_bytes)
        plan.link.counters.clear()
        out.sum().backward()
        sent.append(plan.link.counters.collective_bytes)
    visible = matrix.dense_mask(mask_name, S).any(0).expand(HEADS, S, S).unflatten(0, (GROUPS, -1)).any(1)
    rows = [plan.layout.positions(rank) for rank in range(4)]
    out_pairs = in_pairs = 0  # (KV head, block) pairs that this rank sends and receives
    for other in set(range(4)) - {plan.rank}:
        for reader, owner in ((other, plan.rank), (plan.rank, other)):
            pairs = int(visible[:, rows[reader]][..., rows[owner].view(-1, 64)].any(3).any(1).sum())
            out_pairs, in_pairs = (out_pairs + pairs, in_pairs) if reader == other else (out_pairs, in_pairs + pairs)
    row = batch * 64 * 2 * D
    # Backward fetches the keys again, in bf16, and sends the gradients of what it received home, in fp32.
    return [*sent, out_pairs * row * 2, out_pairs * row * 2 + in_pairs * row * 4]


@pytest.mark.parametrize("head_groups", [1, 2])
@pytest.mark.parametrize("balance", ["contiguous", "head_tail"])
@pytest.mark.parametrize("mask_name", ["causal", "window", "document", "per_head", "per_batch", "dead_rows"])
def test_exchange_sends_the_needed_blocks_of_each_kv_head_and_nothing_else(
    ranks, mask_name: str, balance: str, head_groups: int
) -> None:
    for forward, backward, expected_forward, expected_backward in ranks(4).run(
        exchanged, mask_name, balance, head_groups
    ):
        assert (forward, backward) == (expected_forward, expected_backward)


def swapped(num_kv_heads: int) -> tuple[int, int]:
    """Bytes that this rank sends forward and backward under ulysses on 4 ranks, each with one of 4 query heads."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    plan = flexcp.plan(masks.causal(), S, mesh, comm="ulysses")
    q, k, v = (
        torch.randn(1, h, plan.local_len, D, dtype=torch.bfloat16, requires_grad=True)
        for h in (HEADS, num_kv_heads, num_kv_heads)
    )
    with flexcp.context_parallel(plan):
        plan.link.counters.clear()
        out = flex_attention(q, k, v, block_mask=plan.block_mask, enable_gqa=True)
        forward = plan.link.counters.collective_bytes
        plan.link.counters.clear()
        out.sum().backward()
    return forward, plan.link.counters.collective_bytes


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_ulysses_sends_each_head_to_the_rank_that_computes_it(ranks, num_kv_heads: int) -> None:
    row, lse = D * 2, 4  # of one head and token: bf16, and fp32
    rows = 3 * (S // 4)  # for three other ranks: one query head, and the KV head that it reads
    forward = rows * (3 * row + row + lse)  # q, k, v; out and lse
    # Gradients of a KV head that several ranks computed with are added up, and travel in fp32.
    gradients = row + 2 * row * (1 if num_kv_heads == 4 else 2)
    backward = rows * (5 * row + lse + gradients)  # q, k, v, out, dout, lse; dq, dk, dv
    assert ranks(4).run(swapped, num_kv_heads) == [(forward, backward)] * 4


def silent_exchange() -> int:
    ids = torch.arange(4).repeat_interleave(256)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    plan = flexcp.plan(masks.document(ids), 1024, mesh, comm="exchange", balance="contiguous")
    x = torch.randn(1, 1, plan.local_len, D, requires_grad=True)
    with flexcp.context_parallel(plan):
        flex_attention(x, x, x, block_mask=plan.block_mask).sum().backward()
    return plan.link.counters.collective_calls


def test_exchange_is_silent_where_every_rank_has_its_own_documents(ranks) -> None:
    assert ranks(4).run(silent_exchange) == [0, 0, 0, 0]
