"""The console script flexcp.plan: figures, chosen plan, drawing, and sentences for wrong uses."""

import json
import re
from pathlib import Path

import pytest
import torch

import flexcp
from flexcp import cost, masks, plancli


def plans(capsys, *arguments: str) -> dict:
    assert plancli.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_figures_are_those_of_the_formula(capsys) -> None:
    told = plans(capsys, "--mask", "causal", "--seq-len", "32K", "--cp", "4", "--link-gb-s", "100")
    by = {(row["layout"], row["comm"]): row for row in told["plans"]}
    gather = by["head_tail", "gather"]
    blocks = 32768 // 128
    flops = blocks * (blocks + 1) // 2 * 128**2 / 4 * 4 * 128 * 32  # of a rank: its blocks x 4 D for each head
    assert gather["received_bytes_max"] == 3 * 8192 * 8 * 2 * 128 * 2
    assert gather["kv_buffer_bytes"] == 32768 * 8 * 2 * 128 * 2
    assert gather["work_max_over_mean"] == 1.0
    assert gather["forward_ms"] == pytest.approx(flops / 642e12 * 1e3)
    assert gather["backward_ms"] == pytest.approx(flops * 2.5 / 561e12 * 1e3)
    assert by["contiguous", "exchange"]["fraction_of_all_kv"] == pytest.approx((1 + 2 + 3) / 4 / 4)
    assert [row["chosen"] for row in told["plans"]].count(True) == 1


def test_every_layout_over_every_comm_and_the_choice_of_flexcp_plan(capsys, tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("700 41\n2000\n90\n")
    mask = f"causal & document:{tmp_path}/lengths.txt"
    told = plans(capsys, "--mask", mask, "--seq-len", "4096", "--cp", "2", "--model", "llama3-debug")
    names = {row["layout"].partition("(")[0] for row in told["plans"]}
    assert names - {"swapped"} == {"contiguous", "head_tail", "per_document", "min_heap", "affinity", "ptrr"}
    assert {row["comm"] for row in told["plans"]} == {"gather", "ring", "exchange", "ulysses"}
    ids = plancli.read_documents(tmp_path / "lengths.txt", 4096)
    assert torch.bincount(ids).tolist() == [700, 41, 2000, 90, 700, 41, 524]
    both = masks.causal() & masks.document(ids)
    model = cost.CostModel(cost.Shape(4, 2, 32), cost.calibrated("h200", "flash", 4096))
    plan = flexcp.plan(both, 4096, 2, cost=model)
    assert told["chosen"] == {
        "layout": plan.layout.name,
        "comm": plan.comm,
        "head_groups": plan.schedules["mask"].head_groups,
        "ulysses": plan.ulysses,
    }


def test_ulysses_figures_are_those_of_the_formula(capsys) -> None:
    told = plans(capsys, "--mask", "causal", "--seq-len", "32K", "--cp", "16")
    by = {(row["layout"], row["comm"]): row for row in told["plans"]}
    assert {comm for _, comm in by if comm.startswith("ulysses")} == {
        "ulysses",
        "ulysses+gather",
        "ulysses+ring",
        "ulysses+exchange",
    }
    alone, both = by["contiguous", "ulysses"], by["head_tail", "ulysses+gather"]
    row = 2 * 128  # bytes of one head's token
    # 2048 rows on each of 15 others: 2 of 32 query heads and their out, and a KV head that two ranks share.
    assert alone["received_bytes_max"] == 15 * 2048 * (2 * 2 + 2) * row
    assert alone["work_max_over_mean"] == 1.0
    # 8 ranks share heads: 7 others with 4 query heads; the other group's 8 x 2048 rows of one KV head.
    assert both["ulysses"] == 8
    assert both["received_bytes_max"] == (7 * 2048 * (2 * 4 + 2) + 8 * 2048 * 2) * row
    assert both["fraction_of_all_kv"] == pytest.approx((7 + 8) * 2048 / (32768 * 8))


def test_table_and_drawing(capsys, tmp_path: Path) -> None:
    arguments = ["--mask", "causal & sliding_window(512)", "--mask", "causal", "--seq-len", "8K", "--cp", "3"]
    assert plancli.main([*arguments, "--png", str(tmp_path / "plan.png")]) == 0
    text = capsys.readouterr().out
    assert "->" in text
    assert "work max/mean" in text
    assert "per_document" in text
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"--mask": "casual"}, "did you mean causal"),
        ({"--mask": "document:/no/such/file"}, "cannot be read"),
        ({"--mask": "document:{folder}/bad"}, "whole numbers of tokens"),
        ({"--seq-len": "1G"}, "such as 131072, 128K or 1M"),
        ({"--cp": "0"}, "at least 1"),
        ({"--model": "llama4"}, "unknown model"),
        ({"--device": "h100"}, "did you mean h200"),
        ({"--kernel": "flsh"}, "did you mean flash"),
        ({"--link-gb-s": "-1"}, "above 0"),
        ({"--link-gb-s": "inf"}, "finite"),
        ({"--seq-len": "9999999999999M"}, "at most 2147483647 tokens"),
        ({"--seq-len": "64M"}, "larger --block-size"),
        ({"--seq-len": "64", "--cp": "5000"}, r"1 block\(s\) of 128 tokens, and --cp 5000 ranks cannot all have one"),
        ({"--mask": "causal & document"}, "needs the lengths of the documents, .* write document:FILE"),
        ({"--mask": "{folder}/m.py:of_documents"}, "needs the lengths .* a function that takes seq_len alone"),
        ({"--png": "plan.jpg"}, r"writes \.png or \.svg"),
        ({"--png": "/no/such/folder/plan.png"}, "cannot be written"),
    ],
)
def test_wrong_uses_get_a_sentence(changed: dict[str, str], sentence: str, capsys, tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("12 x")
    (tmp_path / "m.py").write_text(
        "from flexcp.masks import document\nof_documents = lambda doc_ids: document(doc_ids)"
    )
    given = {"--mask": "causal", "--seq-len": "1K", "--cp": "2"} | changed
    arguments = [word.replace("{folder}", str(tmp_path)) for pair in given.items() for word in pair]
    assert plancli.main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert re.search(sentence, printed.err)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--cp", "0"], "at least 1"),
        (["--device-gib", "inf"], "--device-gib is a finite number"),
        (["--device-gib", "nan"], "--device-gib is a finite number"),
        (["--host-gib", "-3"], "--host-gib is a finite number, at least 0"),
        (["--json"], "leave one of them off"),
    ],
)
def test_wrong_uses_of_memory_get_a_sentence(more: list[str], sentence: str, capsys) -> None:
    assert plancli.main(["--memory", "--seq-len", "1K", "--cp", "2", *more]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert sentence in printed.err
