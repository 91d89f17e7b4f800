"""The trainer's options for long sequences: losses stay, wrong combinations are refused, a dry run runs nothing."""

import dataclasses
import re

import pytest
import torch

from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.fit import check_options, limits_of, require_memory, resolve, setup_of
from flexcp.memory import estimate
from flexcp.memoryadvice import Limits
from flexcp.mesh import Degrees
from flexcp.train import main, run
from tests.train.on_ranks import train

SIMULATED = ["--simulate-rank", "1", "--world", "2", "--cp", "2", "--seq-len", "256", "--steps", "2"]
SIMULATED += ["--ac", "selective", "--tile", "64"]
BASE = TrainConfig(seq_len=256, steps=3, ac="selective")
OPTIONS = [
    {"loss_chunk": 50},
    {"tile": 100},
    {"head_serial": 2, "checkpoint_every": 2, "offload": "on"},
    {"ac": "full", "tile": 64, "head_serial": 2, "loss_chunk": 100, "offload": "on", "offload_keep": 0.0001},
]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return [record["loss"] for record in run(dataclasses.replace(BASE, ac="none"))]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_losses_stay(options: dict, plain: list[float]) -> None:
    losses = [record["loss"] for record in run(dataclasses.replace(BASE, **options))]
    assert losses == pytest.approx(plain, rel=1e-5)


def test_losses_stay_on_two_ranks(ranks, plain: list[float]) -> None:
    config = dataclasses.replace(BASE, cp=2, **OPTIONS[3])
    for outcome in ranks(2).run(train, config):
        assert [record["loss"] for record in outcome["records"]] == pytest.approx(plain, rel=1e-4)


def test_only_an_unchecked_run_is_begun_without_enough_memory() -> None:
    config = TrainConfig(model="llama3-8b", seq_len=1 << 20)
    with pytest.raises(UserError, match="llama3-8b with 1,048,576 tokens needs"):
        require_memory(config, Degrees(), torch.device("cpu"), 1)
    require_memory(dataclasses.replace(config, memory="unchecked"), Degrees(), torch.device("cpu"), 1)


def test_z_loss_is_added(plain: list[float]) -> None:
    losses = [record["loss"] for record in run(dataclasses.replace(BASE, z_loss=0.1))]
    assert losses[0] > plain[0] + 1  # 0.1 ln(256)^2 = 3.07


@pytest.mark.parametrize(
    ("options", "degrees", "words"),
    [
        ({"ac": "none", "tile": 64}, Degrees(), "--ac none keeps all: add --ac selective"),
        ({"tile": 64, "tp": 2}, Degrees(tp=2), "--tile needs whole parameters, and --tp 2 divides them"),
        ({"loss_chunk": 64, "tp": 2}, Degrees(tp=2), "--loss-chunk needs whole parameters"),
        ({"head_serial": 3}, Degrees(), "--head-serial 3 does not divide the 2 KV heads of llama3-debug"),
        ({"head_serial": 2, "fp8": "rowwise"}, Degrees(), "--head-serial needs plain projections"),
        ({"tile": 40, "fp8": "rowwise"}, Degrees(), "make it a multiple of 16"),
        ({"checkpoint_every": 3}, Degrees(), "--checkpoint-every 3 is more than the 2 layers"),
        ({"offload_keep": 1.0}, Degrees(), "add --offload on"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(options: dict, degrees: Degrees, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_options(dataclasses.replace(BASE, **options), degrees)


def test_a_dry_run_prints_and_allocates_nothing(capsys, monkeypatch) -> None:
    monkeypatch.setattr("flexcp.train._rank_main", lambda *args: pytest.fail("a dry run runs"))
    assert main(["--model", "llama3-8b", "--cp", "4", "--dry-run", "--seq-len", "131072", "--dtype", "bfloat16"]) == 0
    out = capsys.readouterr().out
    for words in ("parameters", "P e / R", "sum", "for each rank", "longest sequence with options"):
        assert words in out


def test_an_impossible_run_ends_at_once(capsys) -> None:
    assert main(["--model", "llama3-405b", "--cp", "2"]) == 2
    error = capsys.readouterr().err
    assert len(error.strip().splitlines()) == 1
    assert "llama3-405b with 2,048 tokens needs" in error


def test_memory_auto_turns_on_what_is_needed(monkeypatch, plain: list[float]) -> None:
    cpu = torch.device("cpu")
    config = dataclasses.replace(BASE, ac="none", memory="auto")
    assert resolve(config, Degrees(), cpu, 1) == config
    there = setup_of(dataclasses.replace(config, seq_len=2048), Degrees(), cpu)
    small = Limits(int(estimate(there).device * 0.9))
    monkeypatch.setattr("flexcp.fit.limits_of", lambda *args, **kwargs: small)
    chosen = resolve(dataclasses.replace(config, seq_len=2048), Degrees(), cpu, 1)
    assert chosen.loss_chunk > 0
    losses = [record["loss"] for record in run(dataclasses.replace(chosen, seq_len=256))]
    assert losses == pytest.approx(plain, rel=1e-5)
    with pytest.raises(UserError, match=r"needs .* and each of the 1 rank"):
        resolve(dataclasses.replace(config, seq_len=1 << 24), Degrees(), cpu, 1)


def test_offload_fits_on_a_cpu(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("flexcp.train._rank_main", lambda *args: 0)
    assert main(["--ac", "selective", "--offload", "on", "--seq-len", "512"]) == 0


def test_one_rank_of_many_trains_alone(capsys) -> None:
    code = main(SIMULATED)
    out = capsys.readouterr().out
    assert code == 0
    assert "step 2/2" in out
    assert "not measured: waiting for slower ranks" in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--simulate-rank 9 --world 8", "--simulate-rank is 9, and must be 0 to 7, one of the --world 8 ranks"),
        ("--simulate-rank 8 --cp 8", "--simulate-rank is 8, and must be 0 to 7"),
        ("--simulate-rank -1", "--simulate-rank is -1, and must be 0 to 7"),
        (
            "--simulate-rank 1 --world 4 --cp 2",
            "one of --world 4 ranks, and .* --cp 2 --tp 1 is a grid of 2: make the two equal",
        ),
        ("--simulate-rank 1 --cp 8 --simulate-gb-s 0", "--simulate-gb-s is 0.0, and must be more than 0"),
        ("--simulate-rank 1 --cp 8 --out x", "its weights mean nothing: leave out --out"),
    ],
)
def test_ranks_that_cannot_be_simulated(options: str, words: str, capsys) -> None:
    assert main(options.split()) == 2
    error = capsys.readouterr().err
    assert re.search(words, error)
    assert len(error.splitlines()) == 1


def test_limits_are_shared_by_the_ranks_of_a_host() -> None:
    cpu = torch.device("cpu")
    assert limits_of(cpu, 4, whole=True).device * 4 <= limits_of(cpu, 1, whole=True).device
