"""A checkpoint is there whole or not at all, and comes back bit for bit; what does not fit is refused."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flexcp.checkpoint as checkpoint
from flexcp.checkpoint import Checkpointer, Ranks, divide
from flexcp.errors import UserError
from flexcp.manifest import MANIFEST, newest, read_manifest, steps_in
from flexcp.restore import fill, read_tensor
from flexcp.shards import Box

RNG = {"rng.cpu": torch.arange(5, dtype=torch.uint8)}


def some(step: int) -> dict[str, Tensor]:
    """Tensors of every kind that a run has, with values of the step."""
    generator = torch.Generator().manual_seed(step)
    wide = torch.randn(6, 4, generator=generator)
    return {
        "model.a": wide,
        "model.bf16": torch.randn(7, generator=generator).bfloat16(),
        "model.strided": torch.randn(4, 3, generator=generator).T,
        "optimizer.step": torch.tensor(float(step)),
        "optimizer.wide": torch.randn(3, generator=generator, dtype=torch.float64),
    }


def saver(root: Path, keep_last: int = 0, asynchronous: bool = False) -> Checkpointer:
    return Checkpointer(root, Ranks(), keep_last, asynchronous)


def loaded(folder: Path) -> dict[str, Tensor]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in some(0).items()}
    fill(folder, read_manifest(folder), tensors)
    return tensors


def assert_is(folder: Path, step: int) -> None:
    manifest = read_manifest(folder)
    assert (manifest.step, manifest.state) == (step, {"seen": step})
    for name, tensor in loaded(folder).items():
        assert torch.equal(tensor, some(step)[name]), name


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    saver(tmp_path).save(3, some(3), {"seen": 3}, RNG)
    folder, passed = newest(tmp_path)
    assert folder is not None
    assert not passed
    assert_is(folder, 3)
    assert torch.equal(read_tensor(folder / "rank-00000.safetensors", "rng.cpu"), RNG["rng.cpu"])
    assert not list(tmp_path.glob(".*"))


def test_a_save_has_the_values_of_its_moment(tmp_path: Path) -> None:
    tensors = some(1)
    with_thread = saver(tmp_path, asynchronous=True)
    with_thread.save(1, tensors, {"seen": 1}, RNG)
    for tensor in tensors.values():
        tensor.fill_(99)
    with_thread.close()
    assert_is(tmp_path / "step-00000001", 1)


def test_only_the_last_are_kept_and_strangers_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()  # no manifest: not ours to remove
    (tmp_path / "notes").mkdir()
    with_limit = saver(tmp_path, keep_last=2, asynchronous=True)
    for step in range(2, 7):
        with_limit.save(step, some(step), {"seen": step}, RNG)
    with_limit.close()
    assert steps_in(tmp_path) == [6, 5, 1]
    assert (tmp_path / "notes").is_dir()


def _die_at(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends the process by SIGKILL before the n-th of the system calls that a save is made of."""
    left = [call]

    def dying(function):
        def called(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return called

    for owner, names in ((os, ("fsync", "rename", "open")), (checkpoint, ("save_file", "write_durably"))):
        for name in names:
            monkeypatch.setattr(owner, name, dying(getattr(owner, name)))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", dying(checkpoint.shutil.rmtree))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # the child only saves
def test_a_save_killed_at_any_moment_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 3 replaces step 1 (keep_last=2): killed before each call, the newest complete one is step 2 or step 3."""
    found = []
    for call in range(1, 100):
        root = tmp_path / str(call)
        for step in (1, 2):
            saver(root).save(step, some(step), {"seen": step}, RNG)
        child = os.fork()
        if child == 0:
            _die_at(call, monkeypatch)
            Checkpointer(root, Ranks(), 2, asynchronous=False).save(3, some(3), {"seen": 3}, RNG)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        folder, passed = newest(root)
        assert folder is not None
        assert not passed
        assert_is(folder, read_manifest(folder).step)
        found.append(read_manifest(folder).step)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        saver(root, keep_last=2).save(4, some(4), {"seen": 4}, RNG)  # and the next save works, and cleans up
        assert_is(root / "step-00000004", 4)
        assert not list(root.glob(".*"))
    assert found == sorted(found)
    assert {2, 3} == set(found)
    assert len(found) > 12


def test_a_failed_save_is_told_at_the_next_step_and_harms_nothing(tmp_path: Path) -> None:
    with_thread = saver(tmp_path, asynchronous=True)
    with_thread.save(1, some(1), {"seen": 1}, RNG)
    with_thread.wait()
    (tmp_path / ".step-00000002.tmp").write_text("in the way")
    with_thread.save(2, some(2), {"seen": 2}, RNG)
    with pytest.raises(UserError, match=r"step 2 could not be written \(rank 0: File exists: .*go on with --resume"):
        with_thread.wait()
    assert not with_thread.failed
    assert_is(tmp_path / "step-00000001", 1)
    (tmp_path / ".step-00000002.tmp").unlink()
    with_thread.save(3, some(3), {"seen": 3}, RNG)
    with_thread.close()
    assert_is(tmp_path / "step-00000003", 3)


def test_a_damaged_checkpoint_is_passed_over_with_a_sentence(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saver(tmp_path).save(step, some(step), {"seen": step}, RNG)
    (tmp_path / "step-00000004" / MANIFEST).unlink()
    file = tmp_path / "step-00000003" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    (tmp_path / "step-00000002" / MANIFEST).write_text("{")
    folder, passed = newest(tmp_path)
    assert folder == tmp_path / "step-00000001"
    assert ["no checkpoint.json" in passed[0], "were written" in passed[1], "is damaged" in passed[2]] == [True] * 3


def broken(change: str, fields: dict) -> None:
    entry = fields["tensors"]["model.a"]
    if change == "piece outside":
        entry["pieces"][0]["start"] = [1, 0]
    elif change == "piece missing":
        entry["pieces"].clear()
    elif change == "path":
        fields["files"]["../x.safetensors"] = 1
    elif change == "version":
        fields["format"] = 2
    elif change == "no step":
        del fields["step"]
    elif change == "not a list":
        entry["shape"] = 5


@pytest.mark.parametrize("change", ["piece outside", "piece missing", "path", "version", "no step", "not a list"])
def test_a_changed_manifest_is_refused(tmp_path: Path, change: str) -> None:
    saver(tmp_path).save(1, some(1), {}, RNG)
    path = tmp_path / "step-00000001" / MANIFEST
    fields = json.loads(path.read_text())
    broken(change, fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"is damaged|has the format 2"):
        read_manifest(path.parent)


@pytest.mark.parametrize("change", ["missing", "extra", "shape", "dtype"])
def test_other_tensors_are_refused_by_name(tmp_path: Path, change: str) -> None:
    saver(tmp_path).save(1, some(1), {}, RNG)
    folder, tensors = tmp_path / "step-00000001", some(0)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    if change == "missing":
        tensors["model.new"] = torch.zeros(1)
    elif change == "extra":
        del tensors["model.a"]
    else:
        tensors["model.a"] = torch.zeros(6, 5) if change == "shape" else torch.zeros(6, 4, dtype=torch.float64)
    with pytest.raises(UserError, match=r"tensor 'model\.(a|new)'.* resume with the run's settings"):
        fill(folder, read_manifest(folder), tensors)
    assert torch.equal(tensors["model.bf16"], before["model.bf16"])  # refused before anything was touched


def test_replicas_are_written_once_and_evenly() -> None:
    rows = [[f"t{i}", "torch.float32", [8], [0], [8], 32, None] for i in range(6)]
    entries, owners = divide([rows, rows, rows])
    assert sorted(owners.values()) == [0, 0, 1, 1, 2, 2]
    assert all(len(entry.pieces) == 1 for entry in entries.values())


def test_ranks_without_the_whole_of_a_tensor_are_refused() -> None:
    half = [["t", "torch.float32", [8], [0], [4], 16, None]]
    with pytest.raises(UserError, match="do not make up the whole"):
        divide([half, half])
    with pytest.raises(UserError, match="rank 1 holds other tensors"):
        divide([half, [["u", *half[0][1:]]]])


def test_boxes() -> None:
    assert Box((), ()).meet(Box((), ())) == Box((), ())
    assert Box((0,), (4,)).meet(Box((4,), (4,))) is None
    assert not Box((1,), (4,)).within((4,))
    assert not Box((0,), (4,)).within((4, 1))
