"""flexcp.train: trains a model under context parallelism.

    python -m flexcp.train --model llama3-debug --cp 2 --steps 20

`main` reads the command line, checks all that can be checked, and starts ranks where nobody has (`launch`).
`run` is the training loop of one rank; call it directly from a program that has its ranks already.

Every rank builds the whole batch and takes its rows of it (dp) and its tokens of those (cp). What it computes is its
part of a sum, of the loss and so of every gradient (`step`), and the sums are what one rank would have computed.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from flexcp import compat, launch, resume
from flexcp.checkpoint import Ranks
from flexcp.checks import check, check_world, prepare_out
from flexcp.commandline import parse
from flexcp.config import TrainConfig
from flexcp.data import Documents
from flexcp.errors import UserError
from flexcp.evaluate import Evaluation, evaluate
from flexcp.fit import check_compiler, check_options, dry_run, require_memory, resolve
from flexcp.inputs import Inputs, check_init, make_model, make_reader, read_inputs, save_model
from flexcp.loggers import names_of, open_sinks
from flexcp.mesh import Degrees, Mesh
from flexcp.meter import Meter, Record
from flexcp.metrics import Reporter
from flexcp.optim import Optimizer, StepInBackward, learning_rate
from flexcp.parallelize import reshard
from flexcp.plans import Plans
from flexcp.profiling import Profiler, steps_of
from flexcp.saves import Saves, restore
from flexcp.simulate import NOT_MEASURED, simulate
from flexcp.step import LossOptions, accumulate, micro_batches, own_rows


def main(argv: list[str] | None = None) -> int:
    """The program. Returns its exit code: 0; 2 after one sentence for a wrong use; else 1 after a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    launch.leave_with_launcher()
    world = None
    try:
        world = launch.World.from_env()
        config = parse(argv)
        check(config)
        if config.simulate_rank is not None:
            world = _simulated(config, world)
        grid, device, local_ranks = _machine(config, world)
        check_options(config, grid)
        if config.dry_run:
            dry_run(config, grid, device, local_ranks)
            return 0
        config = resolve(config, grid, device, local_ranks)
        inputs = check_all(config, world)
    except UserError as error:
        if world is not None and world.local_rank > 0:
            # All ranks of a host see the same command line and files: the first one speaks for them, and must
            # get the time to, because torchrun ends it when another has ended.
            time.sleep(3)
            return 2
        return launch.report(error, None)
    except KeyboardInterrupt as error:
        return launch.report(error, world)
    if world is None and (num_ranks := grid_of(config, None).size) > 1:
        return launch.launch(argv, num_ranks)
    return _rank_main(config, world or launch.World(), inputs)


def grid_of(config: TrainConfig, world: launch.World | None) -> Degrees:
    """The grid of ranks. Where nobody has started any, and an axis is "the rest", there is one for each GPU.

    Raises:
        UserError: as `check_world`.
    """
    rest = -1 in (config.cp, config.dp_shard, config.dp_replicate, config.tp)
    gpus = torch.cuda.device_count() if world is None and rest else 0
    return check_world(config, world.size if world is not None else gpus or None)


def _machine(config: TrainConfig, world: launch.World | None) -> tuple[Degrees, torch.device, int]:
    """The grid, this rank's device, and the ranks of this host."""
    grid = grid_of(config, world)
    ranks = world or launch.World(0, grid.size, 0, grid.size)
    return grid, launch.pick_device(ranks), ranks.local_size


def _simulated(config: TrainConfig, world: launch.World | None) -> launch.World:
    """The place of the one rank that is there."""
    if world is not None:
        raise UserError(
            "--simulate-rank is one process that plays all ranks, and ranks have been started: start it alone"
        )
    assert config.simulate_rank is not None
    return launch.World(config.simulate_rank, config.world)


def check_all(config: TrainConfig, world: launch.World | None) -> Inputs:
    """Everything that can be known to be wrong without a group: values, sizes, memory, data, mask, output
    folder.

    Args:
        world: the ranks that were started; None where they are still to be.

    Raises:
        UserError: what is wrong.
    """
    check(config)
    grid, device, local_ranks = _machine(config, world)
    check_options(config, grid)
    check_compiler(config, device)
    if config.init_from is not None:
        check_init(config)
    require_memory(config, grid, device, local_ranks)
    inputs = read_inputs(config)
    inputs.mask.probe(make_reader(config, inputs.train).next().doc_ids)
    if config.memory_snapshot and device.type != "cuda":
        raise UserError("--memory-snapshot shows the memory of a GPU, and this run is on a CPU: leave it out")
    prepare_out(config)
    resume.begin(config, inputs.train, grid)
    return inputs


def _rank_main(config: TrainConfig, world: launch.World, inputs: Inputs) -> int:
    """One rank, from the process group to its exit code."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // world.local_size))
    device = launch.pick_device(world)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if config.simulate_rank is not None:
            simulate(world.rank, world.size, config.simulate_gb_s)
        elif world.size > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        mesh = Mesh(grid_of(config, world), device.type)
        if config.timeout_s and world.size > 1 and config.simulate_rank is None:
            compat.set_timeouts(config.timeout_s)
        run(config, mesh, device=device, inputs=inputs, verbose=world.rank == 0 or config.simulate_rank is not None)
        if config.simulate_rank is not None:
            print(f"# {NOT_MEASURED}", flush=True)
    except (Exception, KeyboardInterrupt) as error:
        code = launch.report(error, world)
        sys.stdout.flush()
        os._exit(code)  # the group's threads may hang on ranks that are gone
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def run(
    config: TrainConfig,
    mesh: Mesh | None = None,
    *,
    device: torch.device | None = None,
    inputs: Inputs | None = None,
    verbose: bool = False,
    on_step: Callable[[torch.nn.Module, Record], None] | None = None,
) -> list[Record]:
    """Trains, on this rank; to be called on every rank of the group with equal arguments.

    Args:
        config: the settings.
        mesh: the grid of the ranks, as the config says it; None for one rank.
        device: where to train; the mesh's device type, else the CPU.
        inputs: the corpus and the mask, where they have been read already.
        verbose: show config and progress. Rank 0 alone writes the files of `config.out`.
        on_step: called with the model and the record after each step.

    Returns:
        One record a step, the same on every rank but for times.

    Raises:
        UserError: a setting, file or mask that cannot be used.
        FloatingPointError: the loss or the gradient is no longer finite.
    """
    check(config)
    mesh = mesh or Mesh(check_world(config, 1), "cpu" if device is None else device.type)
    check_world(config, mesh.degrees.size)
    inputs = inputs or read_inputs(config)
    out = prepare_out(config)
    device = device or mesh.default_device()
    for documents in (inputs.train, inputs.held_out):
        if documents is not None:
            _require_same_data(documents, mesh, device)

    ranks = Ranks(mesh.degrees.size) if config.save_every or config.resume != "none" else None
    start = resume.begin(config, inputs.train, mesh.degrees, ranks)
    model_config = config.model_config()
    reader = make_reader(config, inputs.train, start.state.get("reader"))
    model = make_model(config, mesh, device)
    optimizer = Optimizer(
        model, config.optim, weight_decay=config.weight_decay, group=mesh.gradient_group, seed=config.seed
    )
    if start.done:
        restore(start, model, optimizer, mesh, device)
    stepper = StepInBackward(optimizer) if config.optim_step == "in_backward" else optimizer
    if mesh.rank == 0 and out is not None:
        (out / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    if verbose:
        print(config.to_yaml(), end="")
        print(f"# data: {inputs.train}")
        print(
            f"# {config.model_name}: {model_config.num_params:,} parameters; {mesh.degrees.size} x {device.type}",
            flush=True,
        )
        for note in start.notes:
            print(f"# {note}", flush=True)

    records: list[Record] = []
    loss_options = LossOptions(config.loss_chunk, config.z_loss)
    plans = Plans(config, inputs.mask, mesh, device)
    if start.done:  # plans have the shapes of the run's first one
        plans(micro_batches(make_reader(config, inputs.train).next(), mesh, config.grad_accum)[0])
    meter = Meter(config, mesh, device, plans, start.state.get("tokens_seen", 0))
    saves = Saves(config, out, ranks, mesh)
    profiler = Profiler(out, mesh.rank, steps_of(config.profile), config.memory_snapshot)
    files = out if mesh.rank == 0 else None
    sinks = open_sinks(names_of(config.log), out, dataclasses.asdict(config)) if mesh.rank == 0 else []
    with Reporter(files, config.steps, config.log_every, not verbose, start.done, sinks) as reporter:
        for step in range(start.done, config.steps):
            profiler.begin(step + 1)
            batch = meter.next(reader)
            lr = learning_rate(step, config.steps, config.warmup_steps, config.lr)
            stepper.begin(step, lr)
            loss = accumulate(model, batch, meter, mesh, config.grad_accum, loss_options)
            grad_norm = stepper.step(config.grad_clip)
            if not (torch.isfinite(torch.tensor([loss.loss, grad_norm])).all()):
                raise FloatingPointError(
                    f"step {step + 1}: loss {loss.loss}, gradient norm {grad_norm}: the run has diverged; lower --lr "
                    f"(now {config.lr})"
                )
            record = meter.record(step + 1, loss, grad_norm, lr, saves.held_up_s, saves.failed)
            records.append(record)
            reporter.add(record)
            if on_step is not None:
                on_step(model, record)
            if inputs.held_out is not None and is_due(step + 1, config):
                result = held_out_loss(config, model, inputs.held_out, plans, mesh)
                reporter.add_evaluation(step + 1, result)
            profiler.end(step + 1)
            saves.after(step + 1, model, optimizer, reader, inputs.train, meter)
        profiler.close()
    if verbose:
        print(f"# read: {reader.summary()}", flush=True)
        for path in profiler.written:
            print(f"# of this rank: {path}", flush=True)
    if out is not None and config.save_model == "on":
        save_model(config, model, mesh, out / "model")
        if verbose:
            print(f"# the model: {out / 'model'}", flush=True)
    saves.close()
    return records


def is_due(step: int, config: TrainConfig) -> bool:
    """Whether a step, counted from 1, is one after which the held-out loss is taken."""
    return step == config.steps or (config.eval_every > 0 and step % config.eval_every == 0)


def held_out_loss(
    config: TrainConfig,
    model: torch.nn.Module,
    documents: Documents,
    plans: Plans,
    mesh: Mesh,
) -> Evaluation:
    """Of the first batches of the held-out documents, the same ones at every call."""
    reader = make_reader(config, documents)
    batches = (own_rows(reader.next(), mesh) for _ in range(config.eval_batches))
    result = evaluate(model, ((batch, None) for batch in batches), plans, mesh, chunk=config.loss_chunk)
    reshard(model)
    return result


def _require_same_data(documents: Documents, mesh: Mesh, device: torch.device) -> None:
    """Ranks that read different files (another host, or a file written just now) would train on nonsense, silently."""
    if mesh.degrees.size == 1:
        return
    mine = torch.tensor([documents.digest], dtype=torch.int64, device=device)
    everyones = [torch.empty_like(mine) for _ in range(mesh.degrees.size)]
    dist.all_gather(everyones, mine)
    strangers = [rank for rank, digest in enumerate(everyones) if not torch.equal(digest, everyones[0])]
    if strangers:
        raise UserError(
            f"rank(s) {strangers} read other text than rank 0: give --data a folder that is the same for every rank "
            "and that nobody writes to"
        )


if __name__ == "__main__":
    sys.exit(main())
