"""Ranks that planned different things all stop with one sentence, before anything is computed."""

import re
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import flexcp
from flexcp import api, masks
from flexcp.agreement import mask_digest
from flexcp.table import rows_of


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


REFUSED = {  # what only rank 1 is given, and a part of the sentence that the others get
    "name": ({"balance": "head_tial"}, "did you mean head_tail"),
    "number": ({"seq_len": 0}, "seq_len is the number of tokens"),
    "no mask": ({"mask": 3}, "a mask is a mask_mod"),
    "like": ({"like": flexcp.plan(masks.causal(), 64, 3)}, "leave like out"),
    "heads": ({"comm": "ulysses", "heads": 4}, "4 query heads cannot be shared evenly by the 3 ranks"),
}


def plan_what_one_rank_refuses(case: str) -> str:
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
    odd = REFUSED[case][0] if mesh.get_rank() == 1 else {}
    try:
        flexcp.plan(**({"mask": causal_of(64), "seq_len": 512, "mesh": mesh} | odd))
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


@pytest.mark.parametrize("case", REFUSED)
def test_what_one_rank_refuses_ends_all_with_its_sentence(ranks, case: str) -> None:
    sentences = ranks(3).run(plan_what_one_rank_refuses, case)
    assert re.search(REFUSED[case][1], sentences[1])
    assert not sentences[1].startswith("PlanMismatch")
    for sentence in (sentences[0], sentences[2]):
        assert sentence.startswith("PlanMismatch: rank 1 of the group could not plan: ")
        assert re.search(REFUSED[case][1], sentence)


def plan_a_mask_that_fails_in_some_rows() -> str:
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))

    def visible(b, h, q, kv):
        return (q >= kv) & table[q]

    table = torch.ones(512, dtype=torch.bool)
    with patch.object(api, "rows_of", fails_in_the_last_rows):
        try:
            flexcp.plan(visible, 512, mesh, comm="exchange")
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
    return "agreed"


def fails_in_the_last_rows(source, first, last, device):
    if last * source.block_size[0] >= source.seq_len:
        raise ValueError("the mask_mod visible raised IndexError")
    return rows_of(source, first, last, device)


def test_a_mask_that_fails_in_one_ranks_rows_ends_all(ranks) -> None:
    sentences = ranks(2).run(plan_a_mask_that_fails_in_some_rows)
    assert sentences[1] == "ValueError: the mask_mod visible raised IndexError"
    assert sentences[0].startswith("PlanMismatch: rank 1 of the group could not plan: ValueError: the mask_mod visible")


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
