"""A lifted mask or score computes what the original does; for FLASH, in operators that its code generator has."""

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import flexcp
from flexcp import compat, masks
from flexcp.lift import NO_SCORE, Function, for_flash, lift, scalars
from tests.unit.masks_oracle import EXACT, S

CPU = torch.device("cpu")
BATCH = 2
aten = torch.ops.aten
LACKING = {
    aten.minimum.default,
    aten.maximum.default,
    aten.clamp.default,
    aten.clamp_min.default,
    aten.clamp_max.default,
}


def on_pairs(function: Function) -> Tensor:
    """[B, H, S, S], of a mask."""
    index = [torch.arange(n, dtype=torch.int32) for n in (BATCH, 2, S, S)]
    lifted = compat.over_pairs(function.call, with_score=False, num_buffers=len(function.inputs))
    return lifted(*index, *function.inputs)


def usable(mask) -> bool:
    return (mask.batch or BATCH) >= BATCH and (mask.heads or 2) >= 2


@pytest.mark.parametrize("mask", [m for m in EXACT if usable(m)], ids=repr)
def test_a_mask_for_flash_is_the_same_mask_in_fewer_operators(mask) -> None:
    lifted = lift(mask, 4, (), CPU)
    restated = for_flash(lifted, BATCH)
    assert torch.equal(on_pairs(lifted), on_pairs(restated))
    with compat.TransformGetItemToIndex():
        graph = make_fx(restated.call)(*scalars(4, CPU), *restated.inputs).graph
    assert not LACKING & {node.target for node in graph.nodes}
    assert all(x.dim() > 0 for x in restated.inputs), "FLASH cannot read a 0-d tensor"


def test_what_a_mask_captures_is_data_and_not_code() -> None:
    def with_limit(limit: int) -> Function:
        captured = torch.tensor(limit)
        return lift(lambda b, h, q, kv: q - kv < captured, 4, (), CPU)

    three, five = with_limit(3), with_limit(5)
    assert three.code == five.code
    assert for_flash(three, 1).code == for_flash(five, 1).code
    assert not torch.equal(on_pairs(three), on_pairs(five))


def test_a_score_is_known_to_read_indices_only_where_it_does() -> None:
    table = torch.arange(8.0)
    assert not lift(lambda s, b, h, q, kv: torch.tanh(s), 5, (), CPU).reads_indices
    assert lift(lambda s, b, h, q, kv, t: s + t[h], 5, (table,), CPU).reads_indices
    assert lift(lambda s, b, h, q, kv: torch.where(q - kv < 3, s, -torch.inf), 5, (), CPU).reads_indices
    assert for_flash(NO_SCORE, 1) is NO_SCORE


def test_given_tensors_stay_in_front_of_captured_ones() -> None:
    given, captured = torch.arange(4.0), torch.tensor(7.0)
    lifted = lift(lambda s, b, h, q, kv, t: s + t[q] * captured, 5, (given,), CPU)
    assert lifted.tensors[0] is given
    assert float(lifted.tensors[1]) == 7.0
    restated = for_flash(lifted, 3)
    assert [tuple(x.shape) for x in restated.inputs] == [(4,), (3,)]
    assert (
        float(restated.call(torch.tensor(1.0), *scalars(4, CPU)[:2], *[torch.tensor(2)] * 2, *restated.inputs)) == 15.0
    )


def test_the_callers_saved_tensor_hooks_rest_while_a_program_is_traced() -> None:
    seen: list[str] = []

    def hooks(name: str):
        return torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(name) or x, lambda x: x)

    x = torch.ones(2, requires_grad=True)
    with hooks("outer"), hooks("inner"):
        with compat.no_saved_tensor_hooks():
            x * x
        assert not seen
        with pytest.raises(ZeroDivisionError), compat.no_saved_tensor_hooks():
            _ = 1 / 0
        x * x
    assert set(seen) == {"inner"}
    with hooks("outer"):
        with hooks("inner"), compat.no_saved_tensor_hooks():
            pass
        seen.clear()
        x * x
    assert set(seen) == {"outer"}


def test_a_kernel_computes_little_for_each_pair_of_a_partial_block() -> None:
    """Per pair: where the tokens stand in the sequence, and where the query's document begins."""
    ids = torch.arange(4096) // 700
    plan = flexcp.plan(masks.causal() & masks.document(ids), 4096, 4, rank=1)
    mask = for_flash(lift(plan.schedules["mask"].stages[0].block_mask.mask_mod, 4, (), CPU), 1)
    with compat.TransformGetItemToIndex():
        graph = make_fx(mask.call)(*scalars(4, CPU), *mask.inputs).graph
    operators = [node.target for node in graph.nodes if node.op == "call_function"]
    assert operators.count(aten.index.Tensor) == 3
    assert len(operators) == 6
