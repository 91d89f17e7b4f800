"""The recall task and evaluation: what takes attention across shards is learned, and with a short mask it is not."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import flexcp
from flexcp import masks
from flexcp.data import IGNORE
from flexcp.evaluate import bucket_edges, evaluate
from flexcp.models import build
from flexcp.recall import RecallTask
from tests.ranks import Ranks
from tests.train import on_ranks_recall
from tests.train.on_ranks import TINY, batch_of

GetRanks = Callable[[int], Ranks]
STEPS = 100
TASK = on_ranks_recall.TASK


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    return on_ranks_recall.run(STEPS)


def require_recall(evaluation: Any) -> None:
    assert evaluation.accuracy > 0.99
    far = [bucket for bucket in evaluation.buckets if bucket.tokens]
    assert len(far) == 4
    assert all(bucket.accuracy > 0.98 for bucket in far), far


def test_recall_is_learned_at_cp_1_and_goes_on_at_cp_4(ranks: GetRanks, trained: dict[str, Any]) -> None:
    """A shard has 32 tokens: all but the nearest answers lie in another rank's."""
    assert trained["before"].accuracy < 0.3
    require_recall(trained["after"])
    results = ranks(4).run(on_ranks_recall.run, 20, trained["weights"], timeout_s=120)
    for result in results:
        assert result["before"].tokens == trained["after"].tokens == 8 * 16 * 32
        assert result["before"].accuracy == pytest.approx(trained["after"].accuracy, abs=1e-3)
        assert result["before"].loss == pytest.approx(trained["after"].loss, rel=1e-4)
        require_recall(result["after"])
    alone = on_ranks_recall.run(20, trained["weights"])
    assert results[0]["losses"] == pytest.approx(alone["losses"], rel=1e-2, abs=1e-4)


def test_a_mask_that_sees_16_tokens_stays_at_chance() -> None:
    """The same model, rows and steps. Answers nearer than 16 tokens are rare, so the whole is chance, too."""
    short = on_ranks_recall.run(STEPS, window=16)["after"]
    assert abs(short.accuracy - TASK.chance) < 0.05
    assert all(abs(bucket.accuracy - TASK.chance) < 0.06 for bucket in short.buckets[1:])


@pytest.mark.slow
def test_recall_is_learned_wholly_at_cp_4(ranks: GetRanks) -> None:
    for result in ranks(4).run(on_ranks_recall.run, STEPS, timeout_s=900):
        require_recall(result["after"])


def test_rows_are_what_they_say() -> None:
    batch, distances = TASK.rows(5)
    again, _ = TASK.rows(5)
    assert torch.equal(batch.tokens, again.tokens)
    assert not torch.equal(batch.tokens, TASK.rows(6)[0].tokens)
    asked = batch.labels != IGNORE
    assert asked.sum() == TASK.batch * TASK.num_questions
    for row, at in asked.nonzero().tolist():
        pair = int(batch.tokens[row, at - distances[row, at]]) - 1 - TASK.num_keys
        key, value = divmod(pair, TASK.num_values)
        assert batch.tokens[row, at] == 1 + key
        assert batch.labels[row, at] == TASK.vocab_size - TASK.num_values + value
        assert (batch.tokens[row] == pair + 1 + TASK.num_keys).sum() == 1
    assert int(batch.tokens.max()) < TASK.vocab_size
    for change in ({"num_pairs": 5}, {"num_values": 1}, {"num_questions": 125}):
        with pytest.raises(ValueError, match="must be at least"):
            RecallTask(seq_len=128, batch=1, **change)


def evaluation_of(seq_len: int, chunk: int = 0) -> Any:
    """On the ranks, or alone: two batches of random rows, in float64."""
    group_mesh = on_ranks_recall.mesh()
    plans = []

    def plan_of(batch: Any) -> flexcp.Plan:
        plans.append(flexcp.plan(masks.causal() & masks.document(batch.doc_ids), seq_len, group_mesh.for_plan))
        return plans[-1]

    batches = [(batch_of(seq_len, 2), None), (batch_of(seq_len, 2, labels_end=50), None)]
    return evaluate(build(TINY, seed=1, dtype=torch.float64), batches, plan_of, group_mesh, [0, 10, 20, 40], chunk)


def test_evaluation_is_the_mean_over_tokens_at_any_group_size(ranks: GetRanks) -> None:
    alone = evaluation_of(300)
    model = build(TINY, seed=1, dtype=torch.float64)
    losses, places = [], []
    for batch in (batch_of(300, 2), batch_of(300, 2, labels_end=50)):
        plan = flexcp.plan(masks.causal() & masks.document(batch.doc_ids), 300, 1)
        with torch.no_grad(), flexcp.context_parallel(plan):
            logits = plan.unshard(
                model(plan.shard(batch.tokens, pad=0), plan.shard(batch.positions, pad=0), plan.block_mask)
            )
        counted = batch.labels != IGNORE
        losses.append(F.cross_entropy(logits[counted], batch.labels[counted], reduction="none"))
        places.append(batch.positions[counted])
    loss, place = torch.cat(losses), torch.cat(places)
    assert alone.loss == pytest.approx(float(loss.mean()), rel=1e-12)
    assert alone.tokens == len(loss)
    for bucket, (first, stop) in zip(alone.buckets, [(0, 10), (10, 20), (20, 40), (40, 300)]):
        inside = (place >= first) & (place < stop)
        assert (bucket.first, bucket.last, bucket.tokens) == (first, stop - 1, int(inside.sum()))
        assert bucket.loss == pytest.approx(float(loss[inside].mean()), rel=1e-12)
    for result in ranks(2).run(evaluation_of, 300):
        assert result.loss == pytest.approx(alone.loss, rel=1e-12)
        assert [b.tokens for b in result.buckets] == [b.tokens for b in alone.buckets]
    by_chunks = evaluation_of(300, chunk=70)
    assert by_chunks.loss == pytest.approx(alone.loss, rel=1e-12)
    assert by_chunks.accuracy == alone.accuracy
    assert bucket_edges(64) == [0]
    assert bucket_edges(65) == [0, 64]


def test_no_label_is_no_number() -> None:
    batch = batch_of(64, 1, labels_end=0)
    result = evaluate(build(TINY, seed=0), [(batch, None)], lambda b: flexcp.plan(masks.causal(), 64, 1))
    assert (result.tokens, math.isnan(result.loss)) == (0, True)
    assert (
        evaluate(build(TINY, seed=0), [(batch, None)], lambda b: flexcp.plan(masks.causal(), 64, 1), chunk=9).tokens
        == 0
    )
    with pytest.raises(ValueError, match="no batch"):
        evaluate(build(TINY, seed=0), [], lambda b: flexcp.plan(masks.causal(), 64, 1))
