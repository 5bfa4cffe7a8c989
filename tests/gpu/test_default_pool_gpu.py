"""torch's default pool as a region, in processes of their own: the settings of the allocator last."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.gpu.fixtures import Neighbour

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
