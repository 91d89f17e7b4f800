"""flexcp.train: trains a model under context parallelism.

    python -m flexcp.train --model llama3-debug --cp 2 --steps 20

`main` reads the command line, checks all that can be checked, and starts ranks where nobody has (`launch`).
`run` is the training loop of one rank; call it directly from a program that has its ranks already.

Every rank builds the whole batch, takes its rows of it, and holds the same parameters. What a rank computes
is its part of a sum: of the loss, and so of every gradient. The sums over the group, divided by the number of
labels in the whole batch, are what one rank would have computed.
"""

import os
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import flexcp
from flexcp import launch
from flexcp.config import TrainConfig, check, check_world, parse, prepare_out
from flexcp.data import IGNORE, Batch, Documents
from flexcp.errors import UserError
from flexcp.estimate import check_memory
from flexcp.evaluate import Evaluation, evaluate
from flexcp.inputs import Inputs, check_init, make_model, make_reader, read_inputs
from flexcp.metrics import Record, Reporter, peak_memory_bytes
from flexcp.models import CheckpointError, save_pretrained
from flexcp.optim import AdamW, learning_rate, sum_gradients
from flexcp.usermask import MaskSource


def main(argv: list[str] | None = None) -> int:
    """The program. Returns its exit code: 0; 2 after one sentence for a wrong use; else 1 after a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    launch.leave_with_launcher()
    world = None
    try:
        world = launch.World.from_env()
        config = parse(argv)
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
    if world is None and config.cp > 1:
        return launch.launch(argv, config.cp)
    return _rank_main(config, world or launch.World(), inputs)


def check_all(config: TrainConfig, world: launch.World | None) -> Inputs:
    """Everything that can be known to be wrong without a group: values, sizes, memory, data, mask, output
    folder.

    Args:
        world: the ranks that were started; None where they are still to be.

    Raises:
        UserError: what is wrong.
    """
    check(config)
    if world is not None:
        check_world(config, world.size)
    ranks = world or launch.World(0, config.cp, 0, config.cp)
    device = launch.pick_device(ranks)
    tokens = config.batch * config.seq_len
    model = config.model_config()
    if config.init_from is not None:
        check_init(config)
    check_memory(
        config.model_name,
        model,
        config.torch_dtype,
        device,
        config.cp,
        ranks.local_size,
        tokens,
    )
    inputs = read_inputs(config)
    inputs.mask.probe(make_reader(config, inputs.train).next().doc_ids)
    prepare_out(config)
    return inputs


def _rank_main(config: TrainConfig, world: launch.World, inputs: Inputs) -> int:
    """One rank, from the process group to its exit code."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // world.local_size))
    device = launch.pick_device(world)
    mesh = None
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if world.size > 1:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
            mesh = init_device_mesh(device.type, (world.size,), mesh_dim_names=("cp",))
        run(config, mesh, device=device, inputs=inputs, verbose=world.rank == 0)
    except (Exception, KeyboardInterrupt) as error:
        code = launch.report(error, world)
        sys.stdout.flush()
        os._exit(code)  # the group's threads may hang on ranks that are gone
    if mesh is not None:
        dist.destroy_process_group()
    return 0


def run(
    config: TrainConfig,
    mesh: DeviceMesh | None = None,
    *,
    device: torch.device | None = None,
    inputs: Inputs | None = None,
    verbose: bool = False,
    on_step: Callable[[torch.nn.Module, Record], None] | None = None,
) -> list[Record]:
    """Trains, on this rank; to be called on every rank of the group with equal arguments.

    Args:
        config: the settings. `config.cp` must be the size of the mesh.
        mesh: one-dimensional, of config.cp ranks; None for one rank.
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
    check_world(config, 1 if mesh is None else mesh.size())
    inputs = inputs or read_inputs(config)
    mask_source = inputs.mask
    out = prepare_out(config)
    if device is None:
        device = torch.device("cpu" if mesh is None else mesh.device_type)
    rank, group = (0, None) if mesh is None else (mesh.get_local_rank(), mesh.get_group())
    for documents in (inputs.train, inputs.held_out):
        if documents is not None:
            _require_same_data(documents, group, device)

    model_config = config.model_config()
    reader = make_reader(config, inputs.train)
    model = make_model(config, device)
    optimizer = AdamW(model, config.weight_decay)
    if rank == 0 and out is not None:
        (out / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    if verbose:
        print(config.to_yaml(), end="")
        print(f"# data: {inputs.train}")
        print(
            f"# {config.model_name}: {model_config.num_params:,} parameters; {config.cp} x {device.type}",
            flush=True,
        )

    records: list[Record] = []
    plan, plan_varies, tokens_seen = None, mask_source.varies(config.seq_len), 0
    with Reporter(out if rank == 0 else None, config.steps, config.log_every, quiet=not verbose) as reporter:
        for step in range(config.steps):
            began = time.perf_counter()
            batch = reader.next()
            if plan is None or plan_varies:
                plan = make_plan(config, mask_source, batch, mesh, device, plan)

            loss, num_labels = forward_backward(model, batch, plan, group)
            sum_gradients(model.parameters(), group)
            lr = learning_rate(step, config.steps, config.warmup_steps, config.lr)
            grad_norm = optimizer.step(lr, config.grad_clip)
            if not (torch.isfinite(torch.tensor([loss, grad_norm])).all()):
                raise FloatingPointError(
                    f"step {step + 1}: loss {loss}, gradient norm {grad_norm}: the run has diverged; lower --lr "
                    f"(now {config.lr})"
                )

            tokens_seen += num_labels
            step_s = time.perf_counter() - began
            record = Record(
                step=step + 1,
                loss=loss,
                tokens=num_labels,
                tokens_seen=tokens_seen,
                tokens_per_s=num_labels / step_s,
                grad_norm=grad_norm,
                lr=lr,
                memory_bytes=int(_reduced(peak_memory_bytes(device), dist.ReduceOp.MAX, group, device)),
                step_s=step_s,
            )
            records.append(record)
            reporter.add(record)
            if on_step is not None:
                on_step(model, record)
            if inputs.held_out is not None and is_due(step + 1, config):
                plans = lambda batch: make_plan(config, mask_source, batch, mesh, device)  # noqa: E731
                result = held_out_loss(config, model, inputs.held_out, plans, group)
                reporter.add_evaluation(step + 1, result)
    if verbose:
        print(f"# read: {reader.summary()}", flush=True)
    if rank == 0 and out is not None:
        try:
            saved = save_pretrained(model, out / "model", origin=config.origin)
        except CheckpointError as error:
            raise UserError(f"the trained model: {error}") from None
        if verbose:
            print(f"# the model: {saved}", flush=True)
    return records


def is_due(step: int, config: TrainConfig) -> bool:
    """Whether a step, counted from 1, is one after which the held-out loss is taken."""
    return step == config.steps or (config.eval_every > 0 and step % config.eval_every == 0)


def held_out_loss(
    config: TrainConfig,
    model: torch.nn.Module,
    documents: Documents,
    plans: Callable[[Batch], flexcp.Plan],
    group: dist.ProcessGroup | None,
) -> Evaluation:
    """Of the first batches of the held-out documents, the same ones at every call."""
    reader = make_reader(config, documents)
    return evaluate(model, ((reader.next(), None) for _ in range(config.eval_batches)), plans, group)


def make_plan(
    config: TrainConfig,
    source: MaskSource,
    batch: Batch,
    mesh: DeviceMesh | None,
    device: torch.device,
    like: flexcp.Plan | None = None,
) -> flexcp.Plan:
    """The plan of a batch; with the shapes of an earlier one, where there is one.

    Raises:
        UserError: a mask that raises, or that no plan can be made of.
    """
    mask = source.make(batch.doc_ids)
    reads_batch, reads_heads = source.reads(mask)
    try:
        return flexcp.plan(
            mask,
            config.seq_len,
            mesh if mesh is not None else 1,
            batch=config.batch if reads_batch else None,
            heads=config.model_config().num_heads if reads_heads else None,
            balance=config.balance,
            comm=config.comm,
            like=like,
            device=device,
        )
    except Exception as error:
        if source.is_users(error):
            raise source.blame(error) from error
        if isinstance(error, ValueError | TypeError):
            raise UserError(f"--mask {source.text}: {error}") from error
        raise


def forward_backward(
    model: torch.nn.Module, batch: Batch, plan: flexcp.Plan, group: dist.ProcessGroup | None
) -> tuple[float, int]:
    """Adds this rank's part of the gradient of the batch's mean loss to the parameters.

    The mean is over all labels of the batch, wherever they lie: each rank divides the sum over its own labels
    by the count over the group. A rank all of whose labels are ignored contributes 0 and takes part in the
    communication.

    Returns:
        (loss, labels): the mean cross entropy in nats and the number of labels, both of the whole batch.
    """
    device = next(model.parameters()).device
    tokens = plan.shard(batch.tokens.to(device), dim=1, pad=0)
    labels = plan.shard(batch.labels.to(device), dim=1, pad=IGNORE)
    positions = plan.shard(batch.positions.to(device), dim=1, pad=0)
    num_labels = int(_reduced(int((labels != IGNORE).sum()), dist.ReduceOp.SUM, group, device))

    with flexcp.context_parallel(plan):
        logits = model(tokens, positions, block_mask=plan.block_mask)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
        part = total / max(1, num_labels)
        part.backward()
    return _reduced(float(part.detach()), dist.ReduceOp.SUM, group, device), num_labels


def _reduced(value: float, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None, device: torch.device) -> float:
    """A number of each rank, combined over the group in float64, where counts up to 2^53 are exact."""
    if group is None:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op, group=group)
    return tensor.item()


def _require_same_data(documents: Documents, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Ranks that read different files (another host, or a file written just now) would train on nonsense, silently."""
    if group is None:
        return
    mine = torch.tensor([documents.digest], dtype=torch.int64, device=device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    strangers = [rank for rank, digest in enumerate(everyones) if not torch.equal(digest, everyones[0])]
    if strangers:
        raise UserError(
            f"rank(s) {strangers} read other text than rank 0: give --data a folder that is the same for every rank "
            "and that nobody writes to"
        )


if __name__ == "__main__":
    sys.exit(main())
