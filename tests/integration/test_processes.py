"""Several processes on one host device: they see one memory, wait for each other, and outlive each other."""

from __future__ import annotations

import ctypes
import os
import pickle
from collections.abc import Callable, Iterator

import pytest

import memsaver
from memsaver import _core
from tests.support import MIB, PAGE, Fill, Peer, blocks, free_bytes

Make = Callable[..., memsaver.Region]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as process:
        yield process


def hold(peer: Peer, nbytes: int, tag: str = "theirs", backup: str = "host") -> None:
    peer.run(f"region = memsaver.region({tag!r}, device='cpu', backup={backup!r})")
    peer.run(f"held = region._core.allocate_array({nbytes})")


def row_of(pid: int) -> dict[str, object] | None:
    rows = memsaver.stats()["devices"]["cpu"]["processes"]
    return next((row for row in rows if row["pid"] == pid), None)


def test_both_see_one_device(peer: Peer) -> None:
    driver = _core.open_driver("cpu")
    uuid, total, free = peer.run(
        "driver = _core.open_driver('cpu'); print(driver.uuid(), driver.memory()[1], driver.memory()[0])"
    ).split()
    assert (uuid, int(total), int(free)) == (driver.uuid(), driver.memory()[1], free_bytes())


def test_what_one_holds_the_other_sees_taken(peer: Peer) -> None:
    before = free_bytes()
    assert row_of(peer.pid) is None
    hold(peer, 64 * MIB)
    assert free_bytes() == before - 64 * MIB
    row = row_of(peer.pid)
    assert row is not None
    assert (row["bytes"], row["pid"]) == (64 * MIB, peer.pid)
    assert isinstance(row["name"], str) and row["name"]
    assert row_of(os.getpid()) is None  # only the others
    peer.run("region.pause()")
    assert free_bytes() == before
    assert row_of(peer.pid) is None


def test_devices_of_other_sizes_are_other_devices(peer: Peer) -> None:
    with Peer(MEMSAVER_HOST_DEVICE="64MiB") as other:
        uuid = other.run("print(_core.open_driver('cpu').uuid())")
        assert uuid != peer.run("print(_core.open_driver('cpu').uuid())")


def test_memory_that_a_pause_gives_goes_to_the_other_process(make: Make, peer: Peer) -> None:
    region = make("host")
    held = blocks(region, [50 * MIB, 100])
    hold(peer, 48 * MIB)
    peer.run("import ctypes; ctypes.memset(region._core.base, 5, 48 << 20)")
    peer.run("region.pause()")
    with Fill():
        for _ in range(3):
            region.pause()
            peer.run("region.resume()")
            assert peer.run("print(ctypes.string_at(region._core.base, 48 << 20) == b'\\5' * (48 << 20))") == "True"
            with pytest.raises(memsaver.OutOfMemoryError):
                region.resume()
            peer.run("region.pause()")
            region.resume()
            for block in held:
                block.check()


def test_out_of_memory_names_the_process_that_holds_it(make: Make, peer: Peer) -> None:
    region = make("host")
    held = blocks(region, [40 * MIB])
    region.pause()
    theirs = (free_bytes() - 10 * MIB) // PAGE * PAGE
    hold(peer, theirs, backup="none")
    with pytest.raises(memsaver.OutOfMemoryError) as caught:
        region.resume()
    error = caught.value
    pid, name, nbytes = next(row for row in error.processes if row[0] == peer.pid)
    assert nbytes >= theirs
    assert f"{name} (pid {pid})" in str(error)
    assert region.state == "paused"
    assert pickle.loads(pickle.dumps(error)).processes == error.processes
    peer.run("region.pause()")
    region.resume()
    held[0].check()


def test_a_resume_waits_for_the_process_that_lets_go(make: Make, peer: Peer) -> None:
    region = make("host")
    held = blocks(region, [40 * MIB])
    region.pause()
    hold(peer, free_bytes() // PAGE * PAGE, backup="none")
    with pytest.raises(memsaver.OutOfMemoryError):
        region.resume()
    peer.send("import time; time.sleep(0.1); region.pause()")
    assert region.resume(timeout=60.0).resumed == (region.tag,)
    peer.answer()
    held[0].check()


def test_a_killed_process_leaves_its_memory_to_the_others(make: Make, peer: Peer) -> None:
    before = free_bytes()
    hold(peer, 64 * MIB)
    assert free_bytes() == before - 64 * MIB
    peer.kill()
    assert free_bytes() == before
    assert row_of(peer.pid) is None


def test_an_allocation_can_have_what_a_killed_process_held(make: Make, peer: Peer) -> None:
    region = make()
    hold(peer, free_bytes() - 4 * MIB, backup="none")
    with pytest.raises(memsaver.OutOfMemoryError):
        blocks(region, [40 * MIB])
    peer.kill()
    blocks(region, [40 * MIB])[0].check()


def test_a_resume_that_waits_gets_what_a_killed_process_held(make: Make, peer: Peer) -> None:
    region = make("host")
    held = blocks(region, [40 * MIB])
    region.pause()
    hold(peer, free_bytes() // PAGE * PAGE, backup="none")
    peer.send("import os, time; time.sleep(0.1); os.kill(os.getpid(), 9)")
    region.resume(timeout=60.0)
    held[0].check()


def test_a_process_killed_in_the_middle_of_transitions_leaves_nothing(make: Make) -> None:
    before = free_bytes()
    for _ in range(5):
        with Peer() as victim:
            hold(victim, 30 * MIB)
            victim.send("print('go', flush=True)\nwhile True: region.pause(); region.resume()\n")
            assert victim.process.stdout is not None
            assert victim.process.stdout.readline() == "go\n"
            victim.kill()
        assert free_bytes() == before
    region = make()
    blocks(region, [3 * MIB])[0].check()


def test_retained_chunks_are_taken_for_the_others(make: Make, peer: Peer) -> None:
    before = free_bytes()
    peer.run("memsaver.configure(retain='64MiB')")
    hold(peer, 32 * MIB)
    peer.run("region.pause()")
    assert free_bytes() == before - 32 * MIB
    peer.run("memsaver.configure(retain=0)")
    assert free_bytes() == before


def test_two_that_want_everything_take_turns(peer: Peer) -> None:
    """Each asks for more than half: chunks taken piecemeal would leave both with half of what they need."""
    size = str(200 * MIB + os.getpid() % 15 * PAGE)  # hardly that of another run beside this one
    statement = "[(region.resume(timeout=60.0), region.pause()) for _ in range(20)]"
    with Peer(MEMSAVER_HOST_DEVICE=size) as one, Peer(MEMSAVER_HOST_DEVICE=size) as two:
        for process in (one, two):
            hold(process, 120 * MIB, backup="none")
            process.run("region.pause()")
        for process in (one, two):
            process.send(statement)
        for process in (one, two):
            process.answer()
        for process in (one, two):
            assert process.run("print(memsaver.stats()['devices']['cpu']['free_bytes'])") == size


def test_a_chunk_crosses_to_another_process_by_descriptor(peer: Peer) -> None:
    driver = _core.open_driver("cpu")
    before = free_bytes()
    handle = driver.create(PAGE)
    address = driver.reserve(PAGE)
    driver.map(address, PAGE, handle)
    driver.allow(address, PAGE)
    file = driver.export_fd(handle)
    peer.run("import os, ctypes; driver = _core.open_driver('cpu')")
    peer.run(f"file = os.open('/proc/{os.getpid()}/fd/{file}', os.O_RDWR)")
    peer.run("handle = driver.import_fd(file, 2 << 20); os.close(file); address = driver.reserve(2 << 20)")
    peer.run("driver.map(address, 2 << 20, handle); driver.allow(address, 2 << 20)")
    peer.run("ctypes.memset(address, 77, 2 << 20)")
    os.close(file)
    assert free_bytes() == before - PAGE  # one chunk, however many hold it
    assert ctypes.string_at(address, PAGE) == b"\x4d" * PAGE
    driver.unmap(address, PAGE)
    driver.release(handle)
    assert free_bytes() == before - PAGE  # the other holds it still
    peer.kill()
    assert free_bytes() == before
    driver.unreserve(address, PAGE)
