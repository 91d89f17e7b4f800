"""The oracle matrix can fail: each planted fault turns it red."""

import dataclasses
from unittest.mock import patch

import pytest

from flexcp import headgroups, movement, planner, ulysses
from flexcp.comm import Link, Pending
from flexcp.exchange import Exchange
from tests import matrix


def without_last_ring_step():
    real = planner._ring_stages

    def faulty(*args):
        *stages, last = real(*args)
        return (*stages, dataclasses.replace(last, block_mask=None))

    return patch.object(planner, "_ring_stages", faulty)


def with_swapped_table_entries():
    real = planner._stage

    def faulty(*args, **kwargs):
        stage = real(*args, **kwargs)
        table = stage.kv_start.clone()
        table[[0, 1]] = table[[1, 0]]
        return dataclasses.replace(stage, kv_start=table)

    return patch.object(planner, "_stage", faulty)


def without_reduction_of_captured_gradients():
    return patch.object(Link, "all_reduce", lambda self, x: x)


def without_reduction_of_key_gradients():
    return patch.object(Pending, "wait", _only_the_first_part(Pending.wait))


def _only_the_first_part(real):
    def faulty(self):
        received = real(self)
        if received is not None and received.dim() == 2 and received.shape[0] == 2:
            received[1] = 0
        return received

    return faulty


def without_reverse_exchange():
    real = movement.ExchangedGradients.wait

    def faulty(self):
        self.pending = None
        return real(self)

    return patch.object(movement.ExchangedGradients, "wait", faulty)


def with_received_blocks_in_the_wrong_slots():
    real = Exchange.routes

    def faulty(self, *args):
        routes = real(self, *args)
        return dataclasses.replace(routes, receive_rows=routes.receive_rows.flip(0))

    return patch.object(Exchange, "routes", faulty)


def without_the_offset_of_a_head_group():
    return patch.object(headgroups.HeadGroup, "score", lambda self, score: score)


def without_the_offset_of_ulysses_heads():
    return patch.object(ulysses.Switch, "score", lambda self, score: score)


def with_key_gradients_of_one_sharer_only():
    real = ulysses.Switch.to_row_gradients

    def faulty(self, dq, dk, dv):
        return real(self, dq, dk * (self.me == 0), dv)

    return patch.object(ulysses.Switch, "to_row_gradients", faulty)


FAULTS = {
    "ulysses_offset": (without_the_offset_of_ulysses_heads, "ulysses"),
    "ulysses_sharers": (with_key_gradients_of_one_sharer_only, "ulysses"),
    "head_offset": (without_the_offset_of_a_head_group, "gather*4"),
    "reverse_exchange": (without_reverse_exchange, "exchange"),
    "receive_rows": (with_received_blocks_in_the_wrong_slots, "exchange"),
    "last_ring_step": (without_last_ring_step, "ring"),
    "table_entries": (with_swapped_table_entries, "gather"),
    "captured_reduction": (without_reduction_of_captured_gradients, "gather"),
    "key_reduction": (without_reduction_of_key_gradients, "gather"),
}


def errs(fault: str, case: matrix.Case) -> bool:
    """True where this rank's comparison notices the fault; rank 0 compares."""
    with FAULTS[fault][0]():
        try:
            matrix.check(case)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_noticed(ranks, fault: str) -> None:
    kv_heads, score = ("all", "slope_by_head") if fault.endswith("_offset") else ("one", "bias")
    case = matrix.Case("causal", FAULTS[fault][1], "head_tail", 2, kv_heads, 500, 128, score)
    assert ranks(2).run(errs, fault, case)[0]


def test_without_a_fault_the_same_cases_pass(ranks) -> None:
    for comm in ("ring", "gather", "exchange", "ulysses"):
        ranks(2).run(matrix.check, matrix.Case("causal", comm, "head_tail", 2, "one", 500, 128, "bias"))
    for comm in ("gather*4", "ulysses"):
        ranks(2).run(matrix.check, matrix.Case("causal", comm, "head_tail", 2, "all", 500, 128, "slope_by_head"))
