"""Captured graphs stay valid while memory is released and restored."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memsaver
from tests.gpu.fixtures import Inside, Make, Neighbour
from tests.support import GIB

pytestmark = pytest.mark.gpu

PAUSES = 20


@pytest.fixture
def crowded(neighbour: Neighbour) -> Neighbour:
    """The second process has all but 2 GiB, so that it overwrites all free memory in no time."""
    neighbour.hold(2 * GIB)
    return neighbour


def build_model(width: int = 512) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width), torch.nn.LayerNorm(width)
    ).cuda()


def warm_up(step: Callable[[], object]) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def test_three_graphs_that_share_a_pool_replay_after_twenty_pauses(
    fresh: Make, crowded: Neighbour, inside: Inside
) -> None:
    weights, buffers, pool = fresh("weights", "host"), fresh("buffers", "host"), fresh("graphs", "host")
    tags = [weights.tag, buffers.tag, pool.tag]
    with torch.no_grad():
        with weights:
            model = build_model()
        with buffers:
            inputs = torch.randn(64, 512, device="cuda")
            outputs = {size: torch.zeros(size, 512, device="cuda") for size in (64, 16, 1)}
        warm_up(lambda: model(inputs))
        graphs = {}
        for size in outputs:
            graphs[size] = memsaver.CUDAGraph()
            with memsaver.graph(graphs[size], region=pool, needs=[weights, buffers]):
                outputs[size].copy_(model(inputs[:size]))
        expected = {}
        for size, graph in graphs.items():
            graph.replay()
            expected[size] = outputs[size].clone()
        addresses = [tensor.data_ptr() for tensor in (*model.parameters(), inputs, *outputs.values())]
        assert pool.mapped_bytes > 0, "the graphs' memory is not in the region"
        for _ in range(PAUSES):
            held = sum(region.mapped_bytes for region in (weights, buffers, pool))
            done = memsaver.pause(tags)
            assert done.released_bytes == held > 0
            assert crowded.overwrite() >= held
            for graph in graphs.values():
                with pytest.raises(memsaver.RegionPausedError):
                    graph.replay()
            memsaver.resume(tags)
            for size, graph in graphs.items():
                outputs[size].zero_()
                graph.replay()
                assert torch.equal(outputs[size], expected[size])
        assert addresses == [tensor.data_ptr() for tensor in (*model.parameters(), inputs, *outputs.values())]
        assert all(inside(parameter, weights) for parameter in model.parameters())


def test_state_that_graphs_keep_in_the_pool_of_a_region_survives(fresh: Make, crowded: Neighbour) -> None:
    """Memory that is free for torch and in use by the graph: counters of kernels, for example. A graph is torch's."""
    pool = fresh("pool", "host")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool.pool.id):  # type: ignore[arg-type]
        counter = torch.zeros(1, device="cuda")
        scratch = torch.full((1 << 20,), 3.0, device="cuda")
        total = counter + scratch.sum()
        del scratch
    counting = memsaver.CUDAGraph()
    with memsaver.graph(counting, region=pool):
        counter += 1
    graph.replay()
    for _ in range(3):
        counting.replay()
    pool.pause()
    crowded.overwrite()
    pool.resume()
    counting.replay()
    assert counter.item() == 4
    assert total.item() == 3 << 20
    graph.replay()
    assert counter.item() == 0


def test_a_failed_capture_leaves_region_pool_and_torch_usable(fresh: Make, inside: Inside) -> None:
    pool, other = fresh("pool", "host"), fresh("other")
    values = torch.ones(100, device="cuda")
    stream = torch.cuda.current_stream()
    before = memsaver.CUDAGraph()
    with memsaver.graph(before, region=pool):
        earlier = values * 5
    for breaks in ("synchronize", "raise", "synchronize"):
        broken = memsaver.CUDAGraph()
        expected: type[Exception] = KeyError if breaks == "raise" else RuntimeError
        with pytest.raises(expected), memsaver.graph(broken, region=pool):
            torch.rand(10, device="cuda")
            if breaks == "synchronize":
                torch.cuda.synchronize()
            raise KeyError("from the body")
        assert torch.cuda.current_stream() == stream
        assert not memsaver._core.capturing()
        torch.randn(10, device="cuda")  # the random generator is not left in its capture state
    assert not inside(torch.empty(1 << 20, device="cuda"), pool)
    with other:
        assert inside(torch.empty(1 << 22, device="cuda"), other)
    good = memsaver.CUDAGraph()
    with memsaver.graph(good, region=pool):
        result = values * 3
    pool.pause()
    pool.resume()
    result.zero_()
    earlier.zero_()
    good.replay()
    before.replay()
    assert torch.equal(result, values * 3)
    assert torch.equal(earlier, values * 5)


def test_a_pause_during_a_capture_raises_and_the_capture_goes_on(fresh: Make) -> None:
    """Segments freed while a capture runs rest until it is over; new ones are mapped meanwhile."""
    pool, kv = fresh("pool", "host"), fresh("kv")
    with kv:
        cache, freed = torch.ones(1 << 20, device="cuda"), torch.ones(8 << 20, device="cuda")
    for capture in (memsaver.graph, None):
        graph: Any = memsaver.CUDAGraph() if capture else torch.cuda.CUDAGraph()
        manager = memsaver.graph(graph, region=pool) if capture else torch.cuda.graph(graph)
        with manager:
            big = torch.full((32 << 20,), 2.0, device="cuda")  # grows the graph's pool in the middle
            freed = cache * 2
            with pytest.raises(memsaver.Error, match="captur"):
                kv.pause()
            assert kv.state == "active"
            result = freed + 1 + (big.sum() - (64 << 20))
        graph.replay()
        assert result[0].item() == 3
    del cache, freed, big
    memsaver.trim(kv.tag)
    assert kv.mapped_bytes == 0


EXIT = """
import torch, memsaver
with memsaver.region("weights", backup="host") as weights:
    model = torch.nn.Linear(1024, 1024).cuda()
    x = torch.ones(8, 1024, device="cuda")
with torch.no_grad():
    model(x)
    graph = memsaver.CUDAGraph()
    with memsaver.graph(graph, needs=["weights"]):
        y = model(x)
graph.replay()
kv = memsaver.region("kv")
cache = kv.empty((1 << 20,))
{last}
"""


@pytest.mark.parametrize("last", ["kv.__enter__()", "import sys; sys.exit(0)", "memsaver.pause(); del model"])
def test_the_interpreter_ends_cleanly_with_live_graphs(last: str) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT.format(last=last)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")
