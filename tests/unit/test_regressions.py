"""Faults of earlier versions, each in its smallest form."""

from __future__ import annotations

import pickle

import pytest

import memsaver
from tests import controls
from tests.support import MIB, Block, Fill, Make, run_clean


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
