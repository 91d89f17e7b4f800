"""The oracle matrix can fail: each planted fault turns it red."""

import dataclasses
from unittest.mock import patch

import pytest

from flexcp import attention, planner
from flexcp.comm import Link
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
    real = Link.reduce_scatter
    return patch.object(Link, "reduce_scatter", lambda self, x: real(self, x) * 0 + x[self.rank])


def without_reverse_exchange():
    real = attention._bring_home

    def faulty(stage, dk, dv, like, link):
        with patch.object(
            Link, "all_to_all", lambda self, rows, send, receive: rows.new_zeros(sum(receive), *rows.shape[1:])
        ):
            return real(stage, dk, dv, like, link)

    return patch.object(attention, "_bring_home", faulty)


def with_received_blocks_in_the_wrong_slots():
    real = Exchange.routes

    def faulty(self, groups, device):
        routes = real(self, groups, device)
        return dataclasses.replace(routes, receive_rows=routes.receive_rows.flip(0))

    return patch.object(Exchange, "routes", faulty)


FAULTS = {
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
    case = matrix.Case("causal", FAULTS[fault][1], "head_tail", 2, 4, 500, "bias")
    assert ranks(2).run(errs, fault, case)[0]


def test_without_a_fault_the_same_cases_pass(ranks) -> None:
    for comm in ("ring", "gather", "exchange"):
        ranks(2).run(matrix.check, matrix.Case("causal", comm, "head_tail", 2, 4, 500, "bias"))
