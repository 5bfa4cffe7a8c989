"""The entry points that torch's pluggable allocator calls, called as torch calls them."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable

import pytest

import memsaver
from memsaver import _core
from tests.support import MIB, PAGE, Fill, Hooks, free_bytes, run_clean, segments

Make = Callable[..., memsaver.Region]


def test_each_region_has_a_pair_of_its_own(make: Make) -> None:
    one, two = make(), make()
    assert one._core.hooks() == one._core.hooks()
    assert set(one._core.hooks()).isdisjoint(two._core.hooks())


def test_which_region_an_allocation_joins_follows_from_the_entry_point(make: Make) -> None:
    one, two = make(), make()
    first, second = Hooks(one), Hooks(two)
    address = second.alloc(PAGE)
    assert address is not None
    assert (one.allocated_bytes, two.allocated_bytes) == (0, PAGE)
    assert two._core.base <= address < two._core.base + two._core.span
    first.free(address)  # a foreign pointer: not its region's
    assert two.allocated_bytes == PAGE
    second.free(address)
    assert two.allocated_bytes == 0


def test_memory_from_the_hooks_is_there_and_kept(make: Make) -> None:
    region = make("host")
    hooks = Hooks(region)
    address = hooks.alloc(20 * MIB)
    assert address is not None
    ctypes.memset(address, 7, 20 * MIB)
    region.pause()
    region.resume()
    assert ctypes.string_at(address, 20 * MIB) == b"\x07" * (20 * MIB)
    hooks.free(address)


def test_segments_lie_side_by_side_at_whole_pages(make: Make) -> None:
    region = make()
    hooks = Hooks(region)
    sizes = [PAGE, 20 * MIB, PAGE, PAGE, 32 * MIB, 10 * PAGE]  # as torch's caching allocator asks
    addresses = [hooks.alloc(size) for size in sizes]
    expected = region._core.base
    for address, size in zip(addresses, sizes):
        assert address == expected
        expected += size
    assert segments(region) == [(0, sum(sizes))]
    for address in addresses:
        hooks.free(address)


def test_what_cannot_be_had_is_null(make: Make) -> None:
    region = make()
    hooks = Hooks(region)
    for nbytes in (0, -1, 1 << 40, (1 << 63) - 1):
        assert hooks.alloc(nbytes) is None
    with Fill(leave=PAGE):
        assert hooks.alloc(PAGE + 1) is None
        address = hooks.alloc(PAGE)
        assert address is not None
    assert region.allocated_bytes == PAGE
    hooks.free(address)


def test_a_paused_region_gives_null_and_takes_frees(make: Make) -> None:
    region = make("host")
    hooks = Hooks(region)
    first, second = hooks.alloc(PAGE), hooks.alloc(PAGE)
    region.pause()
    assert hooks.alloc(PAGE) is None
    hooks.free(first)
    assert region.allocated_bytes == PAGE
    region.resume()
    assert hooks.alloc(PAGE) == first
    hooks.free(first)
    hooks.free(second)


def test_pointers_that_are_nobodys_are_passed_over(make: Make) -> None:
    region = make()
    hooks = Hooks(region)
    address = hooks.alloc(2 * PAGE)
    assert address is not None
    own = ctypes.create_string_buffer(100)
    for pointer in (None, 1, ctypes.addressof(own), address + 512, region._core.base + region._core.span):
        hooks.free(pointer)
    assert region.allocated_bytes == 2 * PAGE
    hooks.free(address)


def test_retained_chunks_are_given_up_before_torch_gets_null(make: Make) -> None:
    memsaver.configure(retain="1GiB")
    giver, taker = Hooks(make()), Hooks(make())
    giver.free(giver.alloc(32 * MIB))
    with Fill():
        address = taker.alloc(3 * PAGE)
        assert address is not None
        taker.free(address)


def test_the_refusing_pair_refuses() -> None:
    library = ctypes.CDLL(_core.__file__)
    library.memsaver_alloc_refused.restype = ctypes.c_void_p
    library.memsaver_alloc_refused.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    assert library.memsaver_alloc_refused(PAGE, 0, None) is None
    library.memsaver_free_refused.restype = None
    library.memsaver_free_refused.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    library.memsaver_free_refused(None, 0, 0, None)


def test_threads_allocate_and_free_while_others_pause(make: Make) -> None:
    region = make("host")
    hooks = Hooks(region)
    before = free_bytes()
    stop = threading.Event()
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        held: list[tuple[int, int, int]] = []
        while not stop.is_set() or held:
            if held and (stop.is_set() or rng.random() < 0.5):
                address, nbytes, value = held.pop(rng.randrange(len(held)))
                if _core.acquire([region._core]) is None:  # as a launch would: its memory is there meanwhile
                    if ctypes.string_at(address, nbytes) != bytes([value]) * nbytes:
                        wrong.append(address)
                    _core.release([region._core])
                hooks.free(address)
                continue
            nbytes, value = rng.choice([512, 4096, PAGE]), rng.randrange(256)
            if _core.acquire([region._core]) is not None:
                hooks.free(hooks.alloc(nbytes))  # null, or resumed in between: without contents
                continue
            taken = hooks.alloc(nbytes)
            if taken is not None:
                ctypes.memset(taken, value, nbytes)
                held.append((taken, nbytes, value))
            _core.release([region._core])

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        region.pause()
        region.resume()
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (region.allocated_bytes, region.mapped_bytes, free_bytes()) == (0, 0, before)


def test_there_are_so_many_pairs_and_then_a_clear_error() -> None:
    out = run_clean("""
        import memsaver
        names = {memsaver.region(f"r{i}", device="cpu")._core.hooks() for i in range(256)}
        try:
            memsaver.region("one too many", device="cpu")._core.hooks()
        except memsaver.ConfigError as error:
            print(len(names), error)
    """)
    assert out.startswith("256 region 'one too many' is one too many")


def test_frees_while_the_interpreter_goes_down_are_harmless() -> None:
    run_clean("""
        import atexit, ctypes, memsaver
        region = memsaver.region("a", device="cpu")
        library = ctypes.CDLL(memsaver._core.__file__)
        alloc_name, free_name = region._core.hooks()
        alloc, free = library[alloc_name], library[free_name]
        alloc.restype, alloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        addresses = [alloc(2 << 20, 0, None) for _ in range(10)]
        atexit.register(lambda: [free(address, 2 << 20, 0, None) for address in addresses[:5]])
        class Late:
            def __init__(self): self.free = free
            def __del__(self): self.free(addresses_of_late, 2 << 20, 0, None)
        addresses_of_late = addresses[7]
        import sys
        sys.late = Late()
        region.pause()
    """)


@pytest.mark.parametrize("backup", ["none", "host"])
def test_frees_in_a_forked_child_are_harmless(backup: str) -> None:
    run_clean(f"""
        import ctypes, os, memsaver
        region = memsaver.region("a", device="cpu", backup={backup!r})
        library = ctypes.CDLL(memsaver._core.__file__)
        alloc_name, free_name = region._core.hooks()
        alloc, free = library[alloc_name], library[free_name]
        alloc.restype, alloc.argtypes = ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        free.restype, free.argtypes = None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        address = alloc(2 << 20, 0, None)
        child = os.fork()
        if child == 0:
            free(address, 2 << 20, 0, None)
            os._exit(0 if alloc(2 << 20, 0, None) is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert region.allocated_bytes == 2 << 20
        free(address, 2 << 20, 0, None)
        assert region.allocated_bytes == 0
    """)
