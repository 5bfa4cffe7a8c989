"""torch inside regions of the host driver: tensors of factory functions, and tensors of other functions."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import memsaver
from memsaver._torch import routing
from tests.support import Make


def inside(region: memsaver.Region, tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    return region.owns(storage.data_ptr()) and region.owns(storage.data_ptr() + storage.nbytes() - 1)


LIKE = torch.arange(6.0).view(2, 3)
# The arguments of torch's functions, and of methods of a tensor.
FACTORIES: dict[str, tuple[Any, ...]] = {
    "empty": (2, 3), "empty_strided": ((2, 3), (1, 2)), "empty_permuted": ((2, 3, 4), (2, 0, 1)), "empty_like": (LIKE,),
    "zeros": (2, 3), "zeros_like": (LIKE,), "ones": ((2, 3),), "ones_like": (LIKE,), "full": ((2, 3), 7.5),
    "full_like": (LIKE, 3), "arange": (10,), "linspace": (0, 1, 5), "logspace": (0, 1, 5), "eye": (4,),
    "tensor": ([[1, 2], [3, 4]],), "scalar_tensor": (3.0,), "rand": (2, 3), "rand_like": (LIKE,), "randn": (2, 3),
    "randn_like": (LIKE,), "randint": (0, 10, (5,)), "randint_like": (LIKE, 10), "randperm": (10,),
    "new_empty": ((2, 2),), "new_empty_strided": ((2, 2), (1, 2)), "new_zeros": ((2, 2),), "new_ones": ((2, 2),),
    "new_full": ((2, 2), 5), "new_tensor": ([1.0, 2.0],),
}  # fmt: skip
UNDEFINED = {"empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided"}


def test_tensors_of_factories_land_in_the_region_and_equal_those_of_torch(make: Make) -> None:
    region = make("host")
    made, expected = {}, {}
    for name, arguments in FACTORIES.items():
        factory = getattr(LIKE if name.startswith("new_") else torch, name)
        torch.manual_seed(0)
        expected[name] = factory(*arguments)
        torch.manual_seed(0)
        with region:
            made[name] = factory(*arguments)
        assert inside(region, made[name]), name
        assert (made[name].shape, made[name].stride()) == (expected[name].shape, expected[name].stride()), name
        if name in UNDEFINED:
            made[name].fill_(1)
            expected[name].fill_(1)
    region.pause()
    region.resume()
    for name in FACTORIES:
        assert made[name].dtype == expected[name].dtype and torch.equal(made[name], expected[name]), name


def test_an_await_inside_a_with_statement_raises_at_its_end(make: Make) -> None:
    weights = make("host")

    async def loads() -> None:
        with weights:
            torch.ones(4)
            await asyncio.sleep(0)

    async def serves() -> torch.Tensor:
        return torch.ones(4)

    async def nests() -> None:
        with weights, weights:
            torch.ones(4)
        await asyncio.sleep(0)
        with weights:
            torch.ones(4)

    async def fails() -> None:
        with weights:
            await asyncio.sleep(0)
            raise OSError("the own error")

    async def run() -> None:
        with pytest.raises(memsaver.Error, match=f"region {weights.tag!r} was entered during an await"):
            await asyncio.gather(loads(), serves())

    asyncio.run(run())
    asyncio.run(nests())
    assert not inside(weights, torch.ones(4))
    with pytest.raises(OSError, match="the own error"):
        asyncio.run(fails())
    with weights:
        assert inside(weights, torch.ones(4))


def test_other_tensors_are_left_alone_and_modes_of_torch_work_inside(make: Make) -> None:
    region = make("host")
    out = torch.empty(3)
    pointer = out.data_ptr()
    with region:
        assert torch.ones(3, out=out) is out
        torch.arange(3.0, out=out)
        meta = torch.empty(3, device="meta")
        sparse = torch.zeros(3, 3, layout=torch.sparse_coo)
        with torch.device("meta"):
            also_meta = torch.ones(3)
            empty = region.empty((0, 5), torch.bfloat16)
        made = [torch.empty(0), torch.zeros(3, 0), torch.tensor([]), empty]
    assert out.data_ptr() == pointer and sparse.layout == torch.sparse_coo
    assert meta.device.type == also_meta.device.type == "meta" and empty.device.type == "cpu"
    assert [tuple(tensor.shape) for tensor in made] == [(0,), (3, 0), (0,), (0, 5)]
    assert (region.allocated_bytes, region.mapped_bytes) == (0, 0)
    shapes: list[Any] = [(), 5, [2, 3], (2, 0, 3), torch.Size([4, 1]), np.int64(4), (np.int32(2), 3)]
    for shape in shapes:
        tensor, expected = region.empty(shape), torch.empty(shape)
        assert (tensor.shape, tensor.dtype, tensor.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert inside(region, tensor) == (tensor.numel() > 0) and tensor.device.type == "cpu"
    with region:
        leaf = torch.ones(3, requires_grad=True)
        with torch.no_grad():
            second = torch.ones(3)
        with torch.inference_mode():
            third = torch.ones(3)
    assert leaf.is_leaf and all(inside(region, each) for each in (leaf, second, third))
    (leaf * 2).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2, 2, 2]


def test_tensors_without_memory_of_the_host_stay_as_torch_makes_them(make: Make) -> None:
    region = make()
    rows = torch.arange(6.0).view(2, 3)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized = torch.quantize_per_tensor(torch.ones(4), 1.0, 0, torch.qint8)
    with region:
        batched = torch.vmap(lambda row: torch.ones_like(row) + row.new_full((3,), 2) * row)(rows)
        slope = torch.func.grad(lambda row: (torch.zeros_like(row).add(2) * row).sum())(rows[1])
        with FakeTensorMode():
            fake = torch.ones(3, 4) + torch.eye(3, 4)
        also_nested, also_quantized = torch.empty_like(nested), torch.empty_like(quantized)
    assert batched.tolist() == (1 + 2 * rows).tolist() and slope.tolist() == [2, 2, 2]
    assert isinstance(fake, FakeTensor) and fake.shape == (3, 4)
    assert also_nested.is_nested and also_quantized.is_quantized
    assert region.allocated_bytes == 0


def test_the_local_part_of_a_dtensor_lands_in_the_region(make: Make) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        whole = DTensor.from_local(torch.arange(8.0), init_device_mesh("cpu", (1,)), [Shard(0)])
        region = make("host")
        with region:
            local = torch.ones_like(whole).to_local()  # type: ignore[attr-defined]
        assert inside(region, local)
        region.pause()
        region.resume()
        assert local.tolist() == [1.0] * 8
    finally:
        dist.destroy_process_group()


# Entering


def test_regions_nest_and_the_innermost_takes(make: Make) -> None:
    outer, inner = make(), make()
    with outer:
        tensors = [torch.ones(3)]
        with inner:
            tensors.append(torch.ones(3))
            with outer:
                tensors.append(torch.ones(3))
                with memsaver.outside():
                    tensors.append(torch.ones(3))
                    with inner:
                        tensors.append(torch.ones(3))
                    with memsaver.outside():
                        tensors.append(torch.ones(3))
                with outer:
                    tensors.append(torch.ones(3))
            tensors.append(torch.ones(3))
        tensors.append(torch.ones(3))
        with pytest.raises(memsaver.Error, match=f"region {inner.tag!r} cannot be left: this thread is not inside it"):
            inner.__exit__(None, None, None)
        tensors.append(torch.ones(3))
    with pytest.raises(KeyError), outer, memsaver.outside(), outer:
        raise KeyError
    tensors.append(torch.ones(3))
    # Coroutines of one thread, each with a region of its own, leave in any order.
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    tensors.append(torch.ones(3))
    inner.__exit__(None, None, None)
    tensors.append(torch.ones(3))
    places = ["outer" if inside(outer, each) else "inner" if inside(inner, each) else "-" for each in tensors]
    expected = ["outer", "inner", "outer", "-", "inner", "-", "outer", "inner", "outer", "outer", "-", "inner", "-"]
    assert places == expected


def test_a_thread_that_ended_inside_a_region_counts_as_having_left(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also for torch: its route ends, and its pool is idle, although torch refuses to end another route."""
    region, closed, *others = (make() for _ in range(4))
    adapter = memsaver._adapter.adapter()
    ended: list[object] = []
    pools: Any = SimpleNamespace(take_back=ended.append, free_blocks=list)

    def end(index: int, pool: object) -> None:
        ended.append(index)
        if index == 3:
            raise RuntimeError("of torch")

    monkeypatch.setattr(routing, "routes", SimpleNamespace(end=end))
    monkeypatch.setitem(adapter._pools, region, pools)
    is_inside, until_end = threading.Event(), threading.Event()

    def inside() -> None:
        region.__enter__()
        pool: Any = "pool"
        adapter.thread.routed.update({torch.device("cuda:3"): pool, torch.device("cuda:4"): pool})
        adapter.thread.pools.update({region: pool, closed: pool})
        is_inside.set()
        until_end.wait(60)

    thread = threading.Thread(target=inside)
    thread.start()
    assert is_inside.wait(60)
    for pause in (region.pause, lambda: memsaver.switch(pause=region.tag), lambda: memsaver.start(pause=region)):
        with pytest.raises(memsaver.Error, match=f"paused: thread {thread.ident} .* is inside it; it must leave first"):
            pause()
    assert ended == [] and region.state == "active"
    until_end.set()
    thread.join()
    assert region.pause().paused == (region.tag,)
    assert ended == [3, 4, "pool"]
    assert f"thread {thread.ident} has ended inside {region.tag!r}: it counts as having left" in caplog.text
    region.resume()
    for entered in others:  # on Linux the second thread mostly gets the number of the first one
        thread = threading.Thread(target=entered.__enter__)
        thread.start()
        thread.join()
    for each in others:
        each.close()


def test_entering_concerns_the_thread_alone(make: Make, threads: ThreadPoolExecutor) -> None:
    regions = [make() for _ in range(4)]
    shared = make()
    barrier = threading.Barrier(4, timeout=60)
    results: list[bool] = []

    def work(region: memsaver.Region) -> None:
        barrier.wait()
        for _ in range(20):
            with shared:
                first = torch.ones(10)
                with region:
                    second = torch.ones(10)
            results.extend([inside(shared, first), inside(region, second), not inside(shared, torch.ones(3))])

    list(threads.map(work, regions))
    assert len(results) == 4 * 20 * 3 and all(results)
    assert shared.allocated_bytes == 0


def test_pausing_a_region_from_inside_refuses_allocations_until_it_is_resumed(make: Make) -> None:
    region = make("host")
    with region:
        kept = torch.arange(10)
        with pytest.raises(memsaver.Error, match="inside it"):
            memsaver.start(pause=region)  # the thread would go on, and could allocate while the pause runs
        region.pause()
        with pytest.raises(memsaver.RegionPausedError):
            torch.ones(3)
        with pytest.raises(memsaver.RegionPausedError), region:
            pass
        with memsaver.outside():
            assert torch.ones(3).tolist() == [1, 1, 1]
        region.resume()
        assert inside(region, torch.ones(3))
    assert kept.tolist() == list(range(10))


def test_views_and_optimizers_keep_their_addresses(make: Make) -> None:
    weights, state = make("host"), make("host")
    torch.manual_seed(0)
    with weights:
        model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    reference = torch.nn.Linear(64, 64)
    reference.load_state_dict(model.state_dict())
    other = torch.optim.AdamW(reference.parameters(), lr=0.1)
    inputs = torch.randn(8, 64)
    pointers: set[tuple[int, ...]] = set()
    for _ in range(4):
        for net, stepper in ((model, optimizer), (reference, other)):
            net(inputs).square().sum().backward()
            if net is model:
                with state:
                    stepper.step()
            else:
                stepper.step()
            stepper.zero_grad()
        tensors = [each for row in optimizer.state.values() for each in row.values()]
        assert all(inside(state, tensor) for tensor in tensors)
        pointers.add(tuple(tensor.data_ptr() for tensor in (*model.parameters(), *tensors)))
        memsaver.pause([weights.tag, state.tag])
        memsaver.resume([weights.tag, state.tag])
    assert len(pointers) == 1
    for one, two in zip(model.parameters(), reference.parameters()):  # how sums are rounded depends on alignment
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-3)
