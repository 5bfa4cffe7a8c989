"""Calls of the driver that a shared pool makes without its lock, on GPUs that are made up (tests/gpus.py)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import memsaver
from memsaver import _core
from tests import controls
from tests.gpus import GpuBroker, Segment, gpu
from tests.support import MIB, check, until

pytestmark = [pytest.mark.gpus, pytest.mark.isolated]
EXPORT = "cuMemExportToShareableHandle"


@pytest.fixture
def broker() -> Iterator[GpuBroker]:
    with GpuBroker(gpu()) as running:
        yield running


class Client:
    """Two regions of a pool whose broker has ended."""

    def __init__(self, broker: GpuBroker) -> None:
        regions = [memsaver.region(tag, device=broker.device, backup="host") for tag in ("small", "large")]
        self.small, self.large = regions
        self.segments = [Segment(region, nbytes * MIB, nbytes) for region, nbytes in zip(regions, (6, 64))]
        until(lambda: broker.held_bytes() == 70 * MIB)
        self.exports, self.releases = controls.count(EXPORT), controls.count("cuMemRelease")
        broker.stop()

    def check(self) -> None:
        self.small.resume(memory_timeout=60)
        check(self.segments)


def test_a_pause_after_a_rejoin_returns_the_memory_to_the_driver(
    broker: GpuBroker, threads: ThreadPoolExecutor
) -> None:
    """The inventory needs no call of the driver. The broker lends no chunk that an earlier one has created."""
    client = Client(broker)
    broker.start()
    until(lambda: broker.held_bytes() == 70 * MIB)
    assert controls.count(EXPORT) == client.exports
    with controls.held("cuMemRelease"):
        client.small.pause()
        until(lambda: controls.stopped("cuMemRelease"))
        status = broker.status()
        assert (status["idle_bytes"], status["leaving_bytes"], broker.held_bytes()) == (0, 6 * MIB, 64 * MIB)
    until(lambda: controls.count("cuMemRelease") >= client.releases + 3)  # chunks of 2 MiB
    until(lambda: broker.status()["total_bytes"] == 64 * MIB)
    client.check()
    assert broker.held_bytes() == 70 * MIB


def test_no_lock_is_held_while_a_chunk_of_an_ended_broker_is_released(
    broker: GpuBroker, threads: ThreadPoolExecutor
) -> None:
    region = memsaver.region("kv", device=broker.device)
    controls.hold("cuMemImportFromShareableHandle")
    made = threads.submit(Segment, region, MIB)
    until(lambda: controls.stopped("cuMemImportFromShareableHandle"))
    broker.stop()
    with controls.held("cuMemRelease"):
        controls.go_on("cuMemImportFromShareableHandle")
        until(lambda: controls.stopped("cuMemRelease"))
        assert threads.submit(_core.pool_waits, broker.device).result(timeout=20) == ([], [])
    with pytest.raises(memsaver.Error):
        made.result()
