"""How a run goes on from a checkpoint: which one, whether it fits, and what of the run is in it.

A run's state is its tensors (`state_tensors`), its place in the data (`packing.Reader.state`, which knows nothing of
ranks), the random streams of each rank, and the numbers of steps and tokens. The learning rate and plans follow from
the step and the data.
"""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flexcp.checkpoint import Ranks, file_of
from flexcp.config import TrainConfig
from flexcp.data import Documents
from flexcp.errors import UserError
from flexcp.manifest import MANIFEST, Manifest, folder_of, newest, read_manifest, steps_in
from flexcp.mesh import Degrees
from flexcp.restore import read_tensor

FOLDER = "checkpoints"
# Another value of these is another run: other weights, or other data in the next step.
_SAME = ("dtype", "seed", "seq_len", "batch", "packing", "positions", "long_documents", "optim")
# These change nothing in what is computed, or only in which order it is summed, or are compared by what they lead to.
_FREE = (
    *("model", "init_from", "data", "data_field", "tokenizer", "eval_data", "eval_every", "eval_batches"),
    *("cp", "dp_shard", "dp_replicate", "tp", "pp", "fsdp", "grad_accum", "comm", "balance"),
    *("ac", "offload", "offload_keep", "tile", "head_serial", "checkpoint_every", "loss_chunk", "compile"),
    *("memory", "dry_run", "simulate_rank", "world", "simulate_gb_s"),
    *("out", "config", "resume", "save_every", "save_mode", "keep_last", "log", "log_every", "profile"),
    *("memory_snapshot", "init_on", "save_model", "timeout_s"),
)


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        folder, manifest: of the checkpoint that it goes on from; None: at the first step.
        notes: what the user should know of it, a line each.
    """

    folder: Path | None = None
    manifest: Manifest | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Steps that have been done."""
        return 0 if self.manifest is None else self.manifest.step

    @property
    def state(self) -> dict[str, Any]:
        return {} if self.manifest is None else self.manifest.state

    def restore_random(self, rank: int, grid: Degrees, device: torch.device) -> None:
        """Sets the random streams: this rank's own where the grid of ranks is that of the checkpoint, else rank 0's.

        One stream for all keeps what replicas draw alike.
        """
        assert self.folder is not None
        rank = rank if self.state["grid"] == dataclasses.asdict(grid) else 0
        for name in random_states(device):
            state = read_tensor(self.folder / file_of(rank), name)
            if state is None:  # saved on another kind of device
                continue
            if name == "rng.cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The streams that this rank draws from."""
    states = {"rng.cpu": torch.get_rng_state()}
    return states | ({"rng.cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def begin(config: TrainConfig, documents: Documents, grid: Degrees, ranks: Ranks | None = None) -> Start:
    """Where the run begins, by --resume; a collective where there are ranks, which must all come to the same.

    Raises:
        UserError: no such checkpoint, one that does not fit the run, or ranks that see different ones.
    """
    start, problem = Start(), None
    try:
        start = _begin(config, documents, grid)
    except UserError as error:
        problem = str(error)
    digest = "" if start.folder is None else hashlib.sha256((start.folder / MANIFEST).read_bytes()).hexdigest()
    every = [[problem, start.done, digest]] if ranks is None else ranks.tell([problem, start.done, digest])
    for rank, (other, done, its) in enumerate(every):
        if other is not None:
            raise UserError(other)
        if (done, its) != (every[0][1], every[0][2]):
            raise UserError(
                f"rank {rank} would go on from step {done} and rank 0 from step {every[0][1]}, or they see different "
                f"files of it: --out must be a folder that all hosts share, and that nobody else writes to"
            )
    return start


def _begin(config: TrainConfig, documents: Documents, grid: Degrees) -> Start:
    if config.simulate_rank is not None and (config.save_every or config.resume != "none"):
        raise UserError("--simulate-rank measures one rank without the others: leave out --save-every and --resume")
    root = None if config.out is None else Path(config.out).expanduser() / FOLDER
    if root is None and (config.save_every or config.resume == "auto"):
        flag = "--resume auto" if config.resume == "auto" else f"--save-every {config.save_every}"
        raise UserError(f"{flag} needs --out, the folder where the run's checkpoints are")
    there = [] if root is None else steps_in(root)
    if config.resume == "none":
        if there:
            raise UserError(
                f"--out {config.out} holds checkpoints of an earlier run, the newest of step {there[0]}: --resume auto "
                f"goes on from it; to begin anew, name another --out or remove {root}"
            )
        return Start()
    if config.resume == "auto":
        assert root is not None
        folder, notes = newest(root)
        if folder is None:
            return Start(notes=[*notes, f"no checkpoint in {root}: the run begins at step 1"])
    else:
        folder, notes = _named(Path(config.resume).expanduser())
        foreign = root is not None and folder.resolve().parent != root.resolve()
        if there and (foreign or there[0] > read_manifest(folder).step):
            raise UserError(
                f"--out {config.out} holds other checkpoints, the newest of step {there[0]}, among which those of this "
                f"run would be mixed: name another --out, or remove {root if foreign else folder_of(root, there[0])}"
            )
    manifest = read_manifest(folder)
    changes = require_fit(folder, manifest, config, documents)
    return Start(folder, manifest, [*notes, _told(folder, manifest, config, grid), *changes])


def _named(path: Path) -> tuple[Path, list[str]]:
    """The checkpoint that a path names: itself, or the newest of a run's folder."""
    if not (path / MANIFEST).is_file():
        for root in (path / FOLDER, path):
            folder, notes = newest(root)
            if folder is not None:
                return folder, notes
    if not path.exists():
        raise UserError(f"--resume {path} does not exist: name a checkpoint, a run's folder, auto or none")
    read_manifest(path)
    return path, []


def require_fit(folder: Path, manifest: Manifest, config: TrainConfig, documents: Documents) -> list[str]:
    """Refuses a checkpoint of another run.

    Returns:
        What is different and allowed to be, in words.

    Raises:
        UserError: what differs, with both values.
    """
    state = manifest.state
    if not {"config", "model", "data", "reader", "tokens_seen", "grid"} <= set(state):
        raise UserError(f"{folder} was not written by flexcp.train: name a checkpoint of a run")
    saved, mine = state["config"], dataclasses.asdict(config)
    for name in _SAME:
        if name in mine and saved.get(name, mine[name]) != mine[name]:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{folder} was saved by a run with {flag} {saved[name]}, and this one has {mine[name]}: pass {flag} "
                f"{saved[name]}, or begin a new run"
            )
    model, its = _model_of(config), state["model"]
    for name, value in model.items():
        if name in its and its[name] != value:
            raise UserError(
                f"{folder} holds a model with {name}={its[name]}, and {config.model_name} has {value}: resume with the "
                f"model of the run ({saved.get('model') or saved.get('init_from') or 'the default one'})"
            )
    data = data_of(documents)
    if data["digest"] != state["data"]["digest"]:
        raise UserError(
            f"{folder} was trained on other data ({state['data']['described']}) than this run has "
            f"({data['described']}): a run goes on with the same files, or begins anew"
        )
    if data["tokens"] != state["data"]["tokens"]:
        raise UserError(
            f"{folder} was trained on the same data as other tokens ({state['data']['described']}; now "
            f"{data['described']}): resume with the run's --tokenizer and --data-field"
        )
    if manifest.step > config.steps:
        raise UserError(f"{folder} is of step {manifest.step}, and --steps is {config.steps}: raise --steps")
    told = [name for name in mine if name not in (*_SAME, *_FREE) and saved.get(name, mine[name]) != mine[name]]
    return [f"--{name.replace('_', '-')} is {mine[name]} now, and was {saved[name]}" for name in told]


def _told(folder: Path, manifest: Manifest, config: TrainConfig, grid: Degrees) -> str:
    saved, now = manifest.state["grid"], dataclasses.asdict(grid)
    axes = [axis for axis in now if saved.get(axis, 1) != now[axis]]
    told = [" ".join(f"--{a.replace('_', '-')} {its.get(a, 1)}" for a in axes) for its in (saved, now)]
    where = f"; saved by {told[0]}, now {told[1]}" if axes else ""
    rest = " (nothing is left to train)" if manifest.step == config.steps else ""
    seen = manifest.state["tokens_seen"]
    return f"resumed from {folder}: step {manifest.step} of {config.steps}{rest}, {seen:,} tokens seen{where}"


def state_of(
    config: TrainConfig, documents: Documents, reader: dict[str, Any], tokens_seen: int, grid: Degrees
) -> dict[str, Any]:
    """What a manifest says of a run, as JSON."""
    return {
        "config": dataclasses.asdict(config),
        "model": _model_of(config),
        "data": data_of(documents),
        "reader": reader,
        "tokens_seen": tokens_seen,
        "grid": dataclasses.asdict(grid),
        "torch": str(torch.__version__),
    }


def _model_of(config: TrainConfig) -> dict[str, Any]:
    """The model's shape as JSON gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(config.model_config())))


def data_of(documents: Documents) -> dict[str, Any]:
    """What tells data from other data: a digest of the files, and of the first document's tokens."""
    tokens, _ = documents[0]
    return {
        "digest": documents.digest,
        "tokens": hashlib.blake2b(tokens.tobytes(), digest_size=8).hexdigest(),
        "described": str(documents),
    }
