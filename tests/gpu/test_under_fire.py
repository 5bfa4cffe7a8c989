"""A shared GPU: dead neighbours, freed memory, bounds and a dead context."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import memsaver
from tests.broker_support import Running
from tests.gpu.fixtures import Make
from tests.gpu.processes import in_process
from tests.gpu.timing import cycles_per_second
from tests.gpu.victims import FORKS, MOMENTS, Victim
from tests.pool_support import Worker
from tests.support import GIB, MIB, Hooks, until

pytestmark = pytest.mark.gpu

HELD = 6 * GIB  # by a client that is killed, and by the next owner
KILLS = len(FORKS) * len(MOMENTS)
CHILD_OUTLIVES_S = 0.5
PATIENCE_S = 30.0  # for memory that must come
SLOW = pytest.mark.skipif(
    "MEMSAVER_TEST_SLOW" not in os.environ, reason="takes half a minute: MEMSAVER_TEST_SLOW=1 runs it"
)


@pytest.fixture(autouse=True)
def nothing_held() -> Iterator[None]:
    """Tensors of a test that failed must not fill the device of the next."""
    yield
    torch.cuda.empty_cache()
    memsaver.release_host_memory()


# A dead client's kernels


@pytest.fixture
def broker() -> Iterator[Running]:
    with Running(str(HELD + GIB), "--device", "cuda:0") as running:
        yield running


@pytest.fixture
def heir(broker: Running) -> Iterator[Worker]:
    with Worker(broker, "from tests.gpu.pool_clients import *") as worker:
        worker.run(f"heir = Heir({HELD})")
        yield worker


@pytest.fixture
def victims(broker: Running) -> Iterator[Callable[..., list[Victim]]]:
    """Starts clients, which import torch side by side. Every second one forks before it imports memsaver."""
    with contextlib.ExitStack() as started:

        def start(count: int, first_fork: int = 0) -> list[Victim]:
            made = []
            for number in range(count):
                fork, moment = FORKS[(first_fork + number) % len(FORKS)], MOMENTS[number // 2 % len(MOMENTS)]
                made.append(Victim(broker.environment, HELD, fork, moment))
                started.callback(made[-1].close)
            return made

        yield start


def test_a_dead_clients_kernels_never_meet_the_next_owner(
    broker: Running, victims: Callable[..., list[Victim]], heir: Worker
) -> None:
    early, wrong = [], []
    for number, victim in enumerate(victims(KILLS)):
        which = f"kill {number} (fork {victim.fork}, client {victim.moment})"
        victim.begin()
        heir.send(f"print(heir.take(memory_timeout={PATIENCE_S}))")
        until(lambda: broker.row(heir.pid)["waiting"])
        if victim.moment == "stopped":
            victim.stop()
            time.sleep(CHILD_OUTLIVES_S / 2)
        killed = time.monotonic()
        victim.kill()
        time.sleep(CHILD_OUTLIVES_S)
        child_ended = time.monotonic()
        victim.end_child()
        came, found = heir.answer().split()
        heir.run("heir.region.pause()")
        after = f"{float(came) - killed:.3f} s after the kill, {float(came) - child_ended:.3f} s after the child's end"
        print(f"{which}: memory came {after}; {found} wrong bytes in ten looks")
        if float(came) < child_ended:
            early.append(which)
        if int(found) > 0:
            wrong.append((which, int(found)))
    assert not wrong, "bytes of the next owner were overwritten"
    assert not early, "memory was lent while a child held it"


def test_a_wait_for_a_dead_clients_memory_names_the_child_that_keeps_it(
    victims: Callable[..., list[Victim]], heir: Worker
) -> None:
    [victim] = victims(1, FORKS.index("after the import"))
    child = victim.begin()
    victim.kill()
    said = heir.fails("heir.take(memory_timeout=1)")
    assert said.startswith("OutOfMemoryError") and re.search(rf"\bpid {child}\b", said), said
    assert str(child) in heir.run("print([row['pid'] for row in error.ledger])")
    assert heir.run("print(heir.region.state)") == "paused"
    victim.end_child()
    assert heir.run(f"print(heir.take(memory_timeout={PATIENCE_S}))").split()[1] == "0"


# Freed memory


@pytest.mark.parametrize("way", ["allocation", "resume"])
@pytest.mark.parametrize("moment", ["the kernel has ended", "the kernel runs"])
def test_freed_memory_serves_another_region(fresh: Make, way: str, moment: str) -> None:
    large = torch.cuda.get_device_properties(0).total_memory * 6 // 10
    a, b = fresh("a"), fresh("b")
    if way == "resume":
        wanted = b.empty((large,), torch.uint8)
        b.pause()
    with a:
        held = [torch.empty(large, dtype=torch.uint8, device="cuda")]
        small = torch.ones(1000, device="cuda")
    torch.cuda.empty_cache()  # releases the memory of torch's own pool now: later this would wait for the kernel below
    memsaver.trim(a.tag)
    cycles = int(0.6 * cycles_per_second())  # well within the second for which an allocation waits

    ended = torch.cuda.Event()
    torch.cuda._sleep(cycles)
    ended.record()
    held.clear()
    torch.cuda.empty_cache()
    assert not ended.query() and a.allocated_bytes < large <= a.mapped_bytes, "nothing rests"
    if moment == "the kernel has ended":
        ended.synchronize()
    if way == "resume":
        b.resume(memory_timeout=PATIENCE_S if moment == "the kernel runs" else 0)
    else:
        wanted = b.empty((large,), torch.uint8)
    assert ended.query()
    wanted.fill_(3)
    assert a.mapped_bytes < large
    assert bool((small == 1).all()) and int(wanted[-1]) == 3


@pytest.mark.parametrize("backup", ["none", "host"])
def test_a_resume_compacts_the_remaining_tensors(fresh: Make, backup: str) -> None:
    count, nbytes, every = 600, 24 * MIB, 40
    region, pool = fresh("left", backup), fresh("graph", "host")
    with region:
        tensors = [torch.full((nbytes // 8,), number, dtype=torch.int64, device="cuda") for number in range(count)]
    kept = dict(list(enumerate(tensors))[::every])
    addresses = [tensor.data_ptr() for tensor in kept.values()]
    result = torch.zeros_like(kept[3 * every])
    result.copy_(kept[3 * every] * 3 + 1)  # the kernels are loaded
    graph = memsaver.CUDAGraph()
    with memsaver.graph(graph, region=pool, needs=[region]):
        result.copy_(kept[3 * every] * 3 + 1)
    del tensors

    before = region.mapped_bytes
    memsaver.trim(region.tag)
    memsaver.pause(region.tag, backup="host")
    memsaver.resume(region.tag)
    print(f"{before / MIB:.0f} MiB mapped before, {region.mapped_bytes / MIB:.0f} after")
    assert region.allocated_bytes == len(kept) * nbytes
    assert region.mapped_bytes <= 1.05 * len(kept) * nbytes + 48 * MIB  # 426 MiB

    def check() -> None:
        assert [tensor.data_ptr() for tensor in kept.values()] == addresses
        assert all(bool((tensor == number).all()) for number, tensor in kept.items())
        result.zero_()
        graph.replay()
        assert bool((result == 3 * every * 3 + 1).all())

    check()
    if backup == "host":
        memsaver.pause([region.tag, pool.tag])
        memsaver.resume([region.tag, pool.tag])
        check()
    with region:  # the address ranges that remained can be allocated again
        again = torch.full((GIB // 8,), 5, dtype=torch.int64, device="cuda")
    assert bool((again == 5).all())
    check()


def test_a_free_leaves_a_capture_alone_that_torch_did_not_begin(fresh: Make) -> None:
    region = fresh("freed")
    hooks = Hooks(region)
    address = hooks.alloc(64 * MIB)
    value = torch.zeros(1000, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        value.add_(1)
    torch.cuda.synchronize()
    driver, graph = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    with memsaver.capturing():
        assert driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream.cuda_stream), 0) == 0  # mode: global
        with torch.cuda.stream(stream):
            value.add_(1)
        hooks.free(address)
        assert driver.cuStreamEndCapture(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(graph)) == 0
    assert graph.value
    assert driver.cuGraphDestroy(graph) == 0
    memsaver.trim(region.tag)
    assert region.mapped_bytes == 0
    assert bool((value == 1).all())  # the captured kernel did not run


# Bounds, a context that has died, several devices: in processes of their own


def test_a_bounded_pause_behind_a_kernel_raises_and_changes_nothing() -> None:
    in_process("pause_behind_a_kernel(kernel_s=2, timeout=0.4)")


@SLOW
def test_a_bounded_pause_behind_a_kernel_of_twenty_seconds_raises_in_time() -> None:
    in_process("pause_behind_a_kernel(kernel_s=20, timeout=1)")


def test_contents_are_read_whole_after_an_illegal_access(tmp_path: Path) -> None:
    in_process(f"read_after_an_illegal_access({str(tmp_path)!r})")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU only")
@pytest.mark.parametrize("first", [0, 1])
def test_copies_and_kernels_between_regions_of_two_devices_keep_contents(first: int) -> None:
    in_process(f"copies_between_devices({first})")
