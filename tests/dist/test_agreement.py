"""Ranks that planned different things all stop with one sentence, before anything is computed."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import flexcp
from flexcp import api, masks
from flexcp.agreement import mask_digest


def causal_of(window: int):
    bound = torch.tensor(window)
    return lambda b, h, q, kv: (q >= kv) & (q - kv < bound)


ODD = {  # what rank 1 is given in place of the others' arguments
    "seq_len": {"seq_len": 1024},
    "mask": {"mask": masks.sliding_window(65)},
    "block_size": {"block_size": 64},
    "balance": {"balance": "head_tail"},
    "comm": {"comm": "ring"},
    "masks": {"mask": {"sliding": masks.sliding_window(64)}},
    "heads": {"mask": masks.per_head_window([64, 32])},
}


def plan_oddly(field: str, plain: bool) -> str:
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    arguments = {"mask": masks.sliding_window(64), "seq_len": 512, "mesh": mesh}
    if plain:
        arguments["mask"] = causal_of(64)
    if mesh.get_rank() == 1:
        arguments |= {"mask": causal_of(65)} if plain and field == "mask" else ODD.get(field, {})
        if field == "version":
            api.__version__ = "0.0.9"
    try:
        flexcp.plan(**arguments)
    except ValueError as error:
        return str(error)
    finally:
        api.__version__ = flexcp.__version__
    return "agreed"


@pytest.mark.parametrize("field", [*ODD, "version"])
def test_a_disagreement_ends_all_ranks_with_the_rank_and_the_field(ranks, field: str) -> None:
    sentences = ranks(3).run(plan_oddly, field, False)
    assert len(set(sentences)) == 1
    assert f"rank 1 disagrees with the others about {field} (rank 1: " in sentences[0]


def test_captured_tensors_of_plain_functions_are_compared(ranks) -> None:
    assert all("about mask (rank 1: <lambda>" in sentence for sentence in ranks(3).run(plan_oddly, "mask", True))
    assert set(ranks(3).run(plan_oddly, "nothing", True)) == {"agreed"}
    assert set(ranks(3).run(plan_oddly, "nothing", False)) == {"agreed"}


def test_digests_tell_masks_apart_by_what_they_capture() -> None:
    ids = torch.tensor([0, 0, 1, 1])
    other = torch.tensor([0, 1, 1, 1])
    for make in (
        masks.document,
        lambda ids: lambda b, h, q, kv: ids[q] == ids[kv],
        lambda ids: masks.document(ids) & masks.causal(),
    ):
        assert mask_digest(make(ids)) == mask_digest(make(ids.clone()))
        assert mask_digest(make(ids)) != mask_digest(make(other))
