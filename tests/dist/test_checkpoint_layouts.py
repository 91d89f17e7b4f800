"""What one set of ranks has saved, any other reads: model and optimizer, whatever the mesh and the placements."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexcp.manifest import newest, read_manifest
from tests.dist import on_ranks_checkpoint as on
from tests.ranks import Ranks

GetRanks = Callable[[int], Ranks]

PLAIN: dict[str, int] = {}
FOUR = [PLAIN, {"shard": 4}, {"replicate": 2, "shard": 2}, {"tp": 4}, {"shard": 2, "tp": 2}]
TWO = [PLAIN, {"shard": 2}, {"tp": 2}]


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(got[name], tensor), name


def test_every_layout_reads_every_other(ranks: GetRanks, tmp_path: Path) -> None:
    """fp32 and AdamW: bit for bit, from 4 ranks to 4, 2 and 1."""
    for number, layout in enumerate(FOUR):
        root = str(tmp_path / str(number))
        saved = ranks(4).run(on.save, root, layout, "adamw")
        for rank in saved[1:]:
            same(rank, saved[0])
        for other in FOUR:
            same(ranks(4).run(on.load, root, other, "adamw")[3], saved[0])
        for other in TWO:
            same(ranks(2).run(on.load, root, other, "adamw")[1], saved[0])
        same(on.load(root, PLAIN, "adamw"), saved[0])


def test_replicas_are_written_once(ranks: GetRanks, tmp_path: Path) -> None:
    ranks(4).run(on.save, str(tmp_path), {"replicate": 2, "shard": 2}, "adamw")
    folder, _ = newest(tmp_path)
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    values = sum(p.numel() for p in on.Net().parameters()) * 3 * 4
    assert values < written < 1.1 * values + 4 * 2048  # headers
    sizes = read_manifest(folder).files
    assert len(sizes) == 4
    assert max(sizes.values()) < 1.5 * min(sizes.values())


@pytest.mark.parametrize(
    ("kind", "dtype", "layout"),
    [("adamw", "float32", {"shard": 2}), ("8bit", "float32", {"shard": 2}), ("8bit+sr", "bfloat16", PLAIN)],
)
def test_the_same_layout_goes_on_bit_for_bit(
    ranks: GetRanks, tmp_path: Path, kind: str, dtype: str, layout: dict[str, int]
) -> None:
    straight = ranks(2).run(on.save_and_go_on, str(tmp_path), layout, kind, dtype)
    resumed = ranks(2).run(on.load, str(tmp_path), layout, kind, dtype, 2)
    same(resumed[0], straight[0])
    if kind != "adamw":  # two matrices, two moments, a piece of each on every rank that divides them
        kinds = [p.encoding and p.encoding.kind for e in _entries(tmp_path) for p in e.pieces]
        assert kinds.count("OptimState8bit") == 4 * layout.get("shard", 1)


def _entries(root: Path) -> list:
    return list(read_manifest(newest(root)[0]).tensors.values())


def test_8_bit_states_under_another_layout(ranks: GetRanks, tmp_path: Path) -> None:
    """Their blocks are cut anew, so states are near and weights the same; 4 ranks keep small shards as floats."""
    saved = ranks(2).run(on.save, str(tmp_path), {"shard": 2}, "8bit")[0]
    for size, layout in ((4, {"shard": 4}), (2, PLAIN), (2, {"tp": 2})):
        got = ranks(size).run(on.load, str(tmp_path), layout, "8bit")[0]
        for name, tensor in saved.items():
            if "exp_avg" in name:
                assert (got[name] - tensor).abs().max() <= 0.02 * tensor.abs().max(), name
            else:
                assert torch.equal(got[name], tensor), name


def test_what_one_rank_cannot_write_all_ranks_are_told(ranks: GetRanks, tmp_path: Path) -> None:
    for words in ranks(2).run(on.save_where_one_rank_cannot, str(tmp_path)):
        assert "step 5 could not be written (rank 1: No space left on device: rank-00001.safetensors)" in words
    assert newest(tmp_path) == (None, [])
