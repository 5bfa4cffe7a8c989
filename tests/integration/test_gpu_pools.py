"""A shared pool on GPUs that are made up (tests/gpus.py): calls of the driver without its lock, and its ledger."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

import memsaver
from memsaver import _core
from tests import controls, gpus
from tests.gpus import GpuBroker, Segment, gpu
from tests.support import MIB, until

pytestmark = [pytest.mark.gpus, pytest.mark.isolated]


def test_no_lock_is_held_while_a_chunk_of_an_ended_broker_is_released(threads: ThreadPoolExecutor) -> None:
    with GpuBroker(gpu()) as broker:
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


def test_the_rows_of_a_client_on_a_gpu() -> None:
    """NVML lists the chunks for no client while the broker lives, and later for the client that has one. No process
    knows the time from which it is so. So memory beside the rows is unlisted from the end of the broker on.
    """
    device, me = gpu(context=300 * MIB, occupied=1024 * MIB), os.getpid()

    def rows() -> dict[str, int]:
        found = memsaver.stats().devices[device].ledger
        assert sum(row.bytes for row in found.rows) == found.used_bytes and found.is_consistent, found
        kinds = [(row.kind if row.pid in (me, None) else f"{row.kind} of another") for row in found.rows]
        assert len(set(kinds)) == len(kinds)
        return dict(zip(kinds, (row.bytes // MIB for row in found.rows)))

    with GpuBroker(device) as broker:
        region = memsaver.region("kv", device=device)
        segment = Segment(region, 64 * MIB)
        gpus.take(device, 8 * MIB)
        both = {"unknown": 300 + 8, "unlisted": 1024}
        assert region.mapped_bytes == segment.nbytes and rows() == {"region": 64, **both}
        region.pause()
        until(lambda: rows() == {"pool idle of another": 64, **both})
        region.resume()
        assert rows() == {"region": 64, **both}
        broker.stop()
        both = {"unlisted": 1024 + 308}
        assert rows() == {"region": 64, **both}
        broker.start()
        until(lambda: _core.connected(device))
        assert rows() == {"region": 64, **both}
