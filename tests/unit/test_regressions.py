"""Faults of earlier versions, each in its smallest form."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

import memsaver
from tests import controls
from tests.support import MIB, Block, Fill, Make, environment, fresh_device, run_clean


def test_memory_kept_by_a_refused_unmap_is_not_counted_for_a_resume(make: Make) -> None:
    region = make()
    first, gap, last = Block(region, 40 * MIB), Block(region, 40 * MIB), Block(region, 4 * MIB)
    del gap
    controls.arm(2)  # synchronize, unmap of the first run
    with pytest.raises(memsaver.DriverError, match="cuMemUnmap"):
        region.pause()
    assert region.state == "paused" and region.mapped_bytes > 4 * MIB
    del first
    region.resume()
    assert last.address == region._core.live()[0][0]
    last.fill(1)  # faults where nothing is mapped
    last.check()


def test_a_switch_on_a_full_device_gives_the_large_chunk_to_the_large_region(make: Make) -> None:
    small, big, out = make(), make(), make()
    incoming = [small._core.allocate_array(2 * MIB), big._core.allocate_array(256 * MIB)]
    memsaver.pause([small.tag, big.tag])
    outgoing = out._core.allocate_array(288 * MIB)
    with Fill():
        memsaver.switch(pause=[out.tag], resume=[small.tag, big.tag])
        assert (small._core.chunks, big._core.chunks) == ([32 * MIB], [256 * MIB])
    del incoming, outgoing


def test_a_backup_without_a_thread_to_spare_touches_its_memory_itself() -> None:
    said = run_clean(
        """
        import os, re, resource, time, memsaver
        region = memsaver.region("a", device="cpu")
        before = len(os.listdir("/proc/self/task"))
        while len(os.listdir("/proc/self/task")) == before:  # a wait that needs a thread leaves it for later waits
            region.pause()
            region.resume()
        held = region._core.allocate_array(32 << 20)
        size = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
        stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
        stack = 8 << 20 if stack == resource.RLIM_INFINITY else stack
        # Room for little more than the arena, then more in each turn: the copies need a thread or two.
        for room in range(stack // 2, 4 * stack, stack // 8):
            resource.setrlimit(resource.RLIMIT_AS, (size + (32 << 20) + room, resource.RLIM_INFINITY))
            try:
                print(region.pause(backup="host").copied_bytes)
                break
            except memsaver.Error as error:
                if "temporarily unavailable" not in str(error) and "no addresses" not in str(error):
                    raise
                time.sleep(0.01)
        """,
        MALLOC_ARENA_MAX="1",  # else a thread reserves 64 MiB of addresses at its first malloc, maybe after the count
    )
    assert int(said) == 32 * MIB


def test_a_forked_child_keeps_no_lock_of_a_parent_that_was_killed() -> None:
    device = fresh_device()
    holder = """
import os, time, memsaver
driver = memsaver._core.open_driver("cpu")
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(child, flush=True)
while True:
    driver.memory()
"""
    for attempt in range(3):  # most of the time the holder is under the lock
        parent = subprocess.Popen(
            [sys.executable, "-c", holder],
            env=environment(MEMSAVER_HOST_DEVICE=device),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            time.sleep(0.02 + 0.0013 * attempt)
            parent.kill()
            parent.wait()
            run_clean("import memsaver; memsaver._core.open_driver('cpu').memory()", MEMSAVER_HOST_DEVICE=device)
        finally:
            os.kill(child, signal.SIGKILL)
            parent.stdout.close()


def test_a_failed_import_closes_its_descriptor() -> None:
    said = run_clean(
        """
        import os, memsaver
        driver = memsaver._core.open_driver("cpu")
        file = driver.export_fd(driver.create(2 << 20))
        before, imported = len(os.listdir("/proc/self/fd")), 0
        try:
            while True:
                driver.import_fd(file)
                imported += 1
        except memsaver.DriverError as error:
            assert "no free entry" in error.message, error
        print(len(os.listdir("/proc/self/fd")) - before - imported)
        """,
        MEMSAVER_HOST_DEVICE="16MiB",
    )
    assert int(said) == 0


@pytest.mark.parametrize("kind", ["error", "memory"])
def test_a_switch_that_fails_after_its_commit_names_discarded_contents(make: Make, kind: str) -> None:
    """The error names the regions whose contents policy "none" discarded before the failure."""
    out, into = make(), make(backup="host")
    held = [Block(out, 4 * MIB), Block(into, 4 * MIB)]
    held[1].fill(7)
    into.pause()
    named = False
    for nth in range(1, 40):
        controls.arm(nth, kind)
        try:
            memsaver.switch(pause=out.tag, resume=into.tag)
        except memsaver.Error as error:
            gone = (out.tag,) if out.state == "paused" else ()
            assert error.discarded == gone
            assert not gone or "nothing has changed" not in str(error)
            assert not gone or str(error).endswith(f"; paused before that: {out.tag!r} (without a backup)")
            assert pickle.loads(pickle.dumps(error)).discarded == gone
            named = named or bool(gone)
        controls.disarm()
        memsaver.resume([out.tag, into.tag])
        held[1].check()
        into.pause()
    assert named
    into.resume()
