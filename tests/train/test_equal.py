"""Any group size trains the same model: loss, token count and gradients equal one rank's and a dense reference's."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flexcp.config import TrainConfig
from flexcp.models import build
from flexcp.usermask import load_mask
from tests.ranks import Ranks
from tests.train import on_ranks, reference

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # on_ranks.py

GetRanks = Callable[[int], Ranks]
COMMS = ("gather", "ring")


def close(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize(
    ("seq_len", "rows", "biased"),
    [
        (1000, 1, True),
        (384, 2, False),
        pytest.param(1000, 1, False, marks=pytest.mark.slow),
        pytest.param(384, 2, True, marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_the_dense_reference(ranks: GetRanks, seq_len: int, rows: int, biased: bool) -> None:
    """S=1000 is padded on 2 and 4 ranks; with a learned bias, too, whose gradient each rank holds a part of."""
    batch = on_ranks.batch_of(seq_len, rows)
    visible = reference.causal_documents(batch.doc_ids)
    if biased:
        model = on_ranks.BiasedLlama(torch.float64)
        loss, grads = reference.loss_and_gradients(model, batch, visible, model.dense_score)
    else:
        model = build(on_ranks.TINY, seed=1, dtype=torch.float64)
        loss, grads = reference.loss_and_gradients(model, batch, visible)
    count = int((batch.labels != -100).sum())
    cases = [(1, "gather", "contiguous"), (2, "gather", "head_tail"), (2, "ring", "contiguous")]
    cases += [(4, "gather", "contiguous"), (4, "ring", "head_tail"), (4, "ulysses+ring", "head_tail")]
    for cp, comm, balance in cases:
        args = (seq_len, rows, comm, balance, biased)
        results = [on_ranks.gradients(*args)] if cp == 1 else ranks(cp).run(on_ranks.gradients, *args)
        assert sum(result["mine"] for result in results) == count
        for result in results:
            assert result["tokens"] == count
            assert result["loss"] == pytest.approx(loss, rel=1e-12)
            close(result["grads"], grads, 1e-11)


def test_a_rank_without_labels_gives_no_nan(ranks: GetRanks) -> None:
    """Labels only in the first half of the row: the second rank of two, contiguous, has none."""
    alone = on_ranks.gradients(512, 1, "gather", "contiguous", False, 250)
    for comm in COMMS:
        first, second = ranks(2).run(on_ranks.gradients, 512, 1, comm, "contiguous", False, 250)
        assert second["mine"] == 0 < first["mine"]
        for result in (first, second):
            assert result["loss"] == pytest.approx(alone["loss"], rel=1e-12)
            close(result["grads"], alone["grads"], 1e-11)


def test_no_labels_at_all_is_a_loss_of_0(ranks: GetRanks) -> None:
    for result in ranks(2).run(on_ranks.gradients, 256, 1, "ring", "contiguous", False, 0):
        assert (result["loss"], result["tokens"]) == (0.0, 0)
        assert all(not grad.any() for grad in result["grads"])


def test_loss_curves_agree(ranks: GetRanks, tmp_path: Path) -> None:
    """fp32, padded rows, two rows a step, documents that go on over steps: 1e-4 over the run; and the loss falls."""
    (tmp_path / "text").mkdir()
    for number, part in enumerate((Path(__file__).parents[2] / "LICENSE").read_text().split("\n\n")):
        if part.strip():
            (tmp_path / "text" / f"{number:03}.txt").write_text(part)
    settings = {"seq_len": 300, "batch": 2, "steps": 5, "data": str(tmp_path / "text"), "warmup_steps": 2}
    alone = on_ranks.train(TrainConfig(**settings))["records"]
    assert alone[-1]["loss"] < alone[0]["loss"] - 0.5
    assert [record["step"] for record in alone] == [1, 2, 3, 4, 5]
    assert [r["tokens_seen"] for r in alone] == [sum(r["tokens"] for r in alone[: n + 1]) for n in range(5)]
    assert all(560 < record["tokens"] <= 600 for record in alone)
    for cp in (2, 4):
        for comm in COMMS:
            results = ranks(cp).run(on_ranks.train, TrainConfig(cp=cp, comm=comm, **settings))
            for result in results:
                assert result["weights"] == results[0]["weights"]  # bit for bit on all ranks
                for got, expected in zip(result["records"], alone, strict=True):
                    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4)
                    assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-2)
                    for name in ("step", "tokens", "tokens_seen", "lr"):
                        assert got[name] == expected[name]


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes_train(ranks: GetRanks, dtype: str) -> None:
    settings = {"seq_len": 300, "steps": 4, "dtype": dtype, "warmup_steps": 1}
    alone = on_ranks.train(TrainConfig(**settings))["records"]
    both = ranks(2).run(on_ranks.train, TrainConfig(cp=2, **settings))[1]["records"]
    assert alone[-1]["loss"] < alone[0]["loss"]
    for got, expected in zip(both, alone, strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-10 if dtype == "float64" else 0.02)


MASKS = """
import torch

SEEN = 40

def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < (h + 1) * SEEN)

def packed(doc_ids):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (doc_ids[b, q_idx] == doc_ids[b, kv_idx])
"""


def test_masks_of_the_users(ranks: GetRanks, tmp_path: Path) -> None:
    """A plain mask_mod that reads the head, and a factory over the batch's documents, of two rows."""
    (tmp_path / "m.py").write_text(MASKS)
    settings = {"seq_len": 260, "batch": 2, "steps": 3}
    for name in ("window", "packed"):
        config = dict(settings, mask=f"{tmp_path}/m.py:{name}")
        alone = on_ranks.train(TrainConfig(**config))["records"]
        for comm in COMMS:
            both = ranks(2).run(on_ranks.train, TrainConfig(cp=2, comm=comm, **config))[0]["records"]
            assert [r["loss"] for r in both] == pytest.approx([r["loss"] for r in alone], rel=1e-4)
        if name == "packed":
            library = on_ranks.train(TrainConfig(**settings))["records"]
            assert [r["loss"] for r in alone] == pytest.approx([r["loss"] for r in library], rel=1e-5)


def test_a_token_of_document_1_changes_nothing_in_document_2(ranks: GetRanks) -> None:
    one, other = (ranks(2).run(on_ranks.logits_of_two_documents, token)[0] for token in (3, 4))
    assert torch.equal(one[:, 200:], other[:, 200:])
    assert torch.equal(one[:, :100], other[:, :100])
    assert not torch.equal(one[:, 100:200], other[:, 100:200])


def test_ranks_that_read_other_text_are_stopped(ranks: GetRanks, tmp_path: Path) -> None:
    (tmp_path / "0.txt").write_text("one text " * 30)
    (tmp_path / "1.txt").write_text("two text " * 30)
    for words in ranks(2).run(on_ranks.run_with_other_text_on_rank_1, str(tmp_path)):
        assert "rank(s) [1] read other text than rank 0" in words


def test_a_diverging_run_is_stopped(ranks: GetRanks) -> None:
    with pytest.raises(FloatingPointError, match="lower --lr"):
        on_ranks.train(TrainConfig(seq_len=64, steps=6, lr=1e30, warmup_steps=0, grad_clip=None))


def test_a_constant_mask_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import flexcp

    made = []
    original = flexcp.plan
    monkeypatch.setattr(flexcp, "plan", lambda *args, **kwargs: made.append(1) or original(*args, **kwargs))
    on_ranks.train(TrainConfig(seq_len=64, steps=3, mask="causal"))
    assert len(made) == 1
    on_ranks.train(TrainConfig(seq_len=64, steps=3))
    assert len(made) == 4
    assert not load_mask("causal").varies(64)
