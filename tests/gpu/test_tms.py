"""torch_memory_saver's API on a GPU, in processes with the library to preload."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from memsaver.drop_in.startup import managed
from tests.support import Peer

pytestmark = pytest.mark.gpu

COMMON = """
import threading
import torch
from torch_memory_saver import torch_memory_saver as saver
from memsaver import regions
MIB = 1 << 20

def tag(tensor):
    return getattr(regions.owning(tensor.data_ptr()), "tag", None)

def states(*tensors):
    return {regions.owning(each.data_ptr()).state for each in tensors if tag(each)}
"""


@pytest.fixture(scope="module")
def whole() -> Iterator[Peer]:
    """A process that is managed whole. At the end it exits while it is paused."""
    with Peer(**managed("host", {})) as peer:
        run(peer, COMMON)
        yield peer
        run(peer, """
kept = torch.ones(MIB, device="cuda")
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    theirs = torch.ones(MIB, device="cuda")
saver.pause()
later = torch.ones(MIB, device="cuda")
torch.cuda.empty_cache()
""")  # fmt: skip
        assert peer.process.stdin is not None
        peer.process.stdin.close()
        assert peer.process.wait(60) == 0


def run(peer: Peer, program: str) -> None:
    peer.run(f"exec({program!r}, globals())")


def test_no_block_of_a_paused_segment_is_handed_out(whole: Peer) -> None:
    run(whole, """
held, cached = [], []
for size in (512, 4096, 65536, MIB, 3 * MIB, 24 * MIB):
    for number in range(16):
        (held if number % 2 else cached).append(torch.full((size,), number, dtype=torch.uint8, device="cuda"))
sizes = [each.numel() for each in cached]
cached.clear()

def allocate(stream):
    try:
        with torch.cuda.stream(stream):
            made = [torch.full((size,), 5, dtype=torch.uint8, device="cuda") for size in sizes]
            stream.synchronize()
            found.extend(made)
    except BaseException as error:
        errors.append(error)

for _ in range(3):
    saver.pause()
    found, errors = [], []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        thread = threading.Thread(target=allocate, args=(stream,))
        thread.start(); thread.join()
    with saver.disable():
        allocate(torch.cuda.current_stream())
        assert tag(found[-1]) is None
    with saver.region("scratch"):
        allocate(torch.cuda.current_stream())
        assert tag(found[-1]).startswith("tms.scratch"), tag(found[-1])
    assert not errors, errors
    assert states(*found) == {"active"}
    saver.resume()
    assert all(bool((each == 5).all()) for each in found)
    assert all(bool((each == 2 * (number % 8) + 1).all()) for number, each in enumerate(held))
    found.clear()
again = torch.ones(MIB, device="cuda")
assert tag(again) == "tms.default", tag(again)
held.clear()
""")  # fmt: skip


def test_second_pause_takes_what_was_allocated_since_the_first(whole: Peer) -> None:
    run(whole, """
first = torch.full((MIB,), 1.0, device="cuda")
saver.pause()
second = torch.full((MIB,), 2.0, device="cuda")
scratch = torch.full((MIB,), 9.0, device="cuda")
del scratch  # cached in a segment that the second pause takes
saver.pause()
third = torch.full((MIB,), 3.0, device="cuda")
assert states(third) == {"active"} and states(first, second) == {"paused"}
saver.resume()
for value, tensor in ((1, first), (2, second), (3, third)):
    assert bool((tensor == value).all()), value
""")  # fmt: skip
