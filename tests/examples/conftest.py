"""The engines of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.examples.engine_support import MakeEngine, engine_maker

# `test_kernels` runs it in a process of its own.
collect_ignore = [] if "TRITON_INTERPRET" in os.environ else ["test_interpreted_kernels.py"]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """See `engine_maker`."""
    with engine_maker() as make:
        yield make
