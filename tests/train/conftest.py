"""Quiet for the tests of the trainer."""

import logging

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_structured_trace() -> None:
    """Dynamo describes every call of flex_attention to this logger, and pytest would format and keep all of it."""
    logging.getLogger("torch.__trace").handlers.clear()
    logging.getLogger("torch.__trace").propagate = False
