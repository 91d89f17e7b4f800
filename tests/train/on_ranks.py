"""What the tests of the trainer run in each rank."""

import functools
import time
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flexcp
from flexcp.config import TrainConfig
from flexcp.data import IGNORE, Batch
from flexcp.gradients import clip, local, sum_gradients
from flexcp.mesh import Degrees, Mesh
from flexcp.models import Llama3Config, build
from flexcp.optim import Optimizer, StepInBackward
from flexcp.parallelize import Parallel, parallelize, whole
from flexcp.plans import Plans
from flexcp.step import accumulate, own_rows
from flexcp.train import run
from flexcp.usermask import load_mask
from tests.live_memory import LiveMemory

TINY = Llama3Config(
    vocab_size=60, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=48, head_dim=16, init_std=0.2
)


def mesh(**degrees: int) -> Mesh:
    """The grid of these ranks, all of them along cp where no degrees are given; of one in a process without a group."""
    # Dynamo, which flex_attention runs on every call, looks at q.grad of a q that is no leaf and hides the warning that
    # comes of it, but cannot hide it where warnings are errors.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    if not dist.is_initialized():
        return Mesh(Degrees(), "cpu")
    return _mesh(Degrees(**(degrees or {"cp": dist.get_world_size()})))


@functools.cache  # a process of the pool makes the groups of a grid once
def _mesh(degrees: Degrees) -> Mesh:
    return Mesh(degrees, "cpu")


def batch_of(seq_len: int, rows: int, labels_end: int | None = None) -> Batch:
    """Random rows of a few documents; labels at and past `labels_end` are ignored."""
    generator = torch.Generator().manual_seed(seq_len)
    tokens = torch.randint(TINY.vocab_size, (rows, seq_len + 1), generator=generator)
    # Nine cuts in each row.
    starts = torch.zeros(rows, seq_len, dtype=torch.int64)
    starts.scatter_(1, torch.randint(1, seq_len, (rows, 9), generator=generator), 1)
    doc_ids = starts.cumsum(1)
    place = torch.arange(seq_len).expand(rows, -1)
    first = torch.where(starts.bool(), place, 0).cummax(1).values
    last_of_document = torch.cat([starts[:, 1:], torch.zeros(rows, 1, dtype=torch.int64)], 1).bool()
    labels = tokens[:, 1:].masked_fill(last_of_document, IGNORE)
    if labels_end is not None:
        labels[:, labels_end:] = IGNORE
    return Batch(tokens[:, :-1].contiguous(), labels, place - first, doc_ids)


class BiasedLlama(nn.Module):
    """A Llama whose scores carry a learned bias of the distance, one per head; and what else is asked for."""

    def __init__(self, dtype: torch.dtype, score: str = "bias", compiled: bool = False) -> None:
        super().__init__()
        self.compiled = compiled
        self.change = {
            "bias": lambda s, distance: s,
            "softcap": lambda s, distance: torch.tanh(s / 2) * 2,
            "window": lambda s, distance: torch.where(distance < 40, s, -float("inf")),
        }[score]
        self.llama = build(TINY, seed=1, dtype=dtype)
        self.bias = nn.Parameter(torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(dtype))

    def forward(self, tokens: Tensor, positions: Tensor, block_mask: Any) -> Tensor:
        bias, change = self.bias, self.change

        def score_mod(score, b, h, q_idx, kv_idx):
            return change(score + bias[h, (q_idx - kv_idx).clamp(0, 63)], q_idx - kv_idx)

        # Compiled code takes no function that captures.
        score = flexcp.ScoreMod(score_mod) if self.compiled else score_mod
        return self.llama(tokens, positions, block_mask, score)

    def dense_score(self, scores: Tensor) -> Tensor:
        place = torch.arange(scores.shape[-1])
        return scores + self.bias[:, (place[:, None] - place).clamp(0, 63)]


def plans_for(config: TrainConfig, group_mesh: Mesh) -> Plans:
    return Plans(config, load_mask(config.mask), group_mesh, torch.device("cpu"))


def gradients(
    seq_len: int,
    rows: int,
    comm: str,
    balance: str,
    biased: bool = False,
    labels_end: int | None = None,
    degrees: dict[str, int] | None = None,
    grad_accum: int = 1,
    fsdp: bool = False,
    ac: str = "none",
    fp8: str = "none",
    score: str = "bias",
    tied: bool = False,
    compile_backend: str | None = None,
) -> dict[str, Any]:
    """Loss, label count and summed gradients of one batch in float64, and this rank's own share of labels."""
    grid = mesh(**(degrees or {}))
    config = TrainConfig(cp=grid.degrees.cp, seq_len=seq_len, batch=rows, comm=comm, balance=balance)
    batch = batch_of(seq_len, rows, labels_end)
    shape = replace(TINY, tied_head=tied)
    model = build(shape, seed=1, dtype=torch.float64)
    if biased:
        model = BiasedLlama(torch.float64, score, compile_backend is not None)
    if compile_backend is not None:
        torch._dynamo.reset()
        counters.clear()
    parallelize(model, grid, Parallel(fsdp, ac, fp8=fp8, compile_backend=compile_backend))
    plans = plans_for(config, grid)
    loss, num_labels, _ = accumulate(model, batch, plans, grid, grad_accum)
    sum_gradients(model.parameters(), grid.gradient_group)
    share = own_rows(batch, grid)
    mine = int((plans(share).shard(share.labels, pad=IGNORE) != IGNORE).sum())
    grads, graphs = [whole(p.grad) for p in model.parameters()], counters["aot_autograd"]["total"]
    return {"loss": loss, "tokens": num_labels, "grads": grads, "mine": mine, "graphs": graphs}


def train(config: TrainConfig) -> dict[str, Any]:
    """The records of a run, and the sum of the weights' bytes after it, to compare the ranks."""
    finals: list[float] = []

    def on_step(model: nn.Module, record: Any) -> None:
        if record["step"] == config.steps:
            finals.extend(float(whole(p.detach()).double().sum()) for p in model.parameters())

    degrees = {name: getattr(config, name) for name in ("dp_replicate", "dp_shard", "cp", "tp")}
    records = run(config, mesh(**degrees), on_step=on_step)
    return {"records": records, "weights": finals}


def _callers(event: Any) -> set[str]:
    names = set()
    while (event := event.cpu_parent) is not None:
        names.add(event.name)
    return names


def train_compiled(config: TrainConfig) -> dict[str, Any]:
    """The losses of a run, what was compiled in it, and what the last step called.

    What is compiled again after the first step is an error.
    """
    torch._dynamo.reset()
    counters.clear()
    metrics.reset()
    times: list[float] = []
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)

    def on_step(model: nn.Module, record: Any) -> None:
        torch._dynamo.config.error_on_recompile = config.compile != "off"
        if record["step"] < config.steps:
            times.append(time.perf_counter())
        if record["step"] == config.steps - 1:
            profile.start()

    try:
        degrees = {name: getattr(config, name) for name in ("dp_replicate", "dp_shard", "cp", "tp")}
        records = run(config, mesh(**degrees), on_step=on_step)
    finally:
        torch._dynamo.config.error_on_recompile = False
    profile.stop()
    # What autograd's rule or a mode is given, and calls again, counts once.
    calls = Counter(event.name for event in profile.events() if event.name not in _callers(event))
    return {
        "losses": [record["loss"] for record in records],
        # Not Dynamo's own count, since torch's flex_attention makes a graph for itself in eager code.
        "graphs": counters["aot_autograd"]["total"],
        "kernels": metrics.generated_kernel_count,
        "ms": (times[-1] - times[0]) / (len(times) - 1) * 1e3,
        "attention": [calls[f"flexcp::flex_attention{way}"] for way in ("", "_backward")],
        "calls": calls.total(),
        "unfused": [calls["aten::rsqrt"], calls["aten::silu"]],
    }


def logits_of_two_documents(token: int) -> Tensor:
    """Logits of the whole row, with `token` in the middle of document 1 (indices 0..199); document 2 is 200..299."""
    batch = batch_of(300, 1)
    doc_ids = (torch.arange(300) >= 200).long()[None]
    tokens = batch.tokens.clone()
    tokens[0, 100] = token
    batch = Batch(tokens, batch.labels, torch.arange(300)[None], doc_ids)
    group_mesh = mesh()
    plan = plans_for(TrainConfig(cp=group_mesh.degrees.cp, seq_len=300), group_mesh)(batch)
    model = build(TINY, seed=1)
    with flexcp.context_parallel(plan), torch.no_grad():
        out = model(plan.shard(tokens, pad=0), plan.positions, plan.block_mask)
    return plan.unshard(out, dim=1)


def run_with_other_text_on_rank_1(folder: str) -> str:
    """What the run says where the ranks read different files."""
    path = Path(folder) / f"{min(1, dist.get_rank())}.txt"
    try:
        run(TrainConfig(cp=dist.get_world_size(), seq_len=64, steps=1, data=str(path)), mesh())
    except ValueError as error:
        return str(error)
    return "no error"


def sum_of_gradients(rank_without: int) -> list[Tensor]:
    """Rank r holds gradients of r + 1 in parameters of two dtypes; one rank has none for the first."""
    rank = dist.get_rank()
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))]
    for param in params:
        param.grad = torch.full_like(param, rank + 1)
    if rank == rank_without:
        params[0].grad = None
    sum_gradients(params, dist.group.WORLD)
    return [param.grad for param in params]


def norm_of_mixed_meshes() -> tuple[float, float, str]:
    """The norm of parameters on a 2 x 2 mesh, on each of its axes, and of a plain one; the norm after clipping to 2."""
    grid = mesh(dp_shard=2, tp=2)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    assert grid.sharding is not None
    assert grid.tp is not None
    values = [
        distribute_tensor(torch.arange(30.0, dtype=torch.float64).reshape(5, 6), both, [Shard(0), Shard(1)]),
        distribute_tensor(torch.full((5, 3), 2.0, dtype=torch.float64), grid.sharding, [Shard(0)]),
        distribute_tensor(torch.full((3, 7), 3.0, dtype=torch.float64), both, [Replicate(), Shard(0)]),
        torch.full((12,), 4.0, dtype=torch.float64),
    ]
    params = []
    for value in values:
        params.append(nn.Parameter(torch.zeros_like(value)))
        params[-1].grad = value
    try:
        torch.nn.utils.clip_grad_norm_(params, 1e9)
        torchs = "no error"
    except Exception as error:
        torchs = str(error)
    first = float(clip(params, 2.0))
    return first, float(clip(params, None)), torchs


MEDIUM = Llama3Config(
    vocab_size=256, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_dim=384, head_dim=32, init_std=0.05
)


def state_bytes(fsdp: bool) -> int:
    """Bytes of parameters and moments that this rank holds after a step over cp."""
    grid = mesh()
    model = build(TINY, seed=1)
    parallelize(model, grid, Parallel(fsdp))
    optimizer = Optimizer(model, weight_decay=0.0, group=grid.gradient_group)
    batch = batch_of(256, 1)
    accumulate(model, batch, plans_for(TrainConfig(cp=grid.degrees.cp, seq_len=256), grid), grid)
    optimizer.step()
    states = [x for state in optimizer.inner.state.values() for name, x in state.items() if name != "step"]
    return sum(local(x).nbytes for x in (*model.parameters(), *states))


def most_gradient_bytes(inside: bool) -> int:
    """The most bytes of divided gradients at the moments when one arrives."""
    grid = mesh()
    model = build(TINY, seed=1)
    parallelize(model, grid, Parallel())
    params, most = list(model.parameters()), 0

    def look(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(local(p.grad).nbytes for p in params if p.grad is not None))

    for param in params:
        param.register_post_accumulate_grad_hook(look)
    optimizer = Optimizer(model, weight_decay=0.0, group=grid.gradient_group)
    stepper = StepInBackward(optimizer) if inside else optimizer
    stepper.begin(0, 1e-3)
    accumulate(model, batch_of(256, 1), plans_for(TrainConfig(cp=grid.degrees.cp, seq_len=256), grid), grid)
    stepper.step()
    return most


def step_peak_bytes(seq_len: int, ac: str) -> int:
    """The most bytes of tensors that one forward and backward makes on this rank, gradients included."""
    grid = mesh()
    model = build(MEDIUM, seed=1)
    parallelize(model, grid, Parallel(False, ac))
    plans = plans_for(TrainConfig(cp=grid.degrees.cp, seq_len=seq_len, mask="causal", comm="gather"), grid)
    batch = batch_of(seq_len, 1)
    plans(batch)
    with LiveMemory() as memory:
        accumulate(model, batch, plans, grid)
    return memory.peak_bytes
