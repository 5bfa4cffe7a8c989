"""The entry points that torch's pluggable allocator calls, called as torch calls them."""

from __future__ import annotations

import ctypes
import random
import threading
from concurrent.futures import ThreadPoolExecutor

from memsaver import _core
from tests.support import PAGE, Fill, Hooks, Make, free_bytes, functions, run_clean


def test_the_entry_point_selects_the_region_of_an_allocation(make: Make) -> None:
    """A failed allocation returns null. Wrong frees are ignored."""
    region, other = make("host"), make()
    hooks, of_other = Hooks(region), Hooks(other)
    address = of_other.alloc(PAGE)
    assert address is not None and other.owns(address) and not region.owns(address)
    assert (region.allocated_bytes, other.allocated_bytes) == (0, PAGE)
    hooks.free(address)  # a free finds the region by the address
    assert (region.allocated_bytes, other.allocated_bytes) == (0, 0)
    for nbytes in (0, -1, 1 << 40, (1 << 63) - 1):
        assert hooks.alloc(nbytes) is None
    with Fill(leave=2 * PAGE):
        assert hooks.alloc(2 * PAGE + 1) is None
        first, second = hooks.alloc(PAGE), hooks.alloc(PAGE)
        assert first is not None and second is not None
    own = ctypes.create_string_buffer(100)
    for pointer in (None, 1, ctypes.addressof(own), first + 512, first + (1 << 40)):
        hooks.free(pointer)
    assert region.allocated_bytes == 2 * PAGE
    region.pause()
    assert hooks.alloc(PAGE) is None
    for _ in range(2):  # the second one is of an unknown pointer
        hooks.free(first)
        assert region.allocated_bytes == PAGE
    region.resume()
    assert hooks.alloc(PAGE) == first
    for pointer in (first, first, second):
        hooks.free(pointer)
    assert (region.allocated_bytes, region.mapped_bytes) == (0, 0)
    alloc, free = functions(_core.refusing_entry_points())
    assert alloc(PAGE, 0, None) is None
    free(None, 0, 0, None)


def test_threads_allocate_and_free_while_others_pause(make: Make, threads: ThreadPoolExecutor) -> None:
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

    working = [threads.submit(work, seed) for seed in range(3)]
    for _ in range(30):
        region.pause()
        region.resume()
    stop.set()
    for each in working:
        each.result()
    assert not wrong
    assert (region.allocated_bytes, region.mapped_bytes, free_bytes()) == (0, 0, before)


def test_thousands_of_regions_have_entry_points_and_then_comes_a_clear_error() -> None:
    out = run_clean("""
        import ctypes, memsaver
        alloc_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        made = [memsaver.region(f"r{i}", device="cpu") for i in range(4096)]
        points = {each._core.entry_points()[0] for each in made}
        for each in (made[0], made[255], made[256], made[-1]):
            address = alloc_type(each._core.entry_points()[0])(2 << 20, 0, None)
            assert memsaver._core.region_at(address).tag == each.tag
        try:
            memsaver.region("one too many", device="cpu")._core.entry_points()
        except memsaver.ConfigError as error:
            print(len(points), error)
    """)
    assert out.startswith("4096 region 'one too many' is one too many")
