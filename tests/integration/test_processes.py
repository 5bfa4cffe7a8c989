"""Several processes on one host device: shared figures, waits for each other, and exits."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator

import pytest

import memsaver
from tests.support import MIB, PAGE, Make, Peer, blocks, free_bytes


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as process:
        yield process


def hold(peer: Peer, nbytes: int, tag: str = "theirs", backup: str = "host") -> None:
    peer.run(f"region = memsaver.region({tag!r}, device='cpu', backup={backup!r})")
    peer.run(f"held = region._core.allocate_array({nbytes})")


def test_memory_of_one_process_is_used_in_the_other(peer: Peer) -> None:
    """Also that of retained chunks, until the process releases them or is killed."""
    before = free_bytes()
    peer.run("memsaver.configure(retain='64MiB')")
    hold(peer, 64 * MIB)
    assert free_bytes() == before - 64 * MIB
    peer.run("region.pause()")
    assert free_bytes() == before - 64 * MIB
    peer.run("memsaver.configure(retain=0)")
    assert free_bytes() == before
    peer.run("region.resume()")
    assert free_bytes() == before - 64 * MIB
    peer.kill()
    assert free_bytes() == before


def test_out_of_memory_names_the_process_that_holds_it(make: Make, peer: Peer) -> None:
    """A resume waits for its memory up to the bound."""
    region = make("host")
    held = blocks(region, [40 * MIB])
    region.pause()
    hold(peer, free_bytes() // PAGE * PAGE, backup="none")
    with pytest.raises(memsaver.OutOfMemoryError) as caught:
        region.resume()
    error = caught.value
    assert f"(pid {peer.pid})" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert region.state == "paused"
    peer.send("import time; time.sleep(0.1); region.pause()")
    assert region.resume(memory_timeout=60.0).resumed == (region.tag,)
    peer.answer()
    held[0].check()


def test_two_processes_that_need_all_memory_take_turns(peer: Peer) -> None:
    """Each asks for more than half: chunks taken one by one would leave both with half of their need."""
    size = str(200 * MIB + os.getpid() % 15 * PAGE)  # hardly that of another run beside this one
    statement = "[(region.resume(memory_timeout=60.0), region.pause()) for _ in range(20)]"
    with Peer(MEMSAVER_HOST_DEVICE=size) as one, Peer(MEMSAVER_HOST_DEVICE=size) as two:
        for process in (one, two):
            hold(process, 120 * MIB, backup="none")
            process.run("region.pause()")
        for process in (one, two):
            process.send(statement)
        for process in (one, two):
            process.answer()
        for process in (one, two):
            assert process.run("print(memsaver.stats().devices['cpu'].free_bytes)") == size
