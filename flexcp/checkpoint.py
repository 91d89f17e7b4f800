"""Saving a run, whole or not at all, while it goes on: every rank writes its own pieces, rank 0 commits.

A save copies what is this rank's to write into host memory, and a thread does the rest: files into a hidden folder,
flushed to the disk; when all ranks have told rank 0 that theirs are there, the manifest, and the folder is renamed.
Killed at any moment, it leaves the older checkpoints as they were and nothing that looks like a new one.

What replicas hold alike is written once, by whichever of them has the least to write. The threads talk over a group of
their own, so that their messages never come between those of the training.
"""

import json
import math
import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from flexcp.errors import UserError
from flexcp.manifest import MANIFEST, Entry, Manifest, Piece, folder_of, key, read_manifest, remove_unfinished, steps_in
from flexcp.models.durable import sync_folder, write_durably
from flexcp.shards import Box, Encoding, box_of, local_of, parts_of


class Ranks:
    """The processes that save together, and what they tell each other.

    Args:
        size: 1, a process alone; else all processes of the default group, which make this together.
    """

    def __init__(self, size: int = 1) -> None:
        self.size, self.rank, self.group = size, 0, None
        if size > 1:
            # CPU memory, and no traffic of the training's: messages of two threads in one group would mix.
            self.group = dist.new_group(backend="gloo")
            self.rank = dist.get_rank()

    def tell(self, value: Any) -> list[Any]:
        """What every rank has told, in rank order. JSON, so that nothing is ever unpickled."""
        if self.group is None:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([mine.numel()]), group=self.group)
        longest = max(map(int, sizes))
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, torch.cat([mine, mine.new_zeros(longest - mine.numel())]), group=self.group)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in zip(texts, sizes)]

    def close(self) -> None:
        """Lets go of the group; to be called by all."""
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = None


@dataclass
class _Save:
    """A save under way."""

    step: int
    state: dict[str, Any]
    staged: dict[str, Tensor]  # by the name in the file
    seconds: float = 0.0
    problem: BaseException | None = None


class Checkpointer:
    """The checkpoints of a run: `root/step-00000010` and so on. To be used by all ranks alike.

    Args:
        root: a folder that every rank sees; made where it is not there.
        ranks: who saves.
        keep_last: so many of the newest complete ones are kept; 0 keeps all.
        asynchronous: write in a thread; else `save` returns when the checkpoint is there.
    """

    def __init__(self, root: Path, ranks: Ranks, keep_last: int = 3, asynchronous: bool = True) -> None:
        self.root, self.ranks, self.keep_last, self.asynchronous = root, ranks, keep_last, asynchronous
        self._mine: list[str] | None = None
        self._entries: dict[str, Entry] = {}
        self._held: list[Any] = []
        self._under_way: tuple[_Save, threading.Thread] | None = None
        if ranks.rank == 0:
            remove_unfinished(root)

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any], rng: dict[str, Tensor]) -> float:
        """Starts a save, after the one under way has ended.

        Args:
            step: steps done so far.
            tensors: the run's, by name; equal names, dtypes and shapes on all ranks. May change when this returns.
            state: JSON, equal on all ranks.
            rng: of this rank alone, by name.

        Returns:
            Seconds in which the caller was held up.

        Raises:
            UserError: this or the last checkpoint could not be written.
        """
        began = time.perf_counter()
        self.wait()
        locals_ = {name: local_of(tensor) for name, tensor in tensors.items()}
        mine = self._divide(tensors, locals_)
        staged = {key(name, part): t for name in mine for part, t in parts_of(locals_[name])} | rng
        save = _Save(step, state, _on_host(staged))
        thread = threading.Thread(target=self._run, args=(save,), name="flexcp-checkpoint", daemon=True)
        self._under_way = save, thread
        thread.start()
        if not self.asynchronous:
            self.wait()
        return time.perf_counter() - began

    @property
    def failed(self) -> bool:
        """Whether this rank knows that the save under way has failed; `wait` then raises."""
        return self._under_way is not None and self._under_way[0].problem is not None

    def wait(self) -> None:
        """Until the save under way has ended.

        Raises:
            UserError: it has failed; on all ranks alike.
        """
        if self._under_way is not None:
            save, thread = self._under_way
            thread.join()
            self._under_way = None
            if save.problem is not None:
                raise save.problem

    def close(self) -> None:
        """Waits for the last save, and lets go of the group."""
        self.wait()
        self.ranks.close()

    def _divide(self, tensors: dict[str, Tensor], locals_: dict[str, Tensor]) -> list[str]:
        """The tensors whose local part this rank writes; found out together at the first save."""
        held = []
        for name, tensor in tensors.items():
            box, local = box_of(tensor), locals_[name]
            encoding = Encoding.of(local)
            parts = [part for part, _ in parts_of(local)]
            size = sum(t.numel() * t.element_size() for _, t in parts_of(local))
            what = None if encoding is None else [encoding.kind, list(encoding.attributes), parts]
            held.append([name, str(tensor.dtype), list(tensor.shape), list(box.start), list(box.shape), size, what])
        if self._mine is None:
            self._entries, owners = divide(self.ranks.tell(held))
            self._mine = [row[0] for row in held if owners.get((row[0], tuple(row[3]))) == self.ranks.rank]
            self._held = held
        assert held == self._held, "the tensors of a run changed their names, shapes or places between two checkpoints"
        return self._mine

    def _run(self, save: _Save) -> None:
        began = time.perf_counter()
        try:
            self._write(save)
        except BaseException as error:  # told to the training thread by `wait`
            save.problem = error
        save.staged = {}
        save.seconds = time.perf_counter() - began

    def _write(self, save: _Save) -> None:
        folder = folder_of(self.root, save.step)
        temporary = self.root / f".{folder.name}.tmp"
        path = temporary / file_of(self.ranks.rank)
        first = self.ranks.rank == 0
        self._together(save.step, lambda: _fresh(temporary) if first else None)
        sizes = self._together(save.step, lambda: _write_tensors(path, save.staged))
        self._together(save.step, lambda: self._commit(save, temporary, folder, sizes) if first else None)

    def _together(self, step: int, work: Any) -> list[Any]:
        """Does a part of the work on all ranks; what it gave on each, or the same exception on all."""
        problem, result = None, None
        try:
            result = work()
        except OSError as error:
            problem = f"{error.strerror or error}: {error.filename or self.root}"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        outcomes = self.ranks.tell([problem, result])
        problems = [f"rank {rank}: {problem}" for rank, (problem, _) in enumerate(outcomes) if problem]
        if problems:
            raise UserError(
                f"the checkpoint of step {step} could not be written ({'; '.join(problems[:3])}); those before it are "
                "as they were: make room, and go on with --resume auto"
            )
        return [result for _, result in outcomes]

    def _commit(self, save: _Save, temporary: Path, folder: Path, sizes: list[int]) -> None:
        files = {file_of(rank): size for rank, size in enumerate(sizes)}
        for file, size in files.items():
            if not (temporary / file).is_file() or (temporary / file).stat().st_size != size:
                raise OSError(
                    0, "rank 0 does not see it: --out must be a folder that all hosts share", temporary / file
                )
        write_durably(temporary / MANIFEST, Manifest(save.step, save.state, files, self._entries).to_json())
        sync_folder(temporary)
        aside = self.root / f".{folder.name}.old"
        if folder.exists():  # incomplete or damaged, or the run would have gone on from it
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(folder, aside)
        os.rename(temporary, folder)
        sync_folder(self.root)
        shutil.rmtree(aside, ignore_errors=True)
        if self.keep_last:
            self._remove_old()

    def _remove_old(self) -> None:
        complete = []
        for step in steps_in(self.root):
            with suppress(UserError):  # not ours to judge, and not to be counted
                read_manifest(folder_of(self.root, step))
                complete.append(folder_of(self.root, step))
        for folder in complete[self.keep_last :]:
            aside = self.root / f".{folder.name}.old"
            os.rename(folder, aside)  # at once, so that no half of it looks like a checkpoint
            shutil.rmtree(aside, ignore_errors=True)


def file_of(rank: int) -> str:
    """What a rank writes."""
    return f"rank-{rank:05}.safetensors"


def divide(held: list[list[Any]]) -> tuple[dict[str, Entry], dict[tuple[str, tuple[int, ...]], int]]:
    """Who writes what.

    Args:
        held: for each rank and tensor: name, dtype, shape, start and shape of the rank's box, bytes, and of an encoded
            one its kind, attributes and parts.

    Returns:
        The manifest's entries, and the writer of each (name, start).

    Raises:
        UserError: ranks that hold different tensors, or together not the whole of one.
    """
    encoded = {row[0] for rows in held for row in rows if row[6] is not None}  # of small parts some ranks keep floats
    names = [[[row[0], None if row[0] in encoded else row[1], row[2]] for row in rows] for rows in held]
    if any(rank != names[0] for rank in names):
        odd = next(rank for rank, other in enumerate(names) if other != names[0])
        raise UserError(f"rank {odd} holds other tensors than rank 0: a checkpoint needs the same model on all ranks")
    loads = [0] * len(held)
    entries: dict[str, Entry] = {}
    owners: dict[tuple[str, tuple[int, ...]], int] = {}
    for at, (name, dtype, shape, *_) in enumerate(held[0]):
        holders: dict[Box, list[int]] = {}
        for rank, rows in enumerate(held):
            box = Box(tuple(rows[at][3]), tuple(rows[at][4]))
            if box.numel:
                holders.setdefault(box, []).append(rank)
        if sum(box.numel for box in holders) != math.prod(shape):
            raise UserError(f"the ranks hold parts of tensor {name!r} {shape} that do not make up the whole of it")
        pieces = []
        for box, ranks in holders.items():
            owner = min(ranks, key=lambda rank: (loads[rank], rank))
            loads[owner] += held[owner][at][5]
            owners[name, box.start] = owner
            what = held[owner][at][6]
            encoding = None if what is None else Encoding(what[0], tuple(what[1]))
            pieces.append(Piece(file_of(owner), box, encoding, ("",) if what is None else tuple(what[2])))
        entries[name] = Entry(dtype, tuple(shape), tuple(pieces))
    return entries, owners


@torch.no_grad()
def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory that nothing else writes to."""
    copies, devices = {}, set()
    for name, tensor in tensors.items():
        on_gpu = tensor.device.type != "cpu"
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        copies[name] = copy.copy_(tensor, non_blocking=on_gpu)
        devices |= {tensor.device} if on_gpu else set()
    for device in devices:  # the next step overwrites what is being copied
        torch.accelerator.current_stream(device).synchronize()
    return copies


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> int:
    """Writes a file and flushes it to the disk; its size in bytes."""
    save_file(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return path.stat().st_size


def _fresh(folder: Path) -> None:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
