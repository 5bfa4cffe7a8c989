"""Fixtures of the GPU tests: a second process on the same GPU, and fresh regions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import memsaver
from tests.gpu.fixtures import Inside, Make, Neighbour

_numbers = itertools.count()
memsaver.configure(patches="captures")  # tests capture plain graphs of torch


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    other = Neighbour()
    yield other
    other.close()


@pytest.fixture
def fresh(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes regions with tags of their own, and leaves them active."""
    made: list[memsaver.Region] = []

    def make(name: str = "region", backup: str = "none", **options: Any) -> memsaver.Region:
        made.append(memsaver.region(f"{name}-{next(_numbers)}", device="cuda:0", backup=backup, **options))
        return made[-1]

    yield make
    torch.cuda.synchronize()
    for region in made:
        region.resume()
        region.thaw()
    torch.cuda.empty_cache()
    memsaver.trim([region.tag for region in made])
    memsaver.configure(retain=0)


@pytest.fixture
def driver_free() -> Callable[[], int]:
    """The driver's figure of free bytes, for the whole device."""
    return lambda: torch.cuda.mem_get_info()[0]


@pytest.fixture
def inside() -> Inside:
    """Whether a tensor's memory belongs to a region."""

    return lambda tensor, region: region.owns(tensor.data_ptr())
