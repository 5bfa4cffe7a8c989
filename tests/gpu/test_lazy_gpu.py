"""Lazy pauses of regions whose contents kernels and captured graphs write. See also test_shared_pool.py."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import memsaver
from tests.gpu.fixtures import Make, Neighbour
from tests.support import GIB, MIB

pytestmark = pytest.mark.gpu

CHUNK = 32 * MIB
TAKEN = 256 * MIB  # at most, of the driver itself and by its rounding


def numbers(region: memsaver.Region, nbytes: int, start: int) -> torch.Tensor:
    return torch.arange(start, start + nbytes // 8, out=region.empty((nbytes // 8,), torch.int64))


def check(tensor: torch.Tensor, start: int) -> None:
    for at in range(0, tensor.numel(), 1 << 22):  # a comparison takes little memory of its own
        part = tensor[at : at + (1 << 22)]
        assert torch.equal(part, torch.arange(start + at, start + at + part.numel(), device="cuda"))


@pytest.mark.parametrize("backup", ["host", "disk"])
def test_a_demand_takes_what_it_lacks_and_graphs_stay_valid(
    fresh: Make, neighbour: Neighbour, tmp_path: Path, backup: str
) -> None:
    memsaver.configure(disk_dir=tmp_path)
    weights, other = fresh("weights", backup), fresh("other", "host")
    held = numbers(weights, 2 * GIB, 0)
    graph = memsaver.CUDAGraph()
    with memsaver.graph(graph, f"{weights.tag}-graph", needs=weights):
        held.add_(1)
    torch.cuda.synchronize()
    for turn in range(3):
        torch.cuda.empty_cache()
        graph.replay()
        weights.pause(lazy=True)
        with pytest.raises(memsaver.RegionPausedError):
            graph.replay()
        neighbour.hold(keep=GIB)
        lacking = GIB - torch.cuda.mem_get_info()[0] + 512 * MIB
        more = numbers(other, GIB + 512 * MIB, turn)
        assert lacking <= weights.backup_bytes <= lacking + CHUNK + TAKEN
        assert weights.backup_bytes + weights.offered_bytes == 2 * GIB
        copied = weights.backup_bytes
        neighbour.tell("release")
        assert weights.resume().copied_bytes == copied
        check(more, turn)
        del more
        memsaver.trim(other.tag)
        check(held, turn + 1)


def test_a_demand_copies_nothing_that_was_copied_beside_kernels(fresh: Make, neighbour: Neighbour) -> None:
    region, other = fresh("ahead", "host"), fresh("other")
    held = numbers(region, 2 * GIB, 5)
    with other:
        work = torch.zeros(CHUNK, dtype=torch.uint8, device="cuda")
    totals = memsaver._results.totals
    for _ in range(2):
        held.add_(1)
        copied = totals()["copies_bytes", "out"] + 2 * GIB
        region.pause(lazy="copy")
        deadline = time.monotonic() + 60
        while totals()["copies_bytes", "out"] < copied or region.mapped_bytes:
            assert time.monotonic() < deadline
            torch.cuda._sleep(1 << 20)
            work.add_(1)
            torch.cuda.synchronize()
        assert region.offered_bytes == 2 * GIB
        neighbour.hold(keep=512 * MIB)
        more = numbers(other, GIB, 3)
        given = 2 * GIB - region.offered_bytes
        assert given >= 512 * MIB - TAKEN and totals()["copies_bytes", "out"] == copied
        check(more, 3)
        neighbour.tell("release")
        del more
        memsaver.trim(other.tag)
        assert region.resume().copied_bytes == given
    check(held, 7)
