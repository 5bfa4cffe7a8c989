"""Late, derived and stale regions with torch's kernels and graphs."""

from __future__ import annotations

import pytest
import torch

import memsaver
from tests.gpu.fixtures import Make
from tests.support import MIB

pytestmark = pytest.mark.gpu


def test_a_guarded_replay_waits_for_a_late_region(fresh: Make) -> None:
    weights, cache = fresh("weights", "host"), fresh("cache", "host")
    with weights:
        weight = torch.full((64 * MIB,), 3.0, device="cuda")
    held = cache.empty((64 * MIB,)).fill_(1)
    out = torch.zeros_like(weight)
    graph = memsaver.CUDAGraph()
    torch.add(weight, 1, out=out)  # warm up
    with memsaver.graph(graph, f"{weights.tag}-graph", needs=weights):
        torch.add(weight, 1, out=out)
    memsaver.define_phase("gpu rollout", cache)
    memsaver.define_phase("gpu train", [], late=weights, lingering=cache)
    try:
        for _ in range(5):
            with memsaver.phase("gpu rollout"):
                assert (weights.state, cache.state) == ("paused", "active")
                out.zero_()
            with memsaver.phase("gpu train"):
                graph.replay()
                torch.cuda.synchronize()
                assert bool((out == 4).all())
        cache.resume()
        assert bool((held == 1).all())
    finally:
        for name in ("gpu rollout", "gpu train"):
            memsaver.define_phase(name, [])


def test_tensors_that_were_not_written_are_found_before_the_first_replay(fresh: Make) -> None:
    region = fresh("weights")
    with region:
        layer = torch.nn.Linear(256, 256, device="cuda").requires_grad_(False)
        layer.register_buffer("scale", torch.ones((), device="cuda"))
    inputs = torch.ones(4, 256, device="cuda")
    graph = memsaver.CUDAGraph()
    layer(inputs)
    with memsaver.graph(graph, f"{region.tag}-graph", needs=region):
        layer(inputs)
    memsaver.name_tensors(layer)
    memsaver.configure(stale="raise")
    try:
        region.pause()
        region.resume()
        layer.weight.fill_(1)
        layer.bias.fill_(0)
        for _ in range(2):
            with pytest.raises(memsaver.StaleError) as raised:
                graph.replay()
            assert [name for name, *_ in raised.value.tensors] == ["scale"]
        layer.get_buffer("scale").fill_(1)
        graph.replay()
        torch.cuda.synchronize()
    finally:
        memsaver.configure(stale="off")
