"""torch's default pool as a region, in processes of their own: the settings of the allocator last."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.broker_support import Running
from tests.gpu.fixtures import Neighbour
from tests.pool_support import Worker
from tests.support import GIB, MIB, until

pytestmark = pytest.mark.gpu

BEGIN = """
import gc, sys, threading, torch, memsaver
MIB, GIB = 1 << 20, 1 << 30
def ask(command):
    print(command, flush=True)
    return sys.stdin.readline()
def full(mib, value):
    return torch.full((mib << 20,), value, dtype=torch.uint8, device="cuda")
def holds(tensor, value):
    return all(bool((part == value).all()) for part in tensor.split(64 << 20))
def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]
def owns(tensor):
    return region.owns(tensor.data_ptr())
torch.zeros(1, device="cuda")
torch.cuda._sleep(1000)
context = free()
region = memsaver.default_pool()
"""


def run(source: str, neighbour: Neighbour | None = None) -> None:
    """Runs a program, whose ask() gives commands to the second process."""
    program = [sys.executable, "-c", BEGIN + textwrap.dedent(source)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in process.stdout:
            assert neighbour is not None, line
            neighbour.tell(line.strip())
            process.stdin.write("done\n")
            process.stdin.flush()
    assert process.returncode == 0


def test_all_memory_of_torch_leaves_and_blocks_in_use_return(neighbour: Neighbour) -> None:
    """Graphs replay after their pool and their inputs were away."""
    run(
        """
        inputs = torch.arange(1 << 20, device="cuda", dtype=torch.float32)
        plain, guarded = torch.cuda.CUDAGraph(), memsaver.CUDAGraph()
        with torch.cuda.graph(plain):
            result = (inputs * 2).sqrt()
        with memsaver.graph(guarded, region="graphs", needs=["torch"]):
            other = inputs + 1
        plain.replay(), guarded.replay()
        expected = result.clone(), other.clone()
        sizes = (1, 3, 30, 100, 1500)
        kept = [full(mib, mib % 251) for mib in sizes] + [torch.arange(1000, device="cuda") for _ in range(50)]
        cached = [full(700, 1), full(5, 1)]
        del cached  # after the captures, which empty torch's cache
        assert region.allocated_bytes >= torch.cuda.memory_reserved() - 64 * MIB  # less segments from before the call
        ask(f"hold {6 * GIB}")
        for turn in range(3):
            before = free()
            done = memsaver.pause()
            assert free() - before >= region.allocated_bytes - 8 * MIB
            assert done.copied_bytes < 1800 * MIB, "free blocks are not copied"
            try:
                guarded.replay()
                raise AssertionError
            except memsaver.RegionPausedError:
                pass
            ask("overwrite")
            memsaver.resume(memory_timeout=60)
            assert region.mapped_bytes < 1800 * MIB, "free blocks take memory"
            assert all(holds(tensor, mib % 251) for tensor, mib in zip(kept, sizes))
            assert all(torch.equal(each.cpu(), torch.arange(1000)) for each in kept[5:])
            result.zero_(), other.zero_()
            plain.replay(), guarded.replay()
            assert torch.equal(result, expected[0]) and torch.equal(other, expected[1])
            again = full(700, 2)
            assert owns(again) and holds(again, 2)
            del again
        """,
        neighbour,
    )


def test_a_training_loop_has_the_same_losses() -> None:
    run(
        """
        def losses(pauses):
            torch.manual_seed(0)
            model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)]).cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            found = []
            for step in range(12):
                generator = torch.Generator("cuda").manual_seed(step)
                batch = torch.randn(64 + 512 * (step % 5), 2048, device="cuda", generator=generator)
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step(), optimizer.zero_grad()
                found.append(loss.item())
                if pauses and step % 3 == 1:
                    memsaver.pause("torch")
                    if step % 2:
                        torch.cuda.empty_cache()
                    memsaver.resume("torch")
            return found
        torch.use_deterministic_algorithms(False)
        assert losses(False) == losses(True)
        """
    )


def test_while_it_is_paused_torch_allocates_elsewhere() -> None:
    run(
        """
        kept, cached = full(100, 1), full(1000, 2)
        del cached
        product = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16) @ torch.ones(
            2048, 2048, device="cuda", dtype=torch.bfloat16
        )
        torch.cuda.synchronize()
        context = free() + torch.cuda.memory_reserved()  # with the code of cuBLAS
        memsaver.register(memsaver.guests.Workspaces("torch"))
        memsaver.pause("torch")
        low = free()
        meanwhile = full(300, 3)
        held = []
        thread = threading.Thread(target=lambda: held.append(full(200, 4)))
        thread.start(), thread.join()
        assert not owns(meanwhile) and not owns(held[0]), "a free block of a paused segment was handed out"
        assert low - free() >= 500 * MIB
        square = torch.full((2048, 2048), 0.5, device="cuda", dtype=torch.bfloat16)
        assert (square @ square).sum().item() == 2048 * 2048 * 512, "a workspace of cuBLAS without memory"
        torch.cuda.empty_cache()
        memsaver.resume("torch")
        assert holds(kept, 1) and holds(meanwhile, 3) and holds(held[0], 4) and owns(kept)
        after = full(300, 5)
        assert owns(after)
        assert bool((product == 2048).all())
        del meanwhile, held, square, product
        gc.collect(), torch.cuda.empty_cache()
        assert region.mapped_bytes <= 500 * MIB  # before holds(), whose comparisons take 64 MiB
        assert holds(kept, 1) and holds(after, 5)
        memsaver.pause("torch")
        assert context - free() < 64 * MIB, (context - free()) >> 20
        """
    )


def test_regions_and_the_default_pool_beside_each_other() -> None:
    """A tensor travels to another process, and the pause waits for it."""
    run(
        """
        weights = memsaver.region("weights", backup="host")
        with weights:
            inner = full(100, 1)
            with memsaver.outside():
                outer = full(100, 2)
        assert weights.owns(inner.data_ptr()) and owns(outer) and not owns(inner)
        with weights:
            memsaver.pause("torch")
            later = full(64, 3)
            assert weights.owns(later.data_ptr()), "the region that the thread is inside comes first"
        with weights:
            last = full(64, 4)
            assert weights.owns(last.data_ptr())
        memsaver.switch(pause="weights", resume="torch")
        assert holds(outer, 2)
        memsaver.switch(pause="torch", resume="weights")
        assert holds(inner, 1) and holds(later, 3) and holds(last, 4)
        memsaver.resume()
        inside, leave = threading.Event(), threading.Event()
        def stay():
            with weights:
                inside.set()
                leave.wait(60)
        thread = threading.Thread(target=stay)
        thread.start()
        inside.wait(60)
        try:
            memsaver.pause("torch")
            raise AssertionError("its thread would allocate elsewhere")
        except memsaver.Error as error:
            assert "is inside region 'weights'" in str(error), error
        leave.set(), thread.join()

        import pickle, subprocess
        import torch.multiprocessing
        from multiprocessing.reduction import ForkingPickler
        memsaver.configure(patches="multiprocessing")
        tensor = full(100, 9)
        assert owns(tensor) and region.state == "active"
        sent = bytes(ForkingPickler.dumps(tensor)).hex()
        receive = "import pickle, sys, torch, memsaver; got = pickle.loads(bytes.fromhex(sys.stdin.readline()));"
        receive += "assert bool((got == 9).all()); got.fill_(8); torch.cuda.synchronize(); print('got', flush=True);"
        receive += "sys.stdin.readline()"
        command = [sys.executable, "-c", receive]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as receiver:
            print(sent, file=receiver.stdin, flush=True)
            assert receiver.stdout.readline() == "got\\n"
            assert holds(tensor, 8)
            try:
                memsaver.pause("torch", reader_timeout=0.2)
                raise AssertionError("the receiver still has the memory")
            except memsaver.AttachedError:
                pass
            receiver.stdin.close()
        memsaver.pause("torch", reader_timeout=30), memsaver.resume("torch")
        assert holds(tensor, 8)
        """
    )


def test_memory_that_the_default_pool_caches_goes_to_a_waiting_process() -> None:
    begin = "from tests.gpu.pool_clients import *; torchs = memsaver.default_pool()"
    with Running(str(2 * GIB), "--device", "cuda:0") as broker:
        with Worker(broker, "from tests.gpu.pool_clients import *") as engine:
            engine.run(f"numbers = Numbers('engine', {1536 * MIB}, 'host')")
            engine.run("memsaver.pause()")
            with Worker(broker, begin) as trainer:
                trainer.run(f"kept = torch.full(({100 * MIB},), 3, dtype=torch.uint8, device=DEVICE)")
                trainer.run(f"cached = torch.full(({1400 * MIB},), 3, dtype=torch.uint8, device=DEVICE)")
                assert int(trainer.run("print(torchs.mapped_bytes)")) >= 1500 * MIB
                until(lambda: broker.row(trainer.pid)["held_bytes"] >= 1500 * MIB)
                trainer.run("del cached")  # from here on a request that its own wait caused may return it
                trainer.run("memsaver.pause('torch')")
                until(lambda: broker.row(trainer.pid)["held_bytes"] == 0)
                engine.run("memsaver.resume(memory_timeout=60); numbers.check(); memsaver.pause()")
                trainer.run("memsaver.resume('torch', memory_timeout=60)")
                engine.run("memsaver.resume(memory_timeout=60); numbers.check()")
                assert int(trainer.run("print(torchs.mapped_bytes)")) < 200 * MIB, "the free blocks were not returned"
                trainer.run("assert bool((kept == 3).all())")
                trainer.run(f"assert is_refused({1400 * MIB})")
                engine.run("memsaver.pause()")
                trainer.run(f"again = torch.full(({1400 * MIB},), 4, dtype=torch.uint8, device=DEVICE)")
                trainer.run(f"assert all(bool((part == 4).all()) for part in again.split({64 * MIB}))")
                trainer.run("assert torchs.owns(again.data_ptr())")


def test_torch_keeps_its_caches_while_another_process_offers_memory() -> None:
    begin = "from tests.gpu.pool_clients import *; torchs = memsaver.default_pool()"
    with Running(str(2 * GIB), "--device", "cuda:0") as broker:
        with Worker(broker, "from tests.gpu.pool_clients import *") as engine, Worker(broker, begin) as trainer:
            engine.run(f"numbers = Numbers('engine', {1024 * MIB}, 'host'); memsaver.pause(lazy=True)")
            trainer.run(f"small = [torch.empty({8 * MIB}, dtype=torch.uint8, device=DEVICE) for _ in range(32)]")
            trainer.run(f"del small; large = torch.full(({1200 * MIB},), 3, dtype=torch.uint8, device=DEVICE)")
            assert trainer.run("print(torch.cuda.memory_stats()['num_alloc_retries'])") == "0"
            assert 0 < int(engine.run("print(numbers.region.offered_bytes)")) < 1024 * MIB
            trainer.run(
                f"assert all(bool((part == 3).all()) for part in large.split({64 * MIB})); del large; memsaver.pause()"
            )
            engine.run("memsaver.resume(memory_timeout=60); numbers.check()")
