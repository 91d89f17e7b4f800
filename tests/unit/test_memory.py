"""The memory planner: what it adds up to, beside what a step really takes; what it advises and refuses."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import flexcp
from flexcp import masks, plancli
from flexcp.errors import UserError
from flexcp.leanlayer import Lean, make_lean
from flexcp.loss import chunked_loss
from flexcp.memory import Setup, estimate
from flexcp.memoryadvice import Limits, advise, flags, longest, require_fit
from flexcp.models import Llama3Config, build, get_config
from flexcp.simulate import simulate
from tests.live_memory import LiveMemory

GIB = 2**30
B8 = get_config("llama3-8b")
SMALL = Setup(B8, 1 << 20, cp=8, element_bytes=2, optimizer="adamw8bit", step_in_backward=True)
H200 = Limits(139 * GIB, 120 * GIB)


def test_published_figures() -> None:
    """Those of shared FACTS "Memory": h = 8192 bytes a token of Llama3-8B in bf16."""
    items = {item.name: item.device for item in estimate(replace(SMALL, cp=1, ac="full", chunk=2048)).items}
    assert items["parameters"] == 2 * B8.num_params
    assert items["checkpoints"] == 8192 * (1 << 20) * 32
    assert items["block mask"] == 2**30
    everything = estimate(replace(SMALL, cp=1, chunk=2048))
    kept = next(item.device for item in everything.items if item.name == "activations")
    assert 25 < kept / (8192 * (1 << 20) * 32) < 40
    fp32 = estimate(Setup(B8, 128, chunk=128))
    assert sum(item.device for item in fp32.items[:3]) == 16 * B8.num_params


def test_a_million_tokens_fit_eight_gpus_with_attention_kept() -> None:
    chosen = advise(replace(SMALL, ac="selective"), H200)
    assert chosen.fits
    assert chosen.setup.ac == "selective"
    smaller = advise(replace(SMALL, ac="selective"), Limits(80 * GIB, 120 * GIB))
    assert smaller.fits
    assert smaller.setup.ac == "selective"
    assert smaller.needed.host > 0


def test_options_are_turned_on_only_as_far_as_needed() -> None:
    """The longer, the more; what was asked for stays; without a host nothing is offloaded."""
    found = [advise(replace(SMALL, cp=1, seq_len=length), H200) for length in (4096, 131_072, 393_216, 1_310_720)]
    assert [one.fits for one in found] == [True] * 4
    assert not found[0].setup.lean
    assert found[0].setup.ac == "none"
    assert not found[1].setup.offload
    assert found[2].setup.offload
    assert found[3].setup.every > 1
    assert advise(replace(SMALL, fp8=True, every=2, ac="full"), H200).setup.every == 2
    assert not advise(replace(SMALL, cp=1), Limits(139 * GIB)).setup.offload
    for one in found:
        assert H200.hold(one.needed)


def test_longest_is_the_longest() -> None:
    for setup, limits in ((replace(SMALL, cp=1), H200), (replace(SMALL, cp=8), H200)):
        length, there = longest(setup, limits)
        assert there is not None
        assert there.fits
        assert length > (1_400_000 if setup.cp == 1 else 4_000_000)
        assert not advise(replace(setup, seq_len=length + 128 * 2 * setup.cp), limits).fits
    assert longest(replace(SMALL, cp=1, fsdp=False), Limits(8 * GIB)) == (0, None)


def test_each_option_saves_in_the_estimate() -> None:
    setup = replace(SMALL, ac="selective", cp=1, seq_len=262_144)
    before = estimate(setup).device
    for change in (
        {"chunk": 2048},
        {"tile": 8192},
        {"serial": 8},
        {"offload": True},
        {"ac": "full"},
        {"every": 4, "keep_bytes": 0},
    ):
        setup = replace(setup, **change)
        needed = estimate(setup)
        assert needed.device + needed.host < before + (needed.host if "offload" in change else 0), change
        before = needed.device + needed.host


def test_what_a_cpu_offloads_stays_in_the_same_memory() -> None:
    setup = replace(SMALL, ac="selective", offload=True)
    there, here = estimate(setup), estimate(replace(setup, on_cpu=True))
    assert there.host > 0 == here.host
    kept = {item.name: (item.device, item.host) for item in there.items}["checkpoints"]
    assert {item.name: (item.device, item.host) for item in here.items}["checkpoints"] == (sum(kept), 0)


@pytest.mark.parametrize(("cp", "memory", "more"), [(4, 24 / 4, "it fits from --cp"), (1, 24, "smaller model")])
def test_an_impossible_run_is_told_what_it_needs_and_what_would_fit(cp: int, memory: float, more: str) -> None:
    setup = Setup(B8, 2048, cp=cp, on_cpu=True)
    with pytest.raises(UserError) as caught:
        require_fit("llama3-8b", setup, Limits(int(memory * GIB)), sharing=cp)
    text = str(caught.value)
    assert "llama3-8b with 2,048 tokens needs" in text
    assert f"each of the {cp} rank(s) here has {memory:.2f} GiB" in text
    assert "\n" not in text
    assert more in text or "no options" in text


def test_what_is_near_is_named() -> None:
    setup = replace(SMALL, cp=1, seq_len=131_072)
    with pytest.raises(UserError, match=r"pass --loss-chunk 2048 --ac selective.*, or --memory auto"):
        require_fit("llama3-8b", setup, H200)
    with pytest.raises(UserError, match=r"the longest sequence that fits is --seq-len 1\d{6} with --loss-chunk"):
        require_fit("llama3-8b", replace(setup, seq_len=1 << 23), H200)
    assert flags(setup, replace(setup, tile=64, offload=True)) == "--tile 64 --offload on"


def test_plan_prints_the_memory(capsys) -> None:
    arguments = ["--memory", "--seq-len", "1M", "--cp", "8", "--host-gib", "120"]
    assert plancli.main(arguments) == 0
    out = capsys.readouterr().out
    for words in ("P e / R", "it does not fit", "it fits with --loss-chunk 2048", "longest sequence with options: "):
        assert words in out
    assert plancli.main(arguments[1:]) == 2
    assert "give one of them" in capsys.readouterr().err


CONFIG = Llama3Config(
    vocab_size=500, dim=256, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=1024, head_dim=64, init_std=0.1
)


@pytest.mark.parametrize("lean", [None, Lean(), Lean(tile=128), Lean(tile=128, keep_attention=False, every=2)], ids=str)
def test_prediction_beside_a_real_step(lean: Lean | None) -> None:
    """Through a window that leaves the reference kernel few scores."""
    length = 2048
    model = build(CONFIG, seed=0)
    if lean is not None:
        make_lean(model.layers, lean)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    plan = flexcp.plan(masks.causal() & masks.sliding_window(16), length, 1)
    tokens = torch.randint(500, (1, length))

    def head(x: Tensor, norm: nn.Module, weight: Tensor) -> Tensor:
        return chunked_loss(x, weight, tokens, norm=norm, norm_parameters=list(norm.parameters()), chunk=256)

    with LiveMemory() as memory, flexcp.context_parallel(plan):
        model(tokens, plan.positions, plan.block_mask, head=head).backward()
    options = {"tile": lean.tile, "every": lean.every} if lean else {}
    ac = "none" if lean is None else "selective" if lean.keep_attention else "full"
    setup = Setup(CONFIG, length, step_in_backward=True, chunk=256, ac=ac, **options)
    if lean is not None and not setup.lean:
        setup = replace(setup, tile=length)
    there = {"parameters", "optimizer (adamw)"}
    predicted = sum(item.device for item in estimate(setup).items if item.name not in there)
    print(f"{lean}: {memory.peak_bytes:,} bytes, predicted {predicted:,} ({predicted / memory.peak_bytes - 1:+.1%})")
    assert predicted == pytest.approx(memory.peak_bytes, rel=0.15)


@pytest.mark.parametrize(("comm", "serial"), [("gather", 1), ("gather", 4), ("ring", 4)])
def test_prediction_beside_a_rank_of_four(comm: str, serial: int) -> None:
    """Where keys come from others, with the formula of a GPU, whose kernel holds no scores."""
    config = replace(CONFIG, num_layers=2, num_kv_heads=4, ffn_dim=512)
    length, lean = 4096, Lean(tile=128, head_groups=serial)
    simulate(1, 4, 450.0)
    try:
        model = build(config, seed=0)
        make_lean(model.layers, lean)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        plan = flexcp.plan(masks.sliding_window(16), length, mesh, comm=comm, balance="contiguous", block_size=32)
        tokens = torch.randint(500, (1, plan.local_len))

        def head(x: Tensor, norm: nn.Module, weight: Tensor) -> Tensor:
            return chunked_loss(x, weight, tokens, norm=norm, norm_parameters=list(norm.parameters()), chunk=256)

        with LiveMemory() as memory, flexcp.context_parallel(plan):
            model(tokens, plan.positions, plan.block_mask, head=head).backward()
    finally:
        dist.destroy_process_group()
    given = {"cp": 4, "fsdp": False, "step_in_backward": True, "chunk": 256, "ac": "selective", "comm": comm}
    needed = estimate(Setup(config, length, tile=lean.tile, serial=serial, **given))
    there = {"parameters", "optimizer (adamw)"}
    predicted = sum(item.device for item in needed.items if item.name not in there)
    print(f"{comm} {lean}: {memory.peak_bytes:,} bytes, predicted {predicted / memory.peak_bytes - 1:+.1%}")
    assert 0.95 < predicted / memory.peak_bytes < 1.2
