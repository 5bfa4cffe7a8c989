"""Drop-ins over a shared pool, whose chunks go from one process to another as they are.

Engines rely on the zeros that memory has from the driver, and on a wake-up that waits until a trainer has paused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.broker_support import Running
from tests.drop_in import fake_vllm
from tests.pool_support import Worker
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
import torch
def filled():
    return torch.full((24 << 20,), 7, dtype=torch.uint8)  # NBYTES
def values(tensor):
    print(*sorted({int(tensor.min()), int(tensor.max())}))
"""
VLLM = """
import os, sys
os.environ["MEMSAVER_DROP_IN"] = "vllm"
sys.path.insert(0, {path!r})
from memsaver import drop_in
drop_in.install("vllm")
from vllm.device_allocator.cumem import CuMemAllocator
allocator = CuMemAllocator.get_instance()
tensors = {{}}
for tag in ("weights", "kv_cache", "runtime"):
    with allocator.use_memory_pool(tag):
        tensors[tag] = filled()
"""
TMS = """
import os
os.environ["MEMSAVER_DROP_IN"] = "tms"
from memsaver import drop_in
drop_in.install("tms")
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
tensors = {}
for tag in ("kv_cache", "weights", "cuda_graph"):
    with saver.region(tag=tag, enable_cpu_backup=tag == "cuda_graph"):
        tensors[tag] = filled()
with saver.region(tag="cuda_graph"):
    tensors["scratch"] = filled()
"""
CAPACITY, NBYTES = 160 << 20, 24 << 20  # of the pool, and of each tensor


@contextmanager
def processes(engine: str, folder: Path) -> Iterator[tuple[Worker, Worker]]:
    """An engine with its drop-in and a trainer."""
    fake_vllm.write(folder)
    source = engine.format(path=str(folder)) if engine is VLLM else engine
    with (
        Running(str(CAPACITY)) as broker,
        Worker(broker, *(f"exec({each!r}, globals())" for each in (ENGINE, source))) as mine,
        Worker(broker, f"exec({TRAINER!r}, globals())") as trainer,
    ):
        yield mine, trainer


@pytest.mark.parametrize(
    ("engine", "away", "back", "kept"),
    [
        (VLLM, "allocator.sleep(('weights', 'runtime'))", "allocator.wake_up()", {"weights", "runtime"}),
        (VLLM, "allocator.sleep(('runtime',))", "allocator.wake_up(['weights']); allocator.wake_up()", {"runtime"}),
        (VLLM, "allocator.discard('kv_cache')", "allocator.wake_up(['kv_cache'])", {"weights", "runtime"}),
        (TMS, "saver.pause()", "saver.resume()", {"cuda_graph"}),
    ],
    ids=["vllm-level-1", "vllm-level-2", "vllm-discard", "tms"],
)
def test_engine_wakes_with_zeros_where_it_kept_no_contents(
    engine: str, away: str, back: str, kept: set[str], tmp_path: Path
) -> None:
    with processes(engine, tmp_path) as (mine, trainer):
        for _ in range(2):
            mine.run(away)
            assert int(trainer.run("fill()")) >= NBYTES
            trainer.run("give_back()")
            mine.run(back)
            found = {tag: mine.run(f"values(tensors[{tag!r}])") for tag in mine.run("print(*tensors)").split()}
            assert found == {tag: "7" if tag in kept else "0" for tag in found}
            mine.run("for each in tensors.values(): each.fill_(7)")


@pytest.mark.parametrize(
    ("engine", "away", "back"),
    [(VLLM, "allocator.sleep(('weights',))", "allocator.wake_up()"), (TMS, "saver.pause()", "saver.resume()")],
    ids=["vllm", "tms"],
)
def test_wake_up_waits_for_memory_that_a_trainer_holds(engine: str, away: str, back: str, tmp_path: Path) -> None:
    with processes(engine, tmp_path) as (mine, trainer):
        mine.run(away)
        trainer.run("fill()")
        mine.send(back)
        until(lambda: trainer.run("print(any(each['waiting'] for each in own_status()['clients']))") == "True")
        trainer.run("give_back()")
        assert mine.answer() == ""
        assert mine.run("values(tensors['weights'])") == ("7" if engine is VLLM else "0")
