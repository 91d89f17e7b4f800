"""Heads and columns over tp, tokens over cp, rows over dp, parameters over dp_shard x cp: the gradients of one rank."""

from collections.abc import Callable
from pathlib import Path

import pytest

from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.mesh import Degrees, Mesh
from tests.ranks import Ranks
from tests.train import on_ranks
from tests.train.test_equal import close

GetRanks = Callable[[int], Ranks]


def check(ranks: Ranks, degrees: dict[str, int], fsdp: bool, ac: str = "none", tied: bool = False) -> None:
    args, rest = (200, 4, "gather", "head_tail", False, None), ("none", "bias", tied)
    alone = on_ranks.gradients(*args, None, 1, False, "none", *rest)
    for result in ranks.run(on_ranks.gradients, *args, degrees, 1, fsdp, ac, *rest):
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-12)
        assert len(result["grads"]) == len(alone["grads"])
        close(result["grads"], alone["grads"], 1e-11)


def test_tp_inside_cp(ranks: GetRanks) -> None:
    check(ranks(4), {"cp": 2, "tp": 2}, fsdp=True, ac="selective")


@pytest.mark.slow
def test_tp_inside_cp_with_whole_parameters(ranks: GetRanks) -> None:
    check(ranks(4), {"cp": 2, "tp": 2}, fsdp=False)


@pytest.mark.slow
def test_a_head_that_is_the_embedding(ranks: GetRanks) -> None:
    check(ranks(4), {"cp": 2, "tp": 2}, fsdp=True, tied=True)


def test_tp_inside_dp(ranks: GetRanks) -> None:
    check(ranks(4), {"dp_replicate": 2, "tp": 2}, fsdp=False, ac="full")


@pytest.mark.slow
@pytest.mark.parametrize("ac", ["none", "full", "selective"])
@pytest.mark.parametrize("dp", ["dp_shard", "dp_replicate"])
def test_cp_dp_and_tp(ranks: GetRanks, dp: str, ac: str) -> None:
    check(ranks(8), {"cp": 2, dp: 2, "tp": 2}, fsdp=True, ac=ac)


MASKS = """
from torch.nn.attention.flex_attention import create_block_mask

def by_head(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 9 * (h + 1) * (b + 1))

def blocks(seq_len):
    return create_block_mask(by_head, 1, 4, seq_len, seq_len, device="cpu")
"""


def test_a_mask_reads_the_same_head_wherever_the_head_is(ranks: GetRanks, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MASKS)
    settings = {"seq_len": 150, "batch": 2, "steps": 2}
    config = dict(settings, mask=f"{tmp_path}/m.py:by_head")
    alone = on_ranks.train(TrainConfig(**config))["records"]
    for result in ranks(4).run(on_ranks.train, TrainConfig(cp=2, tp=2, **config)):
        assert [r["loss"] for r in result["records"]] == pytest.approx([r["loss"] for r in alone], rel=1e-5)


def test_a_mask_whose_heads_cannot_be_divided_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MASKS)
    mesh = Mesh(Degrees(), "cpu")
    mesh.degrees = Degrees(tp=2)  # refused before any rank is asked
    for name, balance in (("blocks", "auto"), ("by_head", "affinity")):
        config = TrainConfig(seq_len=150, tp=2, mask=f"{tmp_path}/m.py:{name}", balance=balance)
        with pytest.raises(UserError, match="tells heads apart, and --tp 2 divides them: write it as a function"):
            on_ranks.plans_for(config, mesh)(on_ranks.batch_of(150, 1))


def test_a_run_with_tp_saves_what_one_rank_saves(ranks: GetRanks, tmp_path: Path) -> None:
    """Its loss curve, its held-out loss, and weights that one rank goes on with."""
    settings = {"seq_len": 150, "batch": 2, "steps": 3, "eval_data": str(Path(__file__).parents[2] / "LICENSE")}
    alone = on_ranks.train(TrainConfig(out=str(tmp_path / "one"), **settings))["records"]
    grid = {"cp": 2, "tp": 2}
    for result in ranks(4).run(on_ranks.train, TrainConfig(out=str(tmp_path / "four"), **grid, **settings)):
        assert [r["loss"] for r in result["records"]] == pytest.approx([r["loss"] for r in alone], rel=1e-5)
        assert [r["grad_norm"] for r in result["records"]] == pytest.approx([r["grad_norm"] for r in alone], rel=1e-3)
    evaluations = [(tmp_path / name / "eval.jsonl").read_text() for name in ("one", "four")]
    losses = [float(text.split('"loss": ')[1].split(",")[0]) for text in evaluations]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    again = dict(settings, steps=1, eval_data=None)
    first, second = (
        on_ranks.train(TrainConfig(init_from=str(tmp_path / name / "model"), **again))["records"][0]["loss"]
        for name in ("one", "four")
    )
    assert second == pytest.approx(first, rel=1e-4)
