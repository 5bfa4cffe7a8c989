"""Calls of the driver that a shared pool makes without its lock, on devices that are faked (tests/fake_cuda)."""

from __future__ import annotations

from tests.fake_cuda import run_on_fake

PRELUDE = """
import os, subprocess, sys, tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import memsaver
from memsaver import _core
from memsaver.broker import daemon, discovery
from memsaver.broker.admin import AdminClient
from tests.fake_cuda import control
from tests.fake_cuda.control import Segment
from tests.support import MIB, until

EXPORT = "cuMemExportToShareableHandle"
threads = ThreadPoolExecutor(4)


def start():
    command = [sys.executable, "-m", "memsaver", "broker", "--detach", "--device", "0", "--capacity", "1GiB"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [found] = discovery.found()
    return found


def row():
    with AdminClient(path) as admin:
        [found] = [each for each in admin.status()["clients"] if each["pid"] == os.getpid()]
        return found


def region(tag, nbytes, seed):
    made = memsaver.region(tag, device="cuda:0", backup="host")
    return made, Segment(made, nbytes, seed)


with tempfile.TemporaryDirectory(prefix="ms") as folder:
    os.environ["MEMSAVER_POOL_DIR"] = folder
    path = start()
    try:
        memsaver.configure(pool="shared")
        small, first = region("small", 6 * MIB, 1)
        large, second = region("large", 64 * MIB, 2)
        until(lambda: row()["held_bytes"] == 70 * MIB)
        before, released = control.calls(EXPORT), control.calls("cuMemRelease")
        daemon.stop(path)
        until(lambda: not _core.connected("cuda:0"))
"""
END = """
        first.check(); second.check()
    finally:
        daemon.stop(path)
"""


def test_pause_returns_while_chunks_are_exported_for_the_next_broker() -> None:
    run_on_fake(
        PRELUDE
        + """
        with control.held(EXPORT):
            start()
            control.until_stopped(EXPORT)
            threads.submit(small.pause).result(timeout=20)
        until(lambda: _core.connected("cuda:0"))
        # All chunks were in the inventory, and those of the pause were given back to the broker after it.
        assert control.calls(EXPORT) > before
        until(lambda: row()["held_bytes"] == 64 * MIB)
        with AdminClient(path) as admin:
            assert admin.status()["idle_bytes"] == 6 * MIB
        small.resume(memory_timeout=60)
        assert row()["held_bytes"] == 70 * MIB
        """
        + END
    )


def test_chunks_of_a_pause_go_to_the_driver_if_their_export_fails() -> None:
    run_on_fake(
        PRELUDE
        + """
        with control.held(EXPORT):
            control.fail(EXPORT, 999, times=1)
            start()
            control.until_stopped(EXPORT)
            threads.submit(small.pause).result(timeout=20)
        until(lambda: _core.connected("cuda:0"))  # at the next try
        until(lambda: control.calls("cuMemRelease") >= released + 3)  # chunks of 2 MiB
        until(lambda: row()["held_bytes"] == 64 * MIB)
        with AdminClient(path) as admin:
            assert admin.status()["total_bytes"] == 64 * MIB
        assert control.calls(EXPORT) == before + 1 + 2  # the call that failed, and two chunks in a single connection
        small.resume(memory_timeout=60)
        """
        + END
    )
