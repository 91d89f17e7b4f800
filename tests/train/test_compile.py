"""--compile: the gradients of uncompiled layers, parameter by parameter; held-out losses; what is refused.

Losses over 20 steps, and what was compiled for them, are cells of test_composition.
"""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import flexcp
from flexcp import masks
from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.fit import check_options
from flexcp.leanlayer import Lean
from flexcp.mesh import Degrees
from flexcp.models import build
from flexcp.offload import Store
from flexcp.parallelize import Parallel, parallelize
from flexcp.train import main, run
from tests.ranks import Ranks
from tests.train import on_ranks
from tests.train.test_equal import close

GetRanks = Callable[[int], Ranks]
CP2_TP2 = {"cp": 2, "tp": 2}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo, of itself


def check_gradients(pool: Ranks, backend: str, degrees: dict, fsdp: bool, ac: str, biased: bool) -> None:
    """Against one rank without --compile, in float64."""
    args: tuple[Any, ...] = (200, 4, "gather", "head_tail", biased, None)
    rest = ("none", "bias", False)
    alone = on_ranks.gradients(*args, None, 1, False, "none", *rest)
    for result in pool.run(on_ranks.gradients, *args, degrees, 1, fsdp, ac, *rest, backend, timeout_s=180):
        assert result["graphs"] == 1
        assert result["loss"] == pytest.approx(alone["loss"], rel=1e-12)
        assert len(result["grads"]) == len(alone["grads"])
        close(result["grads"], alone["grads"], 1e-11)


def test_gradients_of_compiled_layers(ranks: GetRanks) -> None:
    """Of a learned bias of the scores, too."""
    check_gradients(ranks(2), "aot_eager", {"cp": 2}, fsdp=True, ac="selective", biased=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degrees", "fsdp", "ac", "biased"),
    [
        ({"cp": 2}, False, "none", True),
        ({"cp": 2, "dp_shard": 2}, True, "full", True),
        ({"cp": 2, "dp_shard": 2}, True, "selective", True),
        (CP2_TP2, True, "selective", False),
    ],
    ids=str,
)
def test_gradients_of_layers_that_inductor_compiled(
    ranks: GetRanks, degrees: dict, fsdp: bool, ac: str, biased: bool
) -> None:
    check_gradients(ranks(4 if len(degrees) > 1 else 2), "inductor", degrees, fsdp, ac, biased)


@pytest.mark.parametrize("ac", ["full", pytest.param("selective", marks=pytest.mark.slow)])
def test_inputs_of_compiled_layers_are_offloaded(ac: str) -> None:
    """As many bytes as those of uncompiled ones, with the same gradients."""
    moved, gradients = [], []
    plan = flexcp.plan(masks.causal(), 128, 1)
    tokens = torch.arange(128)[None] % on_ranks.TINY.vocab_size
    for backend in (None, "aot_eager"):
        torch._dynamo.reset()
        model = build(on_ranks.TINY, seed=0)
        store = Store("cpu")
        parallelize(model, on_ranks.mesh(), Parallel(False, ac, store, compile_backend=backend))
        with flexcp.context_parallel(plan):
            model(tokens, plan.positions, plan.block_mask).logsumexp(-1).mean().backward()
        moved.append((store.host_bytes, store.moved_bytes))
        gradients.append([param.grad for param in model.parameters()])
    assert moved[1] == moved[0]
    assert moved[0][0] == on_ranks.TINY.num_layers * tokens.numel() * on_ranks.TINY.dim * 4
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
def test_held_out_losses_and_micro_batches_of_unequal_rows(tmp_path: Path) -> None:
    license = str(Path(__file__).parents[2] / "LICENSE")
    base = TrainConfig(seq_len=128, batch=3, grad_accum=2, steps=2, data=license, eval_data=license, eval_batches=1)
    losses, held_out = [], []
    for value in ("off", "aot_eager"):
        torch._dynamo.reset()
        counters.clear()
        out = tmp_path / value
        losses.append([record["loss"] for record in run(dataclasses.replace(base, compile=value, out=str(out)))])
        held_out.append(json.loads((out / "eval.jsonl").read_text())["loss"])
        assert (counters["aot_autograd"]["total"] > 0) == (value != "off")
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tile": 64}, "--compile makes each layer one graph, and --tile runs autograd in its middle: leave one"),
        ({"head_serial": 2}, "and --head-serial runs"),
        ({"checkpoint_every": 2, "memory": "auto"}, r"--checkpoint-every \(by --memory auto\) runs"),
    ],
)
def test_lean_layers_are_refused(options: dict, words: str) -> None:
    config = TrainConfig(ac="selective", compile="aot_eager", **options)
    with pytest.raises(UserError, match=words):
        check_options(config, Degrees())
    check_options(dataclasses.replace(config, compile="off"), Degrees())


def test_parallelize_refuses_lean_layers() -> None:
    model = build(on_ranks.TINY, seed=0)
    with pytest.raises(ValueError, match="lean layers run autograd in their middle"):
        parallelize(model, on_ranks.mesh(), Parallel(lean=Lean(tile=64), compile_backend="aot_eager"))


def test_a_missing_compiler_is_said_before_the_run(monkeypatch, capsys) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("flexcp.train._rank_main", lambda *args: 0)
    assert main(["--compile", "on"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert "--compile on needs a C++ compiler on a CPU, and no-such-compiler is not found: install g++" in error
    assert main(["--compile", "aot_eager"]) == 0  # which needs none
    assert main(["--compile", "yes"]) == 2
    assert "unknown compile 'yes' (known: off, on, aot_eager)" in capsys.readouterr().err
