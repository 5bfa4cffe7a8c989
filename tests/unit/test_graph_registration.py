"""Captures into regions are refused where NCCL would register the buffers of graphs. No NCCL is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import memsaver
from memsaver._torch import graphs
from memsaver.drop_in.tms.saver import TorchMemorySaver
from memsaver.drop_in.vllm.allocator import RegionAllocator

Join = Callable[..., None]


@pytest.fixture
def join(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Makes a process group in this process, of which torch says that it has these backends."""
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)

    def join(backends: str = "cpu:gloo,cuda:nccl", ranks: int = 2) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        dist.distributed_c10d._world.pg_backend_config[dist.group.WORLD] = backends  # type: ignore[index]

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


def a_graph() -> Any:
    """Without a GPU: the type of builds without CUDA raises when it is called."""
    new = object.__new__ if torch.version.cuda is None else graphs.CUDAGraph.__new__
    return new(graphs.CUDAGraph)


def capture() -> None:
    with memsaver.graph(a_graph(), memsaver.region("graphs", "cpu", backup="host")):
        pass


def capture_of_sglang() -> None:
    saver = TorchMemorySaver()
    saver.hook_mode = "torch"
    with saver.cuda_graph(a_graph()):
        pass


def capture_of_vllm() -> None:
    with RegionAllocator.cudagraph_pool(object.__new__(RegionAllocator)):
        pass


@pytest.mark.parametrize("capture", [capture, capture_of_sglang, capture_of_vllm])
@pytest.mark.parametrize(("value", "said"), [(None, "not set"), ("1", "'1'"), ("", "''")])
def test_capture_is_refused_before_it_begins(
    join: Join, monkeypatch: pytest.MonkeyPatch, capture: Callable[[], None], value: str | None, said: str
) -> None:
    if value is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", value)
    join()
    with pytest.raises(memsaver.ConfigError, match=f"^NCCL_GRAPH_REGISTER is {said}, expected '0' before") as raised:
        capture()
    assert (raised.value.option, raised.value.value) == ("NCCL_GRAPH_REGISTER", os.environ.get("NCCL_GRAPH_REGISTER"))


@pytest.mark.parametrize(
    ("backends", "ranks", "registers"),
    [("cpu:gloo", 2, None), ("cpu:gloo,cuda:nccl", 1, None), ("cpu:gloo,cuda:nccl", 2, "0")],
)
def test_process_whose_nccl_registers_no_buffers_may_capture(
    join: Join, monkeypatch: pytest.MonkeyPatch, backends: str, ranks: int, registers: str | None
) -> None:
    graphs.check_registration()  # no group
    if registers is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", registers)
    join(backends, ranks)
    graphs.check_registration()
