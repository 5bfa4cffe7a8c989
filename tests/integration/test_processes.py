"""Several processes on one host device: shared figures, waits for each other, and exits."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator

import pytest

import memsaver
from tests.nursery import Fork
from tests.support import MIB, PAGE, Make, blocks, free_bytes


def fork(size: str) -> Fork:
    return Fork({"MEMSAVER_HOST_DEVICE": size}, "tests.pool_support")


@pytest.fixture
def peer() -> Iterator[Fork]:
    with fork(os.environ["MEMSAVER_HOST_DEVICE"]) as process:
        yield process


def hold(peer: Fork, nbytes: int, backup: str = "host") -> None:
    peer.run(f"region = hold('theirs', {nbytes}, {backup!r}, None).region")


def test_memory_of_one_process_is_used_in_the_other(peer: Fork) -> None:
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


def test_out_of_memory_names_the_process_that_holds_it(make: Make, peer: Fork) -> None:
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


def test_two_processes_that_need_all_memory_take_turns(peer: Fork) -> None:
    """Each asks for more than half: chunks taken one by one would leave both with half of their need."""
    size = str(200 * MIB + os.getpid() % 15 * PAGE)  # hardly that of another run beside this one
    statement = "[(region.resume(memory_timeout=60.0), region.pause()) for _ in range(20)]"
    with fork(size) as one, fork(size) as two:
        for process in (one, two):
            hold(process, 120 * MIB, backup="none")
            process.run("region.pause()")
        for process in (one, two):
            process.send(statement)
        for process in (one, two):
            process.answer()
        for process in (one, two):
            assert process.run("print(memsaver.stats().devices['cpu'].free_bytes)") == size
