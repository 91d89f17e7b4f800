"""Defaults, a file, the command line: each over the one before, and a sentence for what cannot be."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from flexcp.checks import check, check_world, prepare_out
from flexcp.commandline import from_yaml, parse
from flexcp.config import TrainConfig
from flexcp.errors import UserError
from flexcp.estimate import available_bytes, total_bytes
from flexcp.fit import require_memory
from flexcp.mesh import Degrees
from flexcp.options import GROUPS


def test_defaults_file_command_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("steps: 7\nseq-len: 99\nlr: 3e-4\ngrad_clip: null\nbatch: 3\n")
    assert parse([]) == TrainConfig()
    config = parse(["--config", str(file), "--steps", "8", "--seq_len=100", "--grad-clip", "None", "--cp", "2"])
    assert config == TrainConfig(steps=8, seq_len=100, lr=3e-4, grad_clip=None, batch=3, cp=2, config=str(file))
    assert parse(["--grad-clip", "2"]).grad_clip == 2.0


def test_a_saved_config_is_read_back(tmp_path: Path) -> None:
    config = TrainConfig(mask="causal & sliding_window(64)", lr=1e-5, grad_clip=None, data="ü: 'x'", out="o")
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert from_yaml(str(tmp_path / "config.yaml")) == config


def help_of(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        parse(["--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_every_field_is_a_flag_and_says_what_it_is(capsys, monkeypatch) -> None:
    text = help_of(capsys, monkeypatch)
    for field in dataclasses.fields(TrainConfig):
        flag = "--" + field.name.replace("_", "-")
        assert f"{flag} " in text or f"{flag}, " in text  # a switch stands beside its opposite
    plain = " ".join(text.replace("│", " ").split())
    # The text of a field runs on over the end of its lines in the source.
    assert "Left out: llama3-debug, or the shape of --init-from. (default: None)" in plain


def test_flags_stand_in_groups_in_the_order_of_the_fields(capsys, monkeypatch) -> None:
    text = help_of(capsys, monkeypatch)
    boxes = re.split(r"^[ ╭─]+((?:\w+ )?options)[ ─╮]*$", text, flags=re.MULTILINE)[1:]  # lines, or none in ASCII
    assert boxes[::2] == ["options", *(f"{name} options" for name in GROUPS)]
    flags = [re.findall(r"^(?:│ |  )--([a-z][a-z0-9-]*)", box, re.MULTILINE) for box in boxes[1::2]]
    assert flags[0] == ["config", "dry-run"]
    for (name, group), found in zip(GROUPS.items(), flags[1:]):
        assert found == [field.name.replace("_", "-") for field in dataclasses.fields(group)], name


def test_the_settings_are_those_of_all_groups_in_order() -> None:
    grouped = [field.name for group in GROUPS.values() for field in dataclasses.fields(group)]
    assert [field.name for field in dataclasses.fields(TrainConfig)] == [*grouped, "config", "dry_run"]


def test_a_switch_on_the_command_line_and_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("dry_run: true")
    file = ["--config", str(tmp_path / "c.yaml")]
    for argv, expected in ((["--dry-run"], True), (["--no-dry-run"], False), (file, True)):
        assert parse(argv).dry_run is expected
    assert parse([*file, "--dry-run"]).dry_run
    assert not parse([*file, "--no-dry-run"]).dry_run


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--stepz", "3"], "unknown flag '--stepz': did you mean --steps"),
        (["--steps"], "--steps needs a value"),
        (["--steps", "x"], "--steps is 'x', and must be an integer"),
        (["--lr", "fast"], "--lr is 'fast', and must be a number"),
        (["--grad-clip", "off"], "--grad-clip is 'off', and must be a number or None"),
        (["20"], "'20' belongs to no flag"),
        (["--config"], "--config needs a value"),
        (["--dry-run=5"], "--dry-run takes no value"),
        (["--no-steps"], "unknown flag '--no-steps'"),
    ],
)
def test_command_lines_that_cannot_be_read(argv: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(argv)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"seq_lem: 3", "unknown field 'seq_lem': did you mean seq_len"),
        (b"config: x", "unknown field 'config'"),
        (b"seq_len: abc", "seq_len is 'abc', and must be an integer"),
        (b"seq_len: 3.5", "seq_len is 3.5, and must be an integer"),
        (b"seq_len: true", "seq_len is True, and must be an integer"),
        (b"lr: [1]", r"lr is [1], and must be a number"),
        (b"steps: null", "steps is None, and must be an integer"),
        (b"model: 3", "model is 3, and must be a text"),
        (b"- 1", "holds a list"),
        (b"{{{", "is not YAML"),
        (b"a: !!python/object:os.system {}", "is not YAML"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"\0", "is not YAML"),
        (None, "No such file"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "c.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        from_yaml(str(file))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# only a remark\n")
    assert from_yaml(str(tmp_path / "c.yaml")) == TrainConfig()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seq_len": 0}, "--seq-len is 0, and must be at least 1"),
        ({"steps": 0}, "--steps is 0"),
        ({"steps": -3}, "--steps is -3"),
        ({"grad_accum": 0}, "--grad-accum is 0"),
        ({"ac": "some"}, "unknown ac 'some'"),
        ({"offload": "on"}, "--offload on moves the layers' inputs that --ac keeps, and --ac is none"),
        ({"optim": "adam"}, "unknown optim 'adam': did you mean adamw"),
        ({"optim": "adamw_bf16"}, "--optim adamw_bf16 is for bfloat16 weights, and --dtype is float32"),
        ({"optim_step": "in_backward"}, "so --grad-clip 1.0 cannot be kept: pass --grad-clip None"),
        ({"optim_step": "in_backward", "grad_accum": 2}, "and --grad-accum 2 has several in a step"),
        ({"pp": 2}, "--pp is 2, and must be 1: pipeline parallelism is not supported"),
        ({"batch": 0}, "--batch is 0"),
        ({"log_every": 0}, "--log-every is 0"),
        ({"lr": -1.0}, "--lr is -1.0"),
        ({"lr": float("nan")}, "--lr is nan"),
        ({"lr": float("inf")}, "--lr is inf"),
        ({"seed": -1}, "--seed is -1"),
        ({"warmup_steps": -1}, "--warmup-steps is -1"),
        ({"weight_decay": -0.1}, "--weight-decay is -0.1"),
        ({"grad_clip": 0.0}, "--grad-clip is 0.0"),
        ({"model": "lama3-debug"}, "unknown model 'lama3-debug': did you mean llama3-debug"),
        ({"comm": "rign"}, "unknown comm 'rign': did you mean ring"),
        ({"balance": "head-tail"}, "unknown balance 'head-tail': did you mean head_tail"),
        ({"dtype": "float16"}, "unknown dtype 'float16': did you mean"),
    ],
)
def test_values_that_no_run_can_use(change: dict, words: str) -> None:
    with pytest.raises(UserError) as caught:
        check(TrainConfig(**change))
    assert words in str(caught.value)


def test_the_grid_and_the_ranks_that_were_started() -> None:
    assert check_world(TrainConfig(cp=4), 4) == Degrees(cp=4)
    assert check_world(TrainConfig(cp=2, dp_shard=-1, batch=4), 8) == Degrees(cp=2, dp_shard=4)
    assert check_world(TrainConfig(cp=2, tp=2, dp_replicate=2, batch=2), None).size == 8


@pytest.mark.parametrize(
    ("change", "num_ranks", "words"),
    [
        ({"cp": 2}, 3, "--cp 2 --tp 1 is a grid of 2 ranks, and 3 were started: start 2 rank(s)"),
        ({"cp": 4}, 2, "is a grid of 4 ranks, and 2 were started: start 4 rank(s)"),
        ({"cp": 2}, 4, "is a grid of 2 ranks, and 4 were started: pass --dp-shard 2, or start 2 rank(s)"),
        ({"cp": 0}, None, "--cp is 0, and must be at least 1, or -1 for the rest"),
        ({"cp": -1}, None, "--cp is -1, the rest of the ranks, and no ranks have been started"),
        ({"cp": -1, "dp_shard": -1}, 8, "--dp-shard and --cp are both -1: only one can be the rest"),
        ({"cp": 3, "dp_shard": -1}, 8, "multiply to 3, which does not divide the 8 ranks"),
        ({"dp_shard": 2, "dp_replicate": 2, "batch": 6}, None, "--batch 6 rows cannot be divided equally over 4 data"),
        ({"tp": 4}, None, "--tp 4 cannot divide the model's 2 KV heads equally: use a divisor of 2, or more --cp"),
        ({"fsdp": "off", "dp_shard": 2, "batch": 2}, None, "pass --dp-replicate 2 --dp-shard 1, or --fsdp on"),
        ({"optim_step": "in_backward", "fsdp": "off", "cp": 2, "grad_clip": None}, None, "pass --fsdp on"),
        ({"comm": "ulysses", "cp": 3}, None, "--comm ulysses with --cp 3: 4 query heads cannot be shared evenly"),
        ({"batch": 6, "dp_shard": 2, "grad_accum": 4}, None, "--grad-accum 4 is more than the 3 row(s) of a step"),
    ],
)
def test_grids_that_cannot_be(change: dict, num_ranks: int | None, words: str) -> None:
    with pytest.raises(UserError) as caught:
        check_world(TrainConfig(**change), num_ranks)
    assert words in str(caught.value)


def test_out_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in ("file", "file/below"):
        with pytest.raises(UserError, match="cannot be written to"):
            prepare_out(TrainConfig(out=str(tmp_path / name)))
    assert prepare_out(TrainConfig(out=str(tmp_path / "a" / "b"))) == tmp_path / "a" / "b"
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_memory_is_counted_and_refused() -> None:
    cpu, one, thousand = torch.device("cpu"), Degrees(), Degrees(cp=1000)
    assert 0 < available_bytes(cpu) <= total_bytes(cpu) < 1 << 50
    require_memory(TrainConfig(seq_len=2048, cp=2), Degrees(cp=2), cpu, 2)
    big = TrainConfig(model="llama3-8b", fsdp="off", cp=1000)
    with pytest.raises(UserError, match=r"llama3-8b with 2,048 tokens needs 1\d\d\.\d\d GiB per rank.* 1000 rank"):
        require_memory(big, thousand, cpu, 1000)
    with pytest.raises(UserError, match=r"the longest sequence that fits is --seq-len \d+"):
        require_memory(TrainConfig(seq_len=10**10), one, cpu, 1)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"log": "tensorboard"}, "--log tensorboard needs --out"),  # else event files lie in the working directory
        ({"eval_every": 2}, "--eval-every 2 has nothing to evaluate on: add --eval-data"),
        ({"comm": "foo"}, "unknown comm 'foo' (known: auto, gather"),
    ],
)
def test_flags_that_would_do_nothing_or_leave_files_behind_are_refused(fields: dict, words: str) -> None:
    if "log" in fields:
        pytest.importorskip(fields["log"])  # a missing package is said before a missing folder
    with pytest.raises(UserError) as caught:
        check(TrainConfig(**fields))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--world 8", "--world 8 does nothing without --simulate-rank RANK: add that, or leave --world out"),
        ("--simulate-gb-s 100", "--simulate-gb-s 100.0 does nothing without --simulate-rank"),
        ("--keep-last 3", "--keep-last 3 does nothing without --save-every STEPS"),
        ("--save-mode sync --out x", "--save-mode sync does nothing without --save-every"),
        ("--eval-batches 2", "--eval-batches 2 does nothing without --eval-data"),
        ("--save-model off", "--save-model off does nothing without --out DIR"),
    ],
)
def test_options_that_would_do_nothing_alone(argv: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse(argv.split())


def test_what_an_option_belongs_to_may_stand_in_a_file_and_defaults_are_no_wish(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(TrainConfig(save_every=5, out="x").to_yaml())
    assert parse(["--config", str(file), "--keep-last", "3"]).keep_last == 3
    file.write_text(TrainConfig().to_yaml())  # with every field, each at its default
    check(parse(["--config", str(file)]))
    file.write_text("keep_last: 7")
    with pytest.raises(UserError, match="--keep-last 7 does nothing"):
        parse(["--config", str(file)])
