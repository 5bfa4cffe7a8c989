"""The engines of a test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.examples.engine_support import MakeEngine, engine_maker

# In processes of their own: `test_kernels` runs the first, `test_loop` the second.
collect_ignore = [
    name
    for name, variable in (
        ("test_interpreted_kernels.py", "TRITON_INTERPRET"),
        ("test_faults.py", "MEMSAVER_HOST_DEVICE"),
    )
    if variable not in os.environ
]


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """See `engine_maker`."""
    with engine_maker() as make:
        yield make
