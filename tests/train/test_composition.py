"""The table of what is combined with context parallelism: each cell's run is one rank's, over 20 steps.

Gradients parameter by parameter, for a learned bias too, are in test_grid, test_tp, test_activation, test_fp8 and
test_compile.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flexcp.config import TrainConfig
from flexcp.inputs import make_reader, read_inputs
from flexcp.memory import Setup, estimate
from tests.ranks import Ranks
from tests.train import on_ranks

GetRanks = Callable[[int], Ranks]
LAYERS = 2
CP4, CP2_DP2, CP2_TP2 = {"cp": 4}, {"cp": 2, "dp_shard": 2}, {"cp": 2, "tp": 2}
HSDP = {"cp": 2, "dp_replicate": 2}
IN_BACKWARD = {"optim_step": "in_backward", "grad_clip": None}

# The columns of the table; what one rank is run with as well comes second.
CELLS = {
    "CP, whole parameters": ({**CP4, "fsdp": "off"}, {}),
    "CP, FSDP2": (CP4, {}),
    "CP + dp shard": (CP2_DP2, {}),
    "CP + dp replicate": (HSDP, {}),
    "CP + TP": (CP2_TP2, {}),
    "CP + checkpointing": ({**CP4, "ac": "full"}, {}),
    "CP + selective, offload": ({**CP4, "ac": "selective", "offload": "on"}, {}),
    "CP + step in backward": (CP2_DP2, IN_BACKWARD),
    "CP + fp8": (CP4, {"fp8": "rowwise"}),
    "CP + accumulation": ({**CP2_DP2, "grad_accum": 2}, {}),
}
FAST = ("CP + dp replicate",)
TRIPLES = {
    "CP + FSDP2 + TP": ({"cp": 2, "dp_shard": 2, "tp": 2}, {}),
    "CP + HSDP 2 x 2": ({"cp": 2, "dp_shard": 2, "dp_replicate": 2}, {}),
    "CP + FSDP2 + TP + selective + offload + fp8": (
        {"cp": 2, "dp_shard": 2, "tp": 2, "ac": "selective", "offload": "on"},
        {"fp8": "rowwise"},
    ),
    "CP + HSDP + selective + step in backward": (
        {"cp": 2, "dp_shard": 2, "dp_replicate": 2, "ac": "selective"},
        IN_BACKWARD,
    ),
}

# Each with --compile off and on: what was compiled is compared, too. The last is what one rank is run with as well.
COMPILED = {
    "CP + compile": (2, {"cp": 2, "fsdp": "off"}, {}),
    "CP + dp shard + compile": (4, CP2_DP2, {}),
    "CP + dp shard + full + compile": (4, {**CP2_DP2, "ac": "full"}, {}),
    "CP + dp shard + selective + compile": (4, {**CP2_DP2, "ac": "selective"}, {}),
    "CP + TP + selective + offload + compile": (4, {**CP2_TP2, "ac": "selective", "offload": "on"}, {}),
    "CP + fp8 + compile": (2, {"cp": 2}, {"fp8": "rowwise"}),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A small model in a folder, and the licence's text."""
    folder = tmp_path_factory.mktemp("model")
    shape = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96},
        **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu"},
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(shape))
    data = str(Path(__file__).parents[2] / "LICENSE")
    return {"model": str(folder), "data": data, "seq_len": 200, "batch": 4, "steps": 20, "warmup_steps": 2}


@pytest.fixture(scope="module")
def alone(settings: dict) -> Callable[..., list[float]]:
    """The losses of one rank, run once for each set of options."""
    known: dict[str, list[float]] = {}

    def losses(**options) -> list[float]:
        key = repr(options)
        if key not in known:
            known[key] = [r["loss"] for r in on_ranks.train(TrainConfig(**settings, **options))["records"]]
        return known[key]

    return losses


def check(pool: Ranks, settings: dict, alone: Callable, name: str, grid: dict, both: dict) -> None:
    expected = alone(**both)
    assert expected[-1] < expected[0] - 1
    results = pool.run(on_ranks.train, TrainConfig(**settings, **grid, **both), timeout_s=240)
    for result in results:
        losses = [record["loss"] for record in result["records"]]
        worst = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
        # fp8 rounds: what differs in the last bit of fp32 may differ in the last of eight.
        assert worst < (2e-2 if "fp8" in both else 1e-4), name
        assert result["weights"] == results[0]["weights"]
    print(f"{name}: 20 losses within {worst:.1e} of one rank's")


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CELLS])
def test_a_cell_is_one_ranks_run(ranks: GetRanks, settings: dict, alone: Callable, name: str) -> None:
    check(ranks(4), settings, alone, name, *CELLS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIPLES)
def test_three_at_once_are_one_ranks_run(ranks: GetRanks, settings: dict, alone: Callable, name: str) -> None:
    check(ranks(8), settings, alone, name, *TRIPLES[name])


@pytest.fixture
def documents(settings: dict, tmp_path: Path) -> dict:
    """Settings with documents of all lengths, which begin elsewhere in every step."""
    paragraphs = Path(settings["data"]).read_text().split("\n\n")
    data = tmp_path / "paragraphs.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in paragraphs))
    config = TrainConfig(**{**settings, "data": str(data)})
    reader = make_reader(config, read_inputs(config).train)
    steps = [reader.next().doc_ids for _ in range(4)]
    starts = {tuple(map(tuple, ids.diff(dim=1).nonzero().tolist())) for ids in steps}
    assert len(starts) == len(steps)
    return {**settings, "data": str(data)}


def check_compiled(pool: Ranks, settings: dict, name: str, grid: dict, both: dict, compile: str) -> None:
    """Losses are one uncompiled rank's; layers became one graph in the first step, with attention in it as an
    operator, and nothing was compiled again for other documents (`train_compiled`)."""
    expected = [record["loss"] for record in on_ranks.train(TrainConfig(**settings, **both))["records"]]
    off, on = (
        pool.run(on_ranks.train_compiled, TrainConfig(**settings, **grid, **both, compile=value), timeout_s=300)
        for value in ("off", compile)
    )
    for word, results in (("off", off), ("on", on)):
        one = results[0]
        worst = max(abs(x - y) for r in results for x, y in zip(r["losses"], expected, strict=True))
        print(
            f"{name} ({compile}), {word}: {len(expected)} losses within {worst:.1e} of one uncompiled rank's; "
            f"{one['graphs']} graphs, {one['kernels']} kernels; a step takes {one['ms']:.0f} ms and {one['calls']:,} "
            f"calls, of attention's operators {one['attention']}, of rsqrt and silu {one['unfused']}"
        )
        # fp8 rounds: what differs in the last bit of fp32 may differ in the last of eight.
        assert worst < (2e-2 if "fp8" in both else 1e-4), name
    # One call for each layer, whose output is kept but under --ac full.
    calls = [LAYERS * (2 if grid.get("ac") == "full" else 1), LAYERS]
    assert all(r["graphs"] == r["kernels"] == 0 and r["attention"] == [0, 0] for r in off)
    # One graph: the second layer has other data, and no other code.
    assert all(r["graphs"] == 1 and r["attention"] == calls for r in on)
    assert all(r["calls"] < before["calls"] for r, before in zip(on, off))
    for r in on:
        if compile == "on":
            assert r["kernels"] > 0
            assert r["unfused"] == [1, 0]  # the last norm is in no layer
        else:
            assert r["kernels"] == 0
            assert min(r["unfused"]) >= LAYERS


def test_compiled_layers_are_one_uncompiled_ranks_run(ranks: GetRanks, documents: dict) -> None:
    settings = {**documents, "steps": 3}
    check_compiled(ranks(2), settings, "CP + FSDP2 + selective", {"cp": 2, "ac": "selective"}, {}, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_cell_is_one_uncompiled_ranks_run(ranks: GetRanks, documents: dict, name: str) -> None:
    num_ranks, grid, both = COMPILED[name]
    check_compiled(ranks(num_ranks), documents, name, grid, both, "on")


@pytest.mark.slow
def test_a_run_repeats_bit_for_bit(ranks: GetRanks, settings: dict) -> None:
    config = TrainConfig(**{**settings, "steps": 5}, **HSDP, ac="selective")
    first, second = (ranks(4).run(on_ranks.train, config)[0] for _ in range(2))
    assert [r["loss"] for r in first["records"]] == [r["loss"] for r in second["records"]]
    assert first["weights"] == second["weights"]


def test_parameters_and_their_states_are_divided(ranks: GetRanks) -> None:
    """What a rank holds between steps, off and on, counted byte by byte; nearly a quarter of it on each of four."""
    off, on = (max(ranks(4).run(on_ranks.state_bytes, fsdp)) for fsdp in (False, True))
    print(f"parameters and AdamW states of a rank: {off:,} bytes under --fsdp off, {on:,} under --fsdp on")
    assert off == estimate(Setup(on_ranks.TINY, 128, fsdp=False)).items[0].device * 3
    assert off / 4 <= on < 1.1 * off / 4


def test_gradients_are_never_all_there(ranks: GetRanks) -> None:
    """The most bytes of gradients that a rank holds at once: all of them off, and one layer's with the step within."""
    after, within = (max(ranks(2).run(on_ranks.most_gradient_bytes, inside)) for inside in (False, True))
    print(f"gradients of a rank at once: {after:,} bytes under --optim-step after, {within:,} under in_backward")
    assert within < 0.6 * after


@pytest.mark.slow
@pytest.mark.parametrize("ac", ["none", "selective"])
def test_memory_falls_as_cp_grows(ranks: GetRanks, ac: str) -> None:
    """The peak of a step's tensors on a rank, beside the planner's prediction."""
    peaks, predictions = [], []
    for cp in (1, 2, 4):
        peak = max(ranks(cp).run(on_ranks.step_peak_bytes, 2048, ac)) if cp > 1 else on_ranks.step_peak_bytes(2048, ac)
        setup = Setup(on_ranks.MEDIUM, 2048, cp=cp, fsdp=False, ac=ac, comm_groups=1, on_cpu=True)
        parts = {item.name: item.device for item in estimate(setup).items}
        held = sum(size for name, size in parts.items() if name == "parameters" or "optimizer" in name)
        predictions.append(sum(parts.values()) - held)
        peaks.append(peak)
        print(f"--ac {ac} at cp {cp}: {peak:>12,} bytes at the peak of a step, {predictions[-1]:>12,} predicted")
    for larger, smaller in itertools.pairwise(peaks):
        # The reference kernel's tile of scores is as large at any cp: it is most of what is left beside checkpoints.
        assert smaller < (0.75 if ac == "none" else 0.9) * larger
    for peak, predicted in zip(peaks, predictions):
        assert 0.6 < predicted / peak < 1.6
