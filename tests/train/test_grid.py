"""Rows over dp, tokens over cp, micro-batches one after the other: the same loss and gradients as one rank at once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexcp.batch import Batch
from flexcp.config import TrainConfig
from flexcp.mesh import Degrees
from tests.ranks import Ranks
from tests.train import on_ranks
from tests.train.test_equal import close

GetRanks = Callable[[int], Ranks]
CASES = [
    ({"cp": 2, "dp_shard": 2}, True),
    ({"cp": 2, "dp_replicate": 2}, True),
    ({"cp": 2, "dp_replicate": 2}, False),
    ({"dp_replicate": 4}, True),  # nothing to divide
]


def test_rows_are_split_without_loss() -> None:
    columns = [torch.arange(10).reshape(5, 2) + 100 * n for n in range(4)]
    pieces = Batch(*columns).split(2)
    assert [(piece.first_row, piece.num_rows) for piece in pieces] == [(0, 2), (2, 2), (4, 1)]
    assert torch.equal(torch.cat([piece.doc_ids for piece in pieces]), columns[3])
    assert pieces[2].rows(0, 1).first_row == 4


def test_the_grid_counts_its_ranks() -> None:
    grid = Degrees(dp_replicate=2, dp_shard=3, cp=5, tp=7)
    assert (grid.size, grid.dp, grid.fsdp) == (210, 6, 15)


@pytest.mark.parametrize("labels_end", [None, 100])
def test_gradients_do_not_depend_on_the_grid(ranks: GetRanks, labels_end: int | None) -> None:
    """Parameters whole on every rank, under FSDP2, and under HSDP; a learned bias of the scores among them.

    Twelve rows, 6 or 3 for each dp rank, in micro-batches of which the last is smaller; fewer labels, too.
    """
    args = (200, 12, "gather", "head_tail", True, labels_end)
    alone = on_ranks.gradients(*args)
    accumulated = on_ranks.gradients(*args, None, 5)
    assert accumulated["loss"] == pytest.approx(alone["loss"], rel=1e-12)
    close(accumulated["grads"], alone["grads"], 1e-11)
    for degrees, fsdp in CASES[: 1 if labels_end else None]:
        results = ranks(4).run(on_ranks.gradients, *args, degrees, 2, fsdp)
        assert sum(result["mine"] for result in results) == alone["tokens"]
        for result in results:
            assert result["tokens"] == alone["tokens"]
            assert result["loss"] == pytest.approx(alone["loss"], rel=1e-12)
            close(result["grads"], alone["grads"], 1e-11)


@pytest.mark.parametrize("score", [pytest.param("softcap", marks=pytest.mark.slow), "window"])
def test_scores_under_every_checkpointing_on_every_grid(ranks: GetRanks, score: str) -> None:
    """A softcap, and a window of -inf, on top of a learned bias: under FSDP2 over cp, and under HSDP."""
    args = (200, 4, "gather", "head_tail", True, None)
    alone = on_ranks.gradients(*args, None, 1, False, "none", "none", score)
    assert alone["loss"] != on_ranks.gradients(*args)["loss"]
    for degrees in ({"cp": 2, "dp_shard": 2}, {"cp": 2, "dp_replicate": 2}):
        for ac in ("none", "full", "selective"):
            for result in ranks(4).run(on_ranks.gradients, *args, degrees, 1, True, ac, "none", score):
                assert result["loss"] == pytest.approx(alone["loss"], rel=1e-12)
                close(result["grads"], alone["grads"], 1e-11)


MASKS = """
import torch
from safetensors.torch import load_file

def by_row(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 16 * (b + 1))

def packed(doc_ids):
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (doc_ids[b, q_idx] == doc_ids[b, kv_idx])

def whole(seq_len):
    from torch.nn.attention.flex_attention import create_block_mask
    return create_block_mask(lambda b, h, q, kv: q - kv < 50 + b, 4, None, seq_len, seq_len, device="cpu")
"""


def test_a_mask_reads_the_same_row_wherever_the_row_is(ranks: GetRanks, tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(MASKS)
    settings = {"seq_len": 150, "batch": 4, "steps": 2}
    for name in ("by_row", "packed"):
        config = dict(settings, mask=f"{tmp_path}/m.py:{name}")
        alone = on_ranks.train(TrainConfig(**config))["records"]
        both = ranks(2).run(on_ranks.train, TrainConfig(dp_shard=2, grad_accum=2, **config))[1]["records"]
        assert [r["loss"] for r in both] == pytest.approx([r["loss"] for r in alone], rel=1e-5)
    with pytest.raises(ValueError, match="is made for 4 rows, and a micro-batch of a rank has 2"):
        on_ranks.train(TrainConfig(grad_accum=2, mask=f"{tmp_path}/m.py:whole", **settings))


def test_no_token_is_counted_twice(ranks: GetRanks, tmp_path: Path) -> None:
    """5 steps of 32 x 2048 tokens at dp 2 x cp 2, in micro-batches: 327,680 of one endless document."""
    shape = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 16},
        **{"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 16},
        **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu"},
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "text.txt").write_text("A token is counted where it is learned, and once. " * 8000)
    settings = {"model": str(tmp_path), "data": str(tmp_path / "text.txt"), "mask": "sliding_window(32) & causal"}
    config = TrainConfig(cp=2, dp_shard=2, batch=32, grad_accum=3, steps=5, seq_len=2048, **settings)
    for result in ranks(4).run(on_ranks.train, config):
        assert result["records"][-1]["tokens_seen"] == 327_680
        assert {record["tokens"] for record in result["records"]} == {32 * 2048}


def test_divided_parameters_begin_and_end_as_whole_ones(ranks: GetRanks, tmp_path: Path) -> None:
    """Random weights, three steps, the saved folder, weights from that folder, another step: as one rank does it."""
    settings = {"seq_len": 200, "batch": 2, "steps": 3, "warmup_steps": 1}
    alone = on_ranks.train(TrainConfig(out=str(tmp_path / "one"), **settings))["records"]
    grid = {"cp": 2, "dp_shard": 2}
    both = ranks(4).run(on_ranks.train, TrainConfig(out=str(tmp_path / "four"), **grid, **settings))
    assert [r["loss"] for r in both[3]["records"]] == pytest.approx([r["loss"] for r in alone], rel=1e-5)
    saved = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "four")]
    assert saved[0].keys() == saved[1].keys()
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=1e-3, atol=1e-4, msg=name)
    again = dict(settings, steps=1, init_from=str(tmp_path / "four" / "model"))
    (expected,) = on_ranks.train(TrainConfig(**again))["records"]
    for result in ranks(4).run(on_ranks.train, TrainConfig(**grid, **again)):
        assert result["records"][0]["loss"] == pytest.approx(expected["loss"], rel=1e-6)
