"""The regions of torch's allocations, and their memory after they are freed."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import memsaver
from tests.gpu.fixtures import Inside, Make, Neighbour
from tests.support import MIB, run_python

pytestmark = pytest.mark.gpu


def test_nested_and_reentered_regions_take_their_allocations(fresh: Make, inside: Inside) -> None:
    a, b = fresh("a"), fresh("b")
    with a:
        first = torch.empty(4 * MIB, device="cuda")
        with b:
            second = torch.empty(4 * MIB, device="cuda")
            with a:
                third = torch.empty(4 * MIB, device="cuda")
            fourth = torch.empty(4 * MIB, device="cuda")
            with memsaver.outside():
                fifth = torch.empty(4 * MIB, device="cuda")
                with a:
                    sixth = torch.empty(4 * MIB, device="cuda")
        with a:
            seventh = torch.empty(4 * MIB, device="cuda")
        eighth = torch.empty(4 * MIB, device="cuda")
    ninth = torch.empty(4 * MIB, device="cuda")
    assert all(inside(tensor, a) for tensor in (first, third, sixth, seventh, eighth))
    assert all(inside(tensor, b) for tensor in (second, fourth))
    assert not any(inside(tensor, region) for tensor in (fifth, ninth) for region in (a, b))


def test_backward_lands_where_forward_did(fresh: Make, inside: Inside) -> None:
    weights, grads = fresh("weights"), fresh("grads")
    with weights:
        model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
    x = torch.randn(64, 1024, device="cuda")

    def are_inside() -> list[bool]:
        gradients = [parameter.grad for parameter in model.parameters()]
        return [gradient is not None and inside(gradient, grads) for gradient in gradients]

    loss = model(x).square().mean()
    with grads:
        loss.backward()
    assert all(are_inside())
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()
    assert not any(are_inside())


def test_threads_each_in_their_own_region_and_two_in_one(fresh: Make, inside: Inside) -> None:
    a, b = fresh("a"), fresh("b")
    barrier = threading.Barrier(4)
    made: dict[int, list[torch.Tensor]] = {}
    failures: list[BaseException] = []

    def work(number: int, region: memsaver.Region | None) -> None:
        try:
            barrier.wait(30)
            made[number] = []
            for i in range(20):
                if region is None:
                    made[number].append(torch.empty(3 * MIB, device="cuda"))
                else:
                    with region:
                        made[number].append(torch.empty((2 + i) * MIB, device="cuda"))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i, region)) for i, region in enumerate((a, a, b, None))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(inside(tensor, a) for tensor in made[0] + made[1])
    assert all(inside(tensor, b) for tensor in made[2])
    assert not any(inside(tensor, region) for tensor in made[3] for region in (a, b))
    clearing = threading.Thread(target=made.clear)  # another thread, outside of the regions
    clearing.start()
    clearing.join()
    memsaver.trim([a.tag, b.tag])
    assert a.mapped_bytes == b.mapped_bytes == 0


def test_frees_while_paused_and_trims_return_memory(fresh: Make, driver_free: Callable[[], int]) -> None:
    region = fresh("freed", "host")
    with region:
        keep, drop = torch.full((32 * MIB,), 7.0, device="cuda"), torch.full((32 * MIB,), 8.0, device="cuda")
        for _ in range(3):
            torch.empty(512 * MIB, device="cuda")
    before = driver_free()
    assert region.mapped_bytes >= 2048 * MIB
    memsaver.trim(region.tag)
    assert region.mapped_bytes < 1024 * MIB and driver_free() > before
    region.pause()
    del drop
    torch.cuda.empty_cache()
    memsaver.trim(region.tag)
    region.resume()
    torch.cuda.empty_cache()
    memsaver.trim(region.tag)
    torch.cuda.empty_cache()
    assert bool((keep == 7.0).all()) and region.allocated_bytes == 128 * MIB
    with region:
        again = torch.full((32 * MIB,), 9.0, device="cuda")
    assert bool((again == 9.0).all()) and bool((keep == 7.0).all())


def test_allocating_in_a_paused_region_raises(fresh: Make) -> None:
    region = fresh()
    with region:
        torch.empty(64 * MIB, device="cuda")  # free in torch's pool: it could be handed out again without asking
    region.pause()
    with pytest.raises(memsaver.RegionPausedError):
        region.empty((4,))
    with pytest.raises(memsaver.RegionPausedError), region:
        pass
    region.resume()
    with pytest.raises(memsaver.RegionPausedError, match="paused"), region:
        region.pause()
        torch.empty(64 * MIB, device="cuda")
    region.resume()
    with region:
        region.pause()
        region.resume()
        torch.ones(64 * MIB, device="cuda")


def test_out_of_memory_in_torch_releases_retained_chunks_first(fresh: Make, neighbour: Neighbour) -> None:
    big, late = fresh("big"), fresh("late")
    with big:
        held = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    memsaver.configure(retain="8GiB")
    big.pause()
    assert memsaver.stats().devices["cuda:0"].retained_bytes >= 4 << 30
    neighbour.hold(1 << 30)
    with late:  # more than is free, less than free and retained: and in another size of chunks
        late_tensors = [torch.ones(6 * MIB, device="cuda") for _ in range(80)]
    with pytest.raises(torch.OutOfMemoryError), late:
        torch.empty(64 << 30, dtype=torch.uint8, device="cuda")
    with pytest.raises(memsaver.OutOfMemoryError):
        big.resume()
    neighbour.tell("release")
    big.resume()
    assert held.numel() == 4 << 30 and bool((late_tensors[-1] == 1).all())


EXPANDABLE = """
import os, torch, memsaver
region = memsaver.region("region", backup="host")
with region:
    tensor = torch.full((64 << 20,), 5.0, device="cuda")
assert region.allocated_bytes >= 256 << 20, region.allocated_bytes
outside = torch.empty(64 << 20, device="cuda")
graph = memsaver.CUDAGraph()
with memsaver.graph(graph, needs=["region"]):
    result = tensor * 2
memsaver.pause()
memsaver.resume()
result.zero_()
graph.replay()
assert bool((result == 10).all()) and bool((tensor == 5).all())
segments = torch.cuda.memory_snapshot()
assert any(segment["is_expandable"] for segment in segments), "the user's setting was lost"
assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True,max_split_size_mb:512"
"""


def test_expandable_segments_stay_out_of_regions_and_in_force_elsewhere() -> None:
    done = run_python(EXPANDABLE, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True,max_split_size_mb:512")
    assert done.returncode == 0, done.stderr


FSDP = """
import os, torch, torch.distributed as dist, memsaver
from torch.distributed.fsdp import fully_shard
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517", RANK="0", WORLD_SIZE="1")
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
params, states = memsaver.region("params", backup="host"), memsaver.region("optimizer", backup="host")
grads = memsaver.region("grads")
def inside(tensor, region):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return region.owns(local.data_ptr())
torch.manual_seed(0)
with params:
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
    for layer in model: fully_shard(layer)
    fully_shard(model)
assert all(inside(p, params) for p in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x = torch.randn(16, 1024, device="cuda")
losses = []
for step in range(4):
    loss = model(x).square().mean()
    with grads:
        loss.backward()
    assert all(inside(p.grad, grads) for p in model.parameters()), step
    with states:
        optimizer.step()
    assert all(inside(t, states) for s in optimizer.state.values() for t in (s["exp_avg"], s["exp_avg_sq"]))
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item())
    before = [p.to_local().clone() for p in model.parameters()]
    memsaver.pause()
    torch.empty(2 << 30, dtype=torch.uint8, device="cuda").fill_(255)
    torch.cuda.empty_cache()
    memsaver.resume()
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters()))
assert losses[-1] < losses[0], losses
dist.destroy_process_group()
"""


def test_fsdp2_lands_in_regions_and_trains_across_pauses() -> None:
    done = run_python(FSDP)
    assert done.returncode == 0, done.stderr
