"""Rows over dp, tokens over cp, micro-batches one after the other: the same loss and gradients as one rank at once."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flexcp.batch import Batch
from flexcp.config import TrainConfig
from flexcp.mesh import Degrees
from tests.ranks import Ranks
from tests.train import on_ranks
from tests.train.test_equal import close

GetRanks = Callable[[int], Ranks]
GRIDS = [{"cp": 2, "dp_shard": 2}, {"dp_replicate": 2, "cp": 2}, {"dp_replicate": 2, "dp_shard": 2}]


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
    """Six rows, 3 for each of two dp ranks, in micro-batches of 2 and 1: a partial last window; fewer labels, too."""
    args = (200, 6, "gather", "head_tail", True, labels_end)
    alone = on_ranks.gradients(*args)
    accumulated = on_ranks.gradients(*args, None, 4)
    assert accumulated["loss"] == pytest.approx(alone["loss"], rel=1e-12)
    close(accumulated["grads"], alone["grads"], 1e-11)
    for degrees in GRIDS[: 1 if labels_end else 2]:
        results = ranks(4).run(on_ranks.gradients, *args, degrees, 2)
        assert sum(result["mine"] for result in results) == alone["tokens"]
        for result in results:
            assert result["tokens"] == alone["tokens"]
            assert result["loss"] == pytest.approx(alone["loss"], rel=1e-12)
            close(result["grads"], alone["grads"], 1e-11)


MASKS = """
import torch

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
