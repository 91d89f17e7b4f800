"""flexcp.generate: greedy, and one sentence for a wrong use."""

import dataclasses
from pathlib import Path

import pytest
import torch

from flexcp.generate import greedy, main
from flexcp.models import Llama3Config, build, save_pretrained

TINY = Llama3Config(vocab_size=256, dim=16, num_layers=1, num_heads=2, num_kv_heads=1, ffn_dim=16, head_dim=8)


def test_greedy_takes_the_likeliest_each_time() -> None:
    model = build(dataclasses.replace(TINY, init_std=0.3), seed=0)
    made = greedy(model, [1, 2], 5)
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, *made]]))[0]
    assert made == logits[1:-1].argmax(-1).tolist()
    assert greedy(model, [1, 2], 5, stop={made[0]}) == made[:1]
    with pytest.raises(ValueError, match="at least one token"):
        greedy(model, [], 5)


def test_the_program(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = str(save_pretrained(build(TINY, seed=0), tmp_path / "m"))
    assert main(["--model", folder, "--prompt", "ab", "--tokens", "3", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith("ab")
    small = str(save_pretrained(build(dataclasses.replace(TINY, vocab_size=50), seed=0), tmp_path / "s"))
    for argv, words in (
        (["--model", folder, "--prompt", ""], "--prompt is empty"),
        (["--model", folder, "--prompt", "a", "--tokens", "0"], "--tokens is 0"),
        (["--model", str(tmp_path / "x"), "--prompt", "a"], "cannot be read"),
        (["--model", small, "--prompt", "a"], "the prompt has the token 97 (bytes)"),
        (["--model", folder, "--prompt", "a", "--device", "tpu"], "--device is 'tpu'"),
    ):
        assert main(["--device", "cpu", *argv]) == 2
        err = capsys.readouterr().err
        assert err.startswith("flexcp.generate: error: ")
        assert words in err
        assert err.count("\n") == 1
