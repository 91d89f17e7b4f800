"""masks.draw: the picture shows the classes, the owners and what is received; its files are valid."""

import struct
import xml.etree.ElementTree as ElementTree
import zlib

import pytest
import torch

import flexcp
from flexcp import masks

DOCS = torch.arange(512) // 200
PACKED = masks.causal() & masks.document(DOCS)


def test_letters_are_the_refined_classes():
    drawing = masks.draw(PACKED, 512, block_size=32)
    assert drawing.classes.shape == (16, 16)
    dense = masks.to_dense(PACKED, 512)[0, 0].unflatten(0, (16, 32)).unflatten(2, (16, 32))
    want = dense.any(3).any(1).int() + dense.all(3).all(1).int()
    assert torch.equal(drawing.classes.int(), want.int())
    lines = str(drawing).splitlines()
    assert lines[0] == "causal() & document(doc_ids[512]): 512 tokens in blocks of 32"
    assert [len(line) for line in lines[1:17]] == [16] * 16
    assert lines[1] == "+" + "." * 15
    assert lines[3] == "##+" + "." * 13


def test_any_length_fits_64_cells():
    for seq_len in (1, 63, 64, 65, 1000, 1_000_000):
        drawing = masks.draw(masks.causal(), seq_len)
        assert max(drawing.classes.shape) <= 64
        assert drawing.block_size * len(drawing.classes) >= seq_len


def test_a_plan_adds_owners_and_what_is_received():
    plan = flexcp.plan(PACKED, seq_len=512, mesh=2, rank=0, block_size=64, balance="contiguous")
    drawing = masks.draw(PACKED, 512, plan, block_size=64)
    assert drawing.owners.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert drawing.received.tolist() == [[False] * 8, [False] * 3 + [True] + [False] * 4]
    assert str(drawing).splitlines()[-1] == "rank 1   ...roooo receives 12%"
    head_tail = flexcp.plan(masks.causal(), seq_len=500, mesh=2, rank=0, block_size=64, balance="head_tail")
    drawing = masks.draw(masks.causal(), 500, head_tail)
    assert head_tail.layout.chunk_size % drawing.block_size == 0
    assert drawing.received[1].sum() > 0


@pytest.mark.parametrize("with_plan", [False, True])
def test_svg_is_well_formed_and_covers_every_block_once(with_plan):
    plan = flexcp.plan(PACKED, seq_len=512, mesh=2, rank=0, block_size=32) if with_plan else None
    root = ElementTree.fromstring(masks.draw(PACKED, 512, plan, block_size=32).svg(cell=4))
    area = 0
    for path in root.iter("{http://www.w3.org/2000/svg}path"):
        if path.get("fill-opacity") is None:
            area += sum(int(run.split("h")[1].split("v")[0]) for run in path.get("d").split("M")[1:]) * 4
    assert area == (16 * 4) ** 2


def test_png_holds_the_pixels():
    data = masks.draw(masks.causal(), 4, block_size=1).png(cell=1)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (4, 4)
    size = struct.unpack(">I", data[33:37])[0]
    lines = zlib.decompress(data[41 : 41 + size])
    assert len(lines) == 4 * (1 + 4 * 3)
    assert lines[1:4] == bytes([0x1F, 0x4E, 0x79])
    assert lines[4:7] == bytes([0xEE, 0xEE, 0xEE])


def test_save_goes_by_the_ending(tmp_path):
    drawing = masks.draw(masks.causal(), 8)
    for name in ("a.svg", "a.png", "a.txt"):
        drawing.save(tmp_path / name)
        assert (tmp_path / name).stat().st_size > 50
    with pytest.raises(ValueError, match=r"saved as \.svg"):
        drawing.save(tmp_path / "a.gif")


def test_one_head_and_one_batch_row_are_drawn():
    mask = masks.per_head_window(torch.tensor([1, 8])) & masks.padding(torch.tensor([4, 8]))
    assert masks.draw(mask, 8, head=1, batch=1).classes.sum() > masks.draw(mask, 8).classes.sum()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: masks.draw(masks.causal(), 0), "seq_len must be at least 1"),
        (lambda: masks.draw(masks.causal(), 8, block_size=0), "block_size must be at least 1"),
        (lambda: masks.draw(masks.per_head_window(torch.tensor([1, 8])), 8, head=2), "out of range"),
        (lambda: masks.draw(masks.causal(), 8, flexcp.plan(masks.causal(), 512, 2)), "plan is for 512 tokens"),
    ],
)
def test_wrong_arguments_get_a_sentence(call, says):
    with pytest.raises(ValueError, match=says):
        call()
