"""Fixtures of all tests: a small host device of this run's own, fresh tags, and nothing left armed or paused behind."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator

# Before memsaver is imported. Processes that name the same size share a device, so each run has a size of its own.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("MEMSAVER_HOST_DEVICE", None)  # the controller's
os.environ.setdefault("MEMSAVER_HOST_DEVICE", str((1 << 30) + os.getpid() % 1000 * (2 << 20)))

import pytest  # noqa: E402

import memsaver  # noqa: E402
from memsaver import _core  # noqa: E402

# The background grows host memory when it likes, which tests that fail a certain driver call, or count bytes, cannot
# have. Tests of it turn it on.
memsaver.configure(backup_ahead=False)

_numbers = itertools.count()


def _why_no_gpu() -> str | None:
    if _core.cuda_device_count() == 0:
        return "there is no CUDA device"
    import torch

    return None if torch.cuda.is_available() else f"this build of torch ({torch.__version__}) has no CUDA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.freeze()  # what the imports made stays out of each test's collection


@pytest.fixture
def fresh_tag() -> Callable[[], str]:
    """Makes tags that no other test uses: regions live as long as the process."""
    return lambda: f"tag{next(_numbers)}"


@pytest.fixture
def tag(fresh_tag: Callable[[], str]) -> str:
    return fresh_tag()


@pytest.fixture
def make(fresh_tag: Callable[[], str]) -> Callable[..., memsaver.Region]:
    """Makes host regions under fresh tags."""

    def region(backup: str = "none", tag: str | None = None) -> memsaver.Region:
        return memsaver.region(tag or fresh_tag(), device="cpu", backup=backup)

    return region


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Disarms faults, ends captures, and gives retained chunks back, whatever the test did.

    An exception that a test caught keeps the test's tensors in a cycle: they go before the next one counts bytes.
    """
    gc.collect()
    yield
    _core.faults_disarm()
    while _core.capturing():
        _core.capture_ends()
    memsaver.configure(retain=0, host_limit=None, backup_ahead=False)
