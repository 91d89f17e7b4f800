"""A run on a GPU is saved, goes on, and is measured: pinned copies, CUDA's random stream, events, MFU, a snapshot."""

import json
from pathlib import Path

import pytest
import torch

from flexcp.config import TrainConfig
from flexcp.train import run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(("dtype", "optim"), [("float32", "adamw"), ("bfloat16", "adamw8bit")])
def test_a_run_on_a_gpu_goes_on(tmp_path: Path, dtype: str, optim: str) -> None:
    """Not bit for bit: torch adds up the embedding's gradient in any order there."""
    device = torch.device("cuda", 0)
    more = {"seq_len": 512, "batch": 2, "save_every": 4, "dtype": dtype, "optim": optim}
    straight = run(TrainConfig(steps=8, out=str(tmp_path / "a"), **more), device=device)
    out = str(tmp_path / "b")
    files = {"profile": "2:3", "memory_snapshot": 2}
    first = run(TrainConfig(steps=8, out=out, **more, **files), device=device)
    for path in (tmp_path / "b" / "checkpoints" / "step-00000008").iterdir():  # as if killed before it was there
        path.unlink()
    resumed = run(TrainConfig(steps=8, out=out, resume="auto", **more), device=device)
    assert [record["step"] for record in resumed] == [5, 6, 7, 8]
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    for record, expected in zip(resumed, straight[4:]):
        assert record["loss"] == pytest.approx(expected["loss"], rel=tolerance)
        assert record["tokens_seen"] == expected["tokens_seen"]
    if "H200" in torch.cuda.get_device_name():
        assert all(0 < record["mfu"] <= record["mfu_full"] < 1 for record in first)
    events = json.loads((tmp_path / "b" / "profile" / "rank-0.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert (tmp_path / "b" / "memory" / "rank-0.pickle").stat().st_size > 10_000
