"""Long sequences on one GPU, alone or as one rank of eight: peak memory beside the planner's prediction, and seconds.

python scripts/bench_memory.py million [--budget-gib 80]             1,048,576 tokens of Llama3-8B, ranks 0 and 7 of 8
python scripts/bench_memory.py alone                                 393,216 causal tokens on this GPU
python scripts/bench_memory.py documents                             1,441,792 tokens in documents of 32K
python scripts/bench_memory.py curve                                 peak against length, a technique more at a time
python scripts/bench_memory.py cost                                  what they cost in time where none is needed

A step is forward, backward and the optimizer (8-bit AdamW within backward) of a full fine-tuning in bf16, weights and
tokens random. `--layers 2` tries a command out in a fraction of its time; what would not end before `--limit-s` is left
out and said so. Rows are printed as they are measured.
"""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import flexcp
from flexcp import masks
from flexcp.activation import checkpoint_layers
from flexcp.estimate import available_bytes
from flexcp.leanlayer import Lean, make_lean
from flexcp.loss import chunked_loss
from flexcp.memory import Setup, estimate
from flexcp.memoryadvice import Limits, advise, flags
from flexcp.mesh import Degrees, Mesh
from flexcp.models import Llama3, get_config
from flexcp.offload import Store
from flexcp.optim import Optimizer, StepInBackward
from flexcp.parallelize import Parallel, parallelize
from flexcp.simulate import NOT_MEASURED, simulate

GIB = 2**30


@dataclass(frozen=True)
class Common:
    """Of every command.

    Attributes:
        model, layers: the shape; layers 0: all of it.
        limit_s: seconds after which no further measurement begins.
        device, optim: "cuda" and "adamw8bit", but for a trial on a CPU.
        compile: the token-wise parts of a layer go through torch.compile.
        host_gib: of host memory that checkpoints may take; 0: what is free but for 8 GiB.
    """

    model: str = "llama3-8b"
    layers: int = 0
    limit_s: float = 570.0
    device: str = "cuda"
    optim: str = "adamw8bit"
    compile: bool = False
    host_gib: float = 0.0

    def setup(self, seq_len: int, cp: int = 1) -> Setup:
        config = get_config(self.model)
        config = replace(config, num_layers=self.layers or config.num_layers)
        return Setup(
            config,
            seq_len,
            cp=cp,
            element_bytes=2,
            optimizer=self.optim,
            step_in_backward=True,
            comm_groups=config.num_kv_heads,
            on_cpu=self.device == "cpu",
        )

    def limits(self, budget_gib: float = 0.0) -> Limits:
        free = available_bytes(torch.device(self.device))
        host = self.host_gib * GIB or max(0, available_bytes(torch.device("cpu")) - 8 * GIB)
        return Limits(int(min(free, budget_gib * GIB or free)), int(host) if self.device == "cuda" else 0)


class Run:
    """A model on this device, and steps of it."""

    def __init__(self, common: Common, setup: Setup, mesh: Mesh, mask: masks.Mask) -> None:
        self.common, self.setup, self.device = common, setup, torch.device(common.device)
        with torch.device("meta"):
            self.model = Llama3(setup.model).to(torch.bfloat16)
        layers = list(self.model.layers)
        self.store = Store(self.device, keep_bytes=setup.keep_bytes, fp8=setup.fp8) if setup.offload else None
        if setup.lean:
            keep = setup.ac == "selective"
            make_lean(layers, Lean(setup.tile, setup.serial, keep, setup.every), self.store)
        else:
            checkpoint_layers(layers, setup.ac, self.store)
        if common.compile:
            for layer in layers:
                for part in ("before_attention", "after_attention"):
                    setattr(layer, part, torch.compile(getattr(layer, part)))
        parallelize(self.model, mesh, Parallel(fsdp=setup.fsdp))
        self.model.to_empty(device=self.device)
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in self.model.parameters():
                here = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                here.fill_(1.0) if parameter.ndim == 1 else here.normal_(std=0.02)
        optimizer = Optimizer(self.model, common.optim, weight_decay=0.1)
        self.stepper = StepInBackward(optimizer)
        self.plan = flexcp.plan(
            mask, setup.seq_len, mesh.for_plan, balance="head_tail", comm=setup.comm, device=self.device
        )
        self.tokens = torch.randint(setup.model.vocab_size, (1, self.plan.local_len), device=self.device)

    def head(self, x: Tensor, norm: nn.Module, weight: Tensor) -> Tensor:
        more = {"norm": norm, "norm_parameters": list(norm.parameters()), "chunk": self.setup.chunk}
        return chunked_loss(x, weight, self.tokens, divide_by=self.setup.seq_len, **more)

    def step(self, number: int = 0) -> tuple[float, float, float]:
        """(seconds forward, seconds backward with the optimizer, loss)."""
        self.stepper.begin(number, 1e-5)
        _synchronize(self.device)
        began = time.perf_counter()
        with flexcp.context_parallel(self.plan):
            loss = self.model(self.tokens, self.plan.positions, self.plan.block_mask, head=self.head)
            _synchronize(self.device)
            forward = time.perf_counter() - began
            loss.backward()
        _synchronize(self.device)
        self.stepper.step()
        return forward, time.perf_counter() - began - forward, float(loss.detach())

    def warm_up(self) -> float:
        """Compiles everything, on the first layer alone; returns the seconds that a whole step is expected to take."""
        with only(self.model.layers, 1):
            self.step()
            one = sum(self.step()[:2])
        with only(self.model.layers, 0):
            none = sum(self.step()[:2])
        return none + (one - none) * self.setup.model.num_layers


@contextmanager
def only(layers: nn.ModuleList, count: int) -> Iterator[None]:
    """Inside, all layers but the first ones hand their input on."""
    forwards = [layer.forward for layer in layers]
    for layer in list(layers)[count:]:
        layer.forward = lambda x, *rest: x.clone()
    try:
        yield
    finally:
        for layer, forward in zip(layers, forwards):
            layer.forward = forward


def _synchronize(device: torch.device) -> None:
    torch.get_device_module(device).synchronize()


COLUMNS = ("options", "S", "peak GiB", "predicted", "off by", "host GiB", "fwd s", "bwd s", "tokens/s", "loss")
WIDTHS = (46, 9, 8, 9, 7, 8, 7, 7, 9, 7)


def _row(*cells: object) -> None:
    print("  ".join(str(cell).rjust(width) for cell, width in zip(cells, WIDTHS)), flush=True)


def _begin(title: str, device: str) -> None:
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{title} ({name}, torch {torch.__version__})")
    _row(*COLUMNS)


def measure(common: Common, name: str, setup: Setup, mask: masks.Mask, mesh: Mesh, ends: float, steps: int = 1):
    """Prints one row; returns (seconds of the fastest step, peak bytes), or None where there was no time or memory."""
    run = None
    try:
        run = Run(common, setup, mesh, mask)
        expected = run.warm_up() * steps
        if time.perf_counter() + expected > ends:
            _row(name, f"{setup.seq_len:,}", f"left out: {steps} step(s) would take {expected:.0f} s; pass --layers")
            return None
        if common.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = [run.step(number + 1) for number in range(steps)]
        forward, backward, loss = min(taken, key=lambda one: one[0] + one[1])
        peak = torch.cuda.max_memory_allocated() if common.device == "cuda" else 0
        predicted = estimate(setup).device
        seconds = forward + backward
        _row(
            name,
            f"{setup.seq_len:,}",
            f"{peak / GIB:.2f}",
            f"{predicted / GIB:.2f}",
            f"{predicted / peak - 1:+.1%}" if peak else "",
            f"{run.store.host_bytes / GIB:.1f}" if run.store else "",
            f"{forward:.2f}",
            f"{backward:.2f}",
            f"{setup.tokens / seconds:,.0f}",
            f"{loss * setup.cp:.3f}",
        )
        return seconds, peak
    except torch.OutOfMemoryError as error:
        _row(
            name,
            f"{setup.seq_len:,}",
            f"out of memory (predicted {estimate(setup).device / GIB:.1f} GiB): {error}"[:90],
        )
        return None
    finally:
        del run
        gc.collect()
        if common.device == "cuda":
            torch.cuda.empty_cache()


def million(
    common: Common = Common(),
    ranks: tuple[int, ...] = (0, 7),
    world: int = 8,
    seq_len: int = 1 << 20,
    gb_s: float = 450.0,
    budget_gib: float = 0.0,
) -> None:
    """Ranks of many, in turn: a whole step of a sequence that is divided over them, attention not computed twice."""
    ends = time.perf_counter() + common.limit_s
    if common.device == "cuda":  # or DeviceMesh warns, and takes the GPU of this rank's number
        torch.cuda.set_device(0)
    setup = replace(common.setup(seq_len, world), ac="selective")
    chosen = advise(setup, common.limits(budget_gib)).setup
    _begin(f"{common.model}, ranks of {world} at {gb_s:g} GB/s: {flags(setup, chosen)}", common.device)
    for rank in ranks:
        simulate(rank, world, gb_s)
        try:
            mesh = Mesh(Degrees(cp=world), common.device)
            measure(common, f"rank {rank}", chosen, masks.causal(), mesh, ends)
        finally:
            dist.destroy_process_group()
    print(NOT_MEASURED)


def alone(common: Common = Common(), seq_len: int = 393_216, budget_gib: float = 0.0) -> None:
    """The longest causal sequence that one GPU takes in less than ten minutes a step."""
    ends = time.perf_counter() + common.limit_s
    setup = common.setup(seq_len)
    advice = advise(setup, common.limits(budget_gib))
    _begin(f"{common.model} alone, causal: {flags(setup, advice.setup)}", common.device)
    measure(common, advice.name, advice.setup, masks.causal(), Mesh(Degrees(), common.device), ends)


def documents(
    common: Common = Common(), seq_len: int = 44 * 32_768, length: int = 32_768, budget_gib: float = 0.0
) -> None:
    """Packed documents of equal length."""
    ends = time.perf_counter() + common.limit_s
    setup = common.setup(seq_len)
    advice = advise(setup, common.limits(budget_gib))
    _begin(f"{common.model} alone, documents of {length:,}: {flags(setup, advice.setup)}", common.device)
    mask = masks.causal() & masks.document(torch.arange(seq_len) // length)
    measure(common, advice.name, advice.setup, mask, Mesh(Degrees(), common.device), ends)


def techniques(setup: Setup) -> list[tuple[str, Setup]]:
    """One more at a time."""
    chunked = replace(setup, chunk=2048)
    kept = replace(chunked, ac="selective")
    tiled = replace(kept, tile=8192)
    serial = replace(tiled, serial=setup.model.num_kv_heads)
    away = replace(serial, offload=True)
    again = replace(away, ac="full")
    sparse = replace(again, every=4)
    return [
        ("nothing", setup),
        ("+ loss by chunks", chunked),
        ("+ checkpoints, attention kept", kept),
        ("+ tiles", tiled),
        ("+ head groups", serial),
        ("+ offload", away),
        ("+ attention again", again),
        ("+ a checkpoint every 4 layers", sparse),
    ]


def curve(common: Common = Common(), lengths: tuple[int, ...] = (16_384, 32_768, 65_536, 131_072)) -> None:
    """Peak memory against length, a technique more at a time. Pass --layers 8 to keep it short."""
    ends = time.perf_counter() + common.limit_s
    mesh = Mesh(Degrees(), common.device)
    _begin(f"{common.model}, {common.layers or 'all'} layers, causal", common.device)
    for seq_len in lengths:
        for name, setup in techniques(common.setup(seq_len)):
            if time.perf_counter() > ends:
                print("the time is over")
                return
            if estimate(setup).device > common.limits().device:
                _row(name, f"{seq_len:,}", "", f"{estimate(setup).device / GIB:.2f}", "does not fit")
                continue
            measure(common, name, setup, masks.causal(), mesh, ends)


def cost(common: Common = Common(), seq_len: int = 32_768, steps: int = 3) -> None:
    """What each technique costs in time, at a length that needs none. Pass --layers 8."""
    ends = time.perf_counter() + common.limit_s
    mesh = Mesh(Degrees(), common.device)
    _begin(f"{common.model}, {common.layers or 'all'} layers, causal", common.device)
    before: float | None = None
    for name, setup in techniques(common.setup(seq_len)):
        if time.perf_counter() > ends:
            print("the time is over")
            return
        taken = measure(common, name, setup, masks.causal(), mesh, ends, steps)
        if taken is not None:
            print(
                f"{'':46}  {taken[0]:.3f} s a step"
                + (f", {taken[0] / before - 1:+.1%} to the row above" if before else "")
            )
            before = taken[0]


def main(arguments: list[str] | None = None) -> None:
    commands: dict[str, Callable[..., None]] = {}
    for command in (million, alone, documents, curve, cost):
        commands[command.__name__] = command
    tyro.extras.subcommand_cli_from_dict(commands, args=arguments, config=(tyro.conf.OmitArgPrefixes,))


if __name__ == "__main__":
    main()
