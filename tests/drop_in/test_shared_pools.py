"""Drop-ins over a shared pool, whose chunks go from one process to another as they are.

Engines rely on the zeros that memory has from the driver, and on a wake-up that waits until a trainer has paused.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.drop_in import fake_vllm
from tests.pool_support import ForkedBroker, Worker
from tests.support import until

TRAINER = """
import torch
region = memsaver.region("trainer", "cpu")
def fill():
    "Fills all memory of the pool that is free with 0xA5."
    global kept
    pool = own_status()
    free = pool["capacity_bytes"] - pool["total_bytes"] + pool["idle_bytes"]
    kept = region.empty((free,), torch.uint8).fill_(0xA5)
    print(free)
def give_back():
    global kept
    region.pause()
    kept = None
    region.resume()
"""
ENGINE = """
import os, sys, torch
os.environ["MEMSAVER_DROP_IN"] = "vllm,tms"
sys.path.insert(0, {path!r})
from memsaver import drop_in
tensors = {{}}
def fill(tag, region):
    with region:
        tensors[tag] = torch.full((24 << 20,), 7, dtype=torch.uint8)  # NBYTES
def values():
    print(*(f"{{tag}}={{int(each.min())}}-{{int(each.max())}}" for tag, each in tensors.items()))
    for each in tensors.values():
        each.fill_(7)
"""
VLLM = """
drop_in.install("vllm")
from vllm.device_allocator.cumem import CuMemAllocator
allocator = CuMemAllocator.get_instance()
for tag in ("weights", "kv_cache", "runtime"):
    fill(tag, allocator.use_memory_pool(tag))
"""
TMS = """
drop_in.install("tms")
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
for tag in ("kv_cache", "weights", "cuda_graph"):
    fill(tag, saver.region(tag=tag, enable_cpu_backup=tag == "cuda_graph"))
fill("scratch", saver.region(tag="cuda_graph"))
"""
CAPACITY, NBYTES = 160 << 20, 24 << 20  # of the pool, and of each tensor
TURNS = {
    VLLM: [
        ("allocator.sleep(('weights', 'runtime'))", "allocator.wake_up()", {"weights", "runtime"}),
        ("allocator.sleep(('runtime',))", "allocator.wake_up(['weights']); allocator.wake_up()", {"runtime"}),
        ("allocator.discard('kv_cache')", "allocator.wake_up(['kv_cache'])", {"weights", "runtime"}),
    ],
    TMS: [("saver.pause()", "saver.resume()", {"cuda_graph"})] * 2,
}


@pytest.mark.parametrize("engine", TURNS, ids=["vllm", "tms"])
def test_engine_wakes_with_zeros_where_it_kept_no_contents(engine: str, tmp_path: Path) -> None:
    """And it waits for the memory that the trainer holds."""
    fake_vllm.write(tmp_path)
    with (
        ForkedBroker(str(CAPACITY)) as broker,
        Worker(broker, *(f"exec({each!r}, globals())" for each in (ENGINE.format(path=str(tmp_path)), engine))) as mine,
        Worker(broker, f"exec({TRAINER!r}, globals())") as trainer,
    ):
        for away, back, kept in TURNS[engine]:
            mine.run(away)
            assert int(trainer.run("fill()")) >= NBYTES
            mine.send(back)
            waits = "print(any(each['waiting'] for each in own_status()['clients']))"
            until(lambda: trainer.run(waits) == "True", within_s=20)  # noqa: B023
            trainer.run("give_back()")
            assert mine.answer() == ""
            for found in mine.run("values()").split():
                tag, _, values = found.partition("=")
                assert values == ("7-7" if tag in kept else "0-0"), found
