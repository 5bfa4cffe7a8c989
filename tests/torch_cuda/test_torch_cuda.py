"""Regions and the default pool with torch's own CUDA allocator, for each version that ``make test-torch`` names."""

from __future__ import annotations

import pytest

from tests.torch_cuda import VERSIONS, folder, release, run

if not VERSIONS:
    pytest.skip("`make test-torch` runs them with torch's CUDA wheels", allow_module_level=True)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    if not folder(found).exists():
        pytest.skip(f"torch {found} is not in {folder(found)}: see tools/torch_wheels.py")
    return found


@pytest.fixture
def with_default_pool(version: str) -> str:
    """A version with regions beside expandable segments."""
    if release(version) < (2, 10):
        pytest.skip("torch before 2.10 has no regions beside expandable segments")
    return version


def test_contents_return_and_graphs_replay(version: str) -> None:
    """Copies are nodes of the graph, and end late."""
    run(
        version,
        """
        weights, kv = memsaver.region("weights", backup="host"), memsaver.region("kv")
        with weights:
            kept, small = full(50, 1), torch.empty(100, device="cuda")
            with memsaver.outside():
                outer = full(5, 9)
        cache = kv.empty((16 * MIB,), torch.uint8)
        graph = memsaver.CUDAGraph()
        with memsaver.graph(graph, region="graphs", needs=["kv"]):
            out = cache.clone()
        for turn in (3, 4):
            cache.copy_(torch.full((16 * MIB,), turn, dtype=torch.uint8))
            graph.replay()
            assert holds(out, turn)
            memsaver.pause()
            try:
                graph.replay()
                raise AssertionError("a replay without memory")
            except memsaver.RegionPausedError:
                pass
            memsaver.resume()
            assert holds(kept, 1) and holds(outer, 9) and holds(out, turn)
        assert weights.owns(small.data_ptr()) and not weights.owns(outer.data_ptr())
        del kept, small
        memsaver.trim()
        assert weights.mapped_bytes == 0
        """,
        late=True,
    )


def test_graphs_of_several_devices_lie_in_their_regions(version: str) -> None:
    """torch makes one stream for captures, and captures on its device."""
    run(
        version,
        """
        kept = []
        for index in (0, 1):
            region = memsaver.region("graphs", device=f"cuda:{index}", backup="host")
            source, graph = full(1, 5, f"cuda:{index}"), memsaver.CUDAGraph()
            try:
                with memsaver.graph(graph, region=region, stream=torch.cuda.Stream(1 - index)):
                    raise AssertionError("a capture on another device")
            except ValueError as error:
                assert f"cuda:{1 - index}" in str(error)
            with memsaver.graph(graph, region=region):
                out = source.clone()
            assert region.owns(out.data_ptr())
            kept.append((source, graph, out))
        for source, graph, out in kept:
            source.copy_(torch.full((MIB,), 7, dtype=torch.uint8))
            graph.replay()
            assert holds(out, 7)
        """,
        count=2,
    )


def test_a_graph_that_was_reset_needs_the_regions_of_its_next_capture_alone(version: str) -> None:
    run(
        version,
        """
        first, second, kv = memsaver.region("first"), memsaver.region("second"), memsaver.region("kv")
        source, graph = full(1, 3), memsaver.CUDAGraph()
        with memsaver.graph(graph, region=first, needs=kv):
            out = source.clone()
        graph.reset()
        with memsaver.graph(graph, region=second):
            out = source.clone()
        kv.pause(), first.close()
        graph.replay()
        assert holds(out, 3) and graph.needs == (second,)
        """,
    )


def test_regions_before_2_10_refuse_expandable_segments(version: str) -> None:
    if release(version) >= (2, 10):
        pytest.skip("torch has regions beside expandable segments")
    run(
        version,
        """
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        for act in (lambda: memsaver.region("w").empty(5), lambda: memsaver.region("g").pool, memsaver.default_pool):
            try:
                act()
                raise AssertionError("no error")
            except memsaver.Error as error:
                assert "2.10 or newer" in str(error), error
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
        assert memsaver.region("w").empty(5).numel() == 5
        """,
    )


def test_tensors_made_beside_the_paused_pool_are_freed_one_by_one(with_default_pool: str) -> None:
    """torch frees a pool over expandable segments that is dropped while a tensor has a part of one."""
    run(
        with_default_pool,
        """
        region = memsaver.default_pool()
        kept = full(100, 1)
        for turn in range(3):
            memsaver.pause("torch")
            whole = full(256, 2)
            del whole
            parts = [full(64, value) for value in (3, 4, 5)]
            memsaver.resume("torch")
            reserved = torch.cuda.memory_reserved()
            while parts:
                torch.cuda.empty_cache()
                assert all(holds(part, 6 - len(parts) + at) for at, part in enumerate(parts))
                del parts[0]
            torch.cuda.empty_cache()
            assert torch.cuda.memory_reserved() <= reserved - 192 * MIB, "the segment stays"
            assert holds(kept, 1)
        """,
    )


def test_threads_and_streams_beside_pauses(with_default_pool: str) -> None:
    run(
        with_default_pool,
        """
        import random, traceback
        default, region = memsaver.default_pool(), memsaver.region("w", backup="host")
        kept = [full(mib, mib) for mib in (1, 3, 40, 90)]
        with region:
            weights = full(64, 7)
        errors, stop, beside = [], False, [0]
        def work(seed):
            choose, streams, held = random.Random(seed), [torch.cuda.Stream() for _ in range(3)], []
            try:
                while not stop:
                    with torch.cuda.stream(choose.choice(streams)):
                        size = choose.choice([1000, 300_000, 3 * MIB, 20 * MIB, 70 * MIB])
                        block = torch.empty(size, dtype=torch.uint8, device="cuda")
                        if not default.owns(block.data_ptr()):  # made beside the paused pool: may be used at any time
                            block[:1000].copy_(torch.full((1000,), seed, dtype=torch.uint8))
                            assert bool((block[:1000].cpu() == seed).all())
                            beside[0] += 1
                    if choose.random() < 0.1:
                        block.record_stream(choose.choice(streams))
                    if choose.random() < 0.4:
                        held.append(block)
                    del block, held[:-5]
                    if choose.random() < 0.05:
                        torch.cuda.empty_cache()
                    time.sleep(0.001)
            except BaseException:
                errors.append(traceback.format_exc())
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 4)]
        for each in threads:
            each.start()
        for turn in range(15):
            count = beside[0]
            memsaver.pause("torch")
            while beside[0] < count + 30 and not errors:
                time.sleep(0.001)
            if turn % 2:
                memsaver.switch(pause="w", resume="torch")
            memsaver.resume()
            if errors or not (holds(weights, 7) and all(holds(t, m) for t, m in zip(kept, (1, 3, 40, 90)))):
                errors.append(f"contents differ in turn {turn}")
                break
        stop = True
        for each in threads:
            each.join(20)
        assert not errors, errors[0]
        del kept
        torch.cuda.empty_cache()
        assert default.mapped_bytes == default.allocated_bytes == 0
        """,
        late=True,
        memory=140 << 30,
    )


@pytest.mark.parametrize("act", ["pause", "trim", "close"])
def test_pools_end_while_a_thread_is_inside_a_pool_of_its_own(version: str, act: str) -> None:
    """Up to 2.12 torch ends the process if a pool is destroyed while a thread is routed."""
    if act == "pause" and release(version) < (2, 10):
        pytest.skip("torch before 2.10 has no regions beside expandable segments")
    run(
        version,
        f"act = {act!r}"
        + """
inside, leave, found = threading.Event(), threading.Event(), []
def other():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        block = full(1, 5)
        inside.set(), leave.wait(60)
        found.append(holds(block, 5))
        found.append(full(1, 6).numel() == MIB)
    del block
region = memsaver.default_pool() if act == "pause" else memsaver.region("w")
if act != "pause":
    with region:
        block = torch.empty(MIB, device="cuda")
    del block
kept, cached = full(30, 1), full(300, 2)
thread = threading.Thread(target=other)
thread.start(), inside.wait(60)
del cached
if act == "pause":
    for _ in range(3):
        memsaver.pause("torch")
        beside = full(3, 4)
        memsaver.resume("torch")
        assert holds(beside, 4)
else:
    memsaver.trim() if act == "trim" else region.close()
    assert act == "close" or region.mapped_bytes == 0
leave.set(), thread.join()
assert found == [True, True] and holds(kept, 1)
""",
    )


def test_autograds_threads_get_no_block_of_the_paused_pool(with_default_pool: str) -> None:
    """They run without the GIL. A block of the paused pool has no memory."""
    run(
        with_default_pool,
        """
        default, weights = memsaver.default_pool(), memsaver.region("weights")
        cached = [torch.empty(16 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
        del cached
        with weights:
            held = torch.empty(4 * MIB, device="cuda", requires_grad=True)
        memsaver.pause("torch")
        wrong, backwards, stop, errors = 0, 0, False, []
        def train():
            global wrong, backwards
            while not stop:
                loss = held * 1.0 * 2.0
                (gradient,) = torch.autograd.grad(loss, held, torch.empty_like(loss))
                backwards += 1
                wrong += default.owns(gradient.data_ptr())
                del loss, gradient
        thread = threading.Thread(target=train)
        thread.start()
        ends = 0
        while (ends < 2000 or backwards < 2000) and not wrong:
            region = memsaver.region(f"r{ends}")
            with region:
                block = torch.empty(MIB, device="cuda")
            del block
            memsaver.trim(region), region.close()
            ends += 1
        stop = True
        thread.join()
        assert not wrong
        """,
    )


def test_no_call_of_the_library_breaks_a_capture(version: str) -> None:
    """Global captures: marks, waits and unsafe calls of any thread break them."""
    run(
        version,
        f"default = {release(version) >= (2, 10)}"
        + """
if default:
    memsaver.default_pool()
weights, kv = memsaver.region("w", backup="host"), memsaver.region("kv")
stop, errors, frees = False, [], [0]
def free():
    while not stop:
        try:
            x, y = weights.empty(5 * MIB), kv.empty(100)
            del x, y
            frees[0] += 1
        except (memsaver.Error, torch.OutOfMemoryError):
            pass
        except BaseException as error:
            errors.append(error)
def capture():
    done = 0
    while done < 150 and not errors:
        graph = memsaver.CUDAGraph() if done % 2 else torch.cuda.CUDAGraph()
        try:
            with memsaver.graph(graph, region="graphs") if done % 2 else torch.cuda.graph(graph):
                x = torch.empty(3 * MIB, device="cuda")
                count = frees[0]
                while frees[0] < count + 2 and not stop and not weights.state != "active" and not errors:
                    time.sleep(0.0005)
            done += 1
        except memsaver.RegionPausedError:
            pass
        except BaseException as error:
            errors.append(error)
threads = [threading.Thread(target=free), threading.Thread(target=capture)]
for each in threads:
    each.start()
while threads[1].is_alive():
    for act in (lambda: memsaver.pause(["kv", "torch"] if default else "kv"), memsaver.trim, memsaver.stats,
                lambda: memsaver.pause("w", backup="none"), memsaver.release_host_memory):
        try:
            act()
        except memsaver.Error:
            pass
    while True:
        try:
            memsaver.resume()
            break
        except memsaver.Error:
            time.sleep(0.001)
    time.sleep(0.002)
stop = True
for each in threads:
    each.join()
assert not errors and controls.broken() == [], (errors, controls.broken())
""",
        late=True,
    )


def test_tensors_freed_while_another_stream_uses_them_are_free(version: str) -> None:
    """torch looks at the events of such blocks in its next allocation outside of pools, or in empty_cache()."""
    run(
        version,
        """
        stream = torch.cuda.Stream()
        def freed(tag):
            region = memsaver.region(tag, backup="host")
            with region:
                used = full(30, 1)
            other = torch.empty_like(used)
            with torch.cuda.stream(stream):
                other.copy_(used, non_blocking=True)
            used.record_stream(stream)
            return region
        assert memsaver.pause(freed("paused")).copied_bytes == 0
        trimmed = freed("trimmed")
        memsaver.trim(trimmed)
        assert trimmed.mapped_bytes == 0
        freed("closed").close()
        """,
        late=True,
    )


def test_a_thread_that_enters_a_region_beside_a_pause_allocates_there(with_default_pool: str) -> None:
    """A pool of all threads that begins after that of a region would take the thread's allocations."""
    run(
        with_default_pool,
        """
        import memsaver._torch.default_pool as module
        from memsaver._torch.routing import router
        from memsaver._torch.routes import routes
        memsaver.default_pool()
        weights = memsaver.region("weights")
        plain, begin, expect = module.plain_allocator, routes.begin, router.expect_pause
        routed, allocated, go = threading.Event(), threading.Event(), threading.Event()
        found = []
        def load():
            with weights:
                found.append(torch.empty(3 * MIB, device="cuda"))
                allocated.set(), go.wait(60)
        thread = threading.Thread(target=load)
        def enters():
            module.plain_allocator = plain
            thread.start(), routed.wait(60)
            return plain()
        def route(*arguments):
            begin(*arguments), routed.set()
        def expected(regions):
            end = expect(regions)
            allocated.wait(60)
            return end
        module.plain_allocator, routes.begin, router.expect_pause = enters, route, expected
        try:
            memsaver.pause("torch")
            raise AssertionError("no error")
        except memsaver.Error as error:
            assert "is inside region 'weights'" in str(error), error
        allocated.wait(60), go.set(), thread.join()
        assert weights.owns(found[0].data_ptr())
        """,
    )


def test_a_thread_inside_a_region_stays_there_when_caches_beside_a_paused_pool_return(with_default_pool: str) -> None:
    run(
        with_default_pool,
        """
        from memsaver._torch.routing import router
        memsaver.default_pool()
        weights = memsaver.region("weights")
        memsaver.pause("torch")
        cached = full(100, 1)
        del cached
        with weights:
            thread = threading.Thread(target=router.return_caches, args=("cuda:0",))
            thread.start(), thread.join()
            block = torch.empty(3 * MIB, device="cuda")
        assert weights.owns(block.data_ptr())
        reserved = torch.cuda.memory_reserved()
        router.return_caches("cuda:0")
        assert torch.cuda.memory_reserved() <= reserved - 100 * MIB, "the cache stays"
        """,
    )


def test_a_capture_that_begins_beside_a_pause_keeps_its_pool(with_default_pool: str) -> None:
    """A pool of all threads that begins after that of a graph would take the graph's allocations."""
    run(
        with_default_pool,
        """
        from memsaver._torch.routes import side_pools
        memsaver.default_pool()
        MemPool, prefer = torch.cuda.MemPool, side_pools.took_precedence
        begun, go, allocated, found = threading.Event(), threading.Event(), threading.Event(), []
        def capture():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                begun.set(), go.wait(60)
                block = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
                allocated.set()
            found.extend([graph, block])
        thread = threading.Thread(target=capture)
        def make(allocator):
            torch.cuda.MemPool = MemPool
            thread.start(), begun.wait(1)  # not reached where captures wait
            return MemPool(allocator)
        def began(index):
            prefer(index), go.set()
            assert not begun.is_set() or allocated.wait(60)
        torch.cuda.MemPool, side_pools.took_precedence = make, began
        try:
            memsaver.pause("torch")
        except memsaver.Error as error:
            assert "being captured" in str(error), error
        thread.join()
        graph, block = found
        segments = torch.cuda.memory_snapshot(graph.pool())
        assert any(each["address"] <= block.data_ptr() < each["address"] + each["total_size"] for each in segments)
        """,
    )


def test_an_allocation_outside_of_a_paused_region_is_out_of_memory(version: str) -> None:
    """The innermost with statement tells why an allocation has failed."""
    run(
        version,
        """
        import contextlib
        trainer, engine = memsaver.region("trainer"), memsaver.region("engine")
        for inner, expected in (
            (engine, torch.OutOfMemoryError),
            (memsaver.outside(), torch.OutOfMemoryError),
            (contextlib.nullcontext(), memsaver.RegionPausedError),
        ):
            try:
                with trainer, inner:
                    trainer.pause()
                    torch.empty(1 << 40, device="cuda")
                raise AssertionError("no error")
            except (torch.OutOfMemoryError, memsaver.RegionPausedError) as error:
                assert type(error) is expected, repr(error)
            trainer.resume()
        """,
    )


def test_a_region_is_not_closed_while_another_thread_leaves_or_enters_it(version: str) -> None:
    run(
        version,
        """
        from memsaver._torch.routing import router
        from memsaver._torch.routes import routes
        region, end, forget, errors = memsaver.region("w"), routes.end, router.forget, []
        inside, leave, leaves, go = (threading.Event() for _ in range(4))
        def use():
            try:
                with region:
                    assert region.owns(torch.empty(MIB, device="cuda").data_ptr())
                    inside.set(), leave.wait(60)
                torch.empty(MIB, device="cuda")
            except BaseException as error:
                errors.append(error)
        def ends(*arguments):
            leaves.set(), go.wait(60)
            end(*arguments)
        def refused(text):
            try:
                region.close()
                raise AssertionError("it is closed")
            except memsaver.Error as error:
                assert text in str(error), error
        def enters(region):
            threads[1].start(), inside.wait(60)
            return forget(region)
        threads = [threading.Thread(target=use) for _ in range(2)]
        threads[0].start(), inside.wait(60)
        routes.end = ends
        leave.set(), leaves.wait(60)
        refused("or leaves it")
        routes.end = end
        go.set(), threads[0].join()
        inside.clear(), leave.clear()
        router.forget = enters  # after the checks
        refused("is inside it")
        router.forget = forget
        leave.set(), threads[1].join()
        assert not errors, repr(errors)
        region.close()
        """,
    )


def test_two_threads_allocate_in_a_region_of_torch_memory_saver(version: str) -> None:
    """torch refuses to route two threads to one pool."""
    run(
        version,
        """
        from memsaver import regions
        from torch_memory_saver import torch_memory_saver as saver
        both, found = threading.Barrier(2), []
        def load(value):
            with saver.region("weights", enable_cpu_backup=True):
                both.wait(60)
                found.append((full(3, value), value))
                both.wait(60)
                found.append((full(3, value), value))
        threads = [threading.Thread(target=load, args=(value,)) for value in (1, 2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        saver.pause("weights")
        saver.resume("weights")
        assert len(found) == 4 and all(holds(*each) for each in found)
        assert {regions.owning(each.data_ptr()).tag for each, _ in found} == {"tms.weights"}
        found.clear()
        saver.pause("weights")
        assert memsaver.history()[-1].copied_bytes == 0, "free blocks of a pool were copied"
        """,
        preload=True,
    )


def test_a_function_that_process_groups_replace_takes_torchs_arguments(version: str) -> None:
    run(
        version,
        """
        import inspect
        import torch.distributed.distributed_c10d as c10d
        from memsaver.guests import process_groups
        arguments = inspect.signature(c10d._get_split_source).parameters
        assert process_groups._no_split_source(*arguments) is None
        """,
    )
