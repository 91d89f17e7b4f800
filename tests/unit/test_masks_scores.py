"""masks.scores: each score against its formula, under vmap in flex_attention, and its gradients to learned tables."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from flexcp.masks import scores

B, H, S, D = 2, 3, 40, 16
b, h, q, kv = (torch.arange(n).reshape([-1 if a == at else 1 for a in range(4)]) for at, n in enumerate((B, H, S, S)))
GENERATOR = torch.Generator().manual_seed(0)


def rand(*shape):
    return torch.randn(*shape, generator=GENERATOR)


BASE = rand(B, H, S, S)
PATHS = torch.randint(0, 9, (B, S, S), generator=GENERATOR)
T5_TABLE, NEAR_TABLE, LOGITS, GRAPH_TABLE = rand(8, H), rand(H, 10), rand(H), rand(H, 6)
SINK_AT_3 = BASE.clone()
SINK_AT_3[..., 3] = LOGITS[:, None]


def t5_bucket(distance, num, bidirectional, limit):
    """One number at a time, as the paper words it."""
    base = 0
    if bidirectional:
        num //= 2
        base = num if distance < 0 else 0
        distance = abs(distance)
    distance = max(distance, 0)
    exact = num // 2
    if distance < exact:
        return base + distance
    far = exact + int(math.log(distance / exact) / math.log(limit / exact) * (num - exact) + 1e-6)
    return base + min(far, num - 1)


def t5(bidirectional):
    bucket = [[t5_bucket(i - j, 8, bidirectional, 20) for j in range(S)] for i in range(S)]
    return BASE + T5_TABLE[torch.tensor(bucket)].permute(2, 0, 1)


def cosines(distance, dim):
    return sum(torch.cos(distance.double() / 10000 ** (2 * i / dim)) for i in range(1, dim // 2 + 1))


SLOPES = torch.tensor([2.0**-4, 2.0**-8, 2.0**-2])[:, None, None]  # 3 heads: two of 2, then the first of 4
CASES = {
    "alibi": (scores.alibi(H), BASE - SLOPES * (q - kv).abs()),
    "softcap": (scores.softcap(1.5), 1.5 * torch.tanh(BASE / 1.5)),
    "t5": (scores.relative_bias(T5_TABLE, max_distance=20), t5(False)),
    "t5 bidirectional": (scores.relative_bias(T5_TABLE, bidirectional=True, max_distance=20), t5(True)),
    "distance": (scores.distance_bias(NEAR_TABLE), BASE + NEAR_TABLE[:, (q - kv).abs().clamp(max=9)[0, 0]]),
    "sink": (scores.sink(LOGITS, position=3), SINK_AT_3),
    "sandwich": (
        scores.sandwich(H, 100, dim=8),
        BASE + (cosines(q - kv, 8) / (8 * (h + 1) / H)).float(),
    ),
    "sandwich clamps": (
        scores.sandwich(H, 7, dim=8),
        BASE + (cosines((q - kv).abs().clamp(max=7), 8) / (8 * (h + 1) / H)).float(),
    ),
    "graph": (scores.graph_bias(GRAPH_TABLE, PATHS[0]), BASE + GRAPH_TABLE[:, PATHS[0].clamp(max=5)]),
    "graph per batch": (
        scores.graph_bias(GRAPH_TABLE, PATHS),
        BASE + GRAPH_TABLE[:, PATHS.clamp(max=5)].transpose(0, 1),
    ),
    "composed": (
        scores.compose(scores.softcap(1.5), lambda score, b, h, q, kv: score + b - kv, scores.alibi(H)),
        1.5 * torch.tanh(BASE / 1.5) + b - kv - SLOPES * (q - kv).abs(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_score_is_its_formula(name):
    score, want = CASES[name]
    assert torch.allclose(score(BASE, b, h, q, kv), want, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_flex_attention_accepts_a_score(name):
    score, _ = CASES[name]
    query, key, value = rand(3, B, H, S, D).unbind()
    want = score(query @ key.mT / math.sqrt(D), b, h, q, kv).softmax(-1) @ value
    assert torch.allclose(flex_attention(query, key, value, score_mod=score), want, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_padded_indices_are_safe_and_to_moves_everything(name):
    score, _ = CASES[name]
    if name not in ("composed",):
        beyond = torch.arange(2 * S)
        score(torch.zeros(1, 1, 2 * S, 2 * S), b, h, beyond[:, None], beyond)
    moved = [value for value in vars(score.to("meta")).values() if isinstance(value, torch.Tensor)]
    assert all(value.device.type == "meta" for value in moved)


@pytest.mark.parametrize(
    "build",
    [
        lambda table: scores.relative_bias(table, max_distance=20),
        lambda table: scores.distance_bias(table.T),
        lambda table: scores.graph_bias(table.T, PATHS[0]),
        lambda table: scores.sink(table[0]),
    ],
)
def test_gradients_reach_the_learned_table(build):
    table = rand(6, H).requires_grad_()
    weight = rand(B, H, S, S)
    grad = torch.autograd.grad((build(table)(BASE, b, h, q, kv) * weight).sum(), table)[0]
    step = rand(6, H)
    # A bias is linear in its table: a step along any direction changes the sum by exactly the gradient's part.
    moved = (build(table.detach() + step)(BASE, b, h, q, kv) * weight).sum()
    still = (build(table.detach())(BASE, b, h, q, kv) * weight).sum()
    assert torch.allclose(moved - still, (grad * step).sum(), rtol=1e-3, atol=1e-2)


def test_a_sink_after_attention_is_a_sink_within():
    query, key, value = rand(3, B, H, S, D).double().unbind()
    logits = rand(H).double().requires_grad_()
    raw = query @ key.mT
    with_sink = torch.cat([raw, logits[None, :, None, None].expand(B, H, S, 1)], -1)
    want, want_lse = with_sink.softmax(-1)[..., :-1] @ value, with_sink.logsumexp(-1)
    out, lse = scores.apply_sink(raw.softmax(-1) @ value, raw.logsumexp(-1), logits)
    assert torch.allclose(out, want)
    assert torch.allclose(lse, want_lse)
    weight = rand(B, H, S, D).double()
    grads = [torch.autograd.grad((each * weight).sum(), logits, retain_graph=True)[0] for each in (out, want)]
    assert torch.allclose(*grads)


def test_a_sink_is_safe_for_rows_that_see_nothing():
    logits = torch.zeros(H, requires_grad=True)
    lse = torch.full((B, H, S), -torch.inf, requires_grad=True)
    out, new_lse = scores.apply_sink(torch.zeros(B, H, S, D), lse, logits)
    (out.sum() + new_lse.sum()).backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(new_lse, torch.zeros_like(new_lse))
    assert logits.grad.isfinite().all()
    assert lse.grad.isfinite().all()


def test_hash_dropout_depends_on_the_global_pair_only():
    drop = scores.hash_dropout(0.3, seed=11)
    whole = drop(BASE, b, h, q, kv)
    rows = torch.randperm(S, generator=GENERATOR)
    assert torch.equal(drop(BASE[:, :, rows], b, h, rows[:, None], kv), whole[:, :, rows])
    as_int32 = drop(BASE, *(index.int() for index in (b, h, q, kv)))
    assert torch.equal(as_int32, whole)
    # A reference in Python's unbounded integers: nothing overflowed.
    assert whole[1, 2, 17, 5].isinf().item() == (python_hash(11, 1, 2, 17, 5) < round(0.3 * 2**32))
    assert [python_hash(11, 1, 2, 17, j) < round(0.3 * 2**32) for j in range(S)] == whole[1, 2, 17].isinf().tolist()


def python_hash(seed, *indices):
    state = seed
    for index in indices:
        state = ((state ^ index) + 0x1E3779B9) % 2**32
        for _ in range(2):
            state = ((state ^ (state >> 16)) * 0x45D9F3B) % 2**32
        state ^= state >> 16
    return state


def test_hash_dropout_is_fair_and_independent():
    i = torch.arange(1024)
    drop = scores.hash_dropout(0.1, seed=3)(torch.tensor(0.0), i[:1], i[:1], i[:, None], i).isinf().double()
    tolerance = 5 * math.sqrt(0.09 / 1024)
    assert abs(drop.mean() - 0.1) < 5 * math.sqrt(0.09 / 1024**2)
    assert (drop.mean(0) - 0.1).abs().max() < tolerance
    assert (drop.mean(1) - 0.1).abs().max() < tolerance
    for other in (drop.roll(1, 0), drop.roll(1, 1), drop.T):  # neighbours are uncorrelated
        assert abs(((drop - 0.1) * (other - 0.1)).mean() / 0.09) < 5 / 1024


def test_hash_dropout_follows_a_seed_tensor_that_changes():
    seed = torch.tensor(1)
    drop = scores.hash_dropout(0.5, seed)
    first = drop(BASE, b, h, q, kv)
    seed.fill_(2)
    assert torch.equal(drop(BASE, b, h, q, kv), scores.hash_dropout(0.5, 2)(BASE, b, h, q, kv))
    assert not torch.equal(drop(BASE, b, h, q, kv), first)
    assert torch.equal(scores.hash_dropout(0.0, 5)(BASE, b, h, q, kv), BASE)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: scores.alibi(0), "num_heads must be at least 1"),
        (lambda: scores.softcap(0), "cap must be a finite number above 0"),
        (lambda: scores.softcap(float("nan")), "cap must be"),
        (lambda: scores.relative_bias(torch.zeros(8, 2).long()), "floating-point tensor"),
        (lambda: scores.relative_bias(torch.zeros(1, 2)), "at least 2 buckets"),
        (lambda: scores.relative_bias(torch.zeros(32, 2), max_distance=16), "max_distance must be at least 17"),
        (lambda: scores.distance_bias(torch.zeros(8)), r"\[H, R\]"),
        (lambda: scores.sink(torch.zeros(2), position=-1), "position must be at least 0"),
        (lambda: scores.apply_sink(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(3)), "are needed"),
        (lambda: scores.sandwich(8, 16, dim=5), "dim must be even"),
        (lambda: scores.graph_bias(torch.zeros(2, 3), torch.zeros(2, 3).long()), "must be square"),
        (lambda: scores.hash_dropout(1.0, 0), r"in \[0, 1\)"),
        (lambda: scores.hash_dropout(0.1, -1), "seed must be at least 0"),
        (lambda: scores.hash_dropout(0.1, torch.tensor(1, dtype=torch.int32)), "must be int64"),
        (lambda: scores.compose(), "at least one score"),
        (lambda: scores.compose(lambda b, h, q, kv: q >= kv), "a mask goes into the block mask"),
    ],
)
def test_wrong_arguments_get_a_sentence(call, says):
    with pytest.raises(ValueError, match=says):
        call()
