"""CUDA graphs with their memory in a region. A replay raises while a region that the graph needs has no memory.

The core is told of captures by torch: a device-wide wait would break one under way.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from memsaver import _core, regions
from memsaver._adapter import adapter, note
from memsaver._torch.stale import check_first_use
from memsaver.errors import ConfigError, Error, RegionPausedError, checked
from memsaver.regions import Region, Selection

_under_way: dict[int, tuple[weakref.finalize[Any, Any], Any]] = {}  # the end and the pool, by the id of the graph
Failed = Callable[[torch.cuda.CUDAGraph, tuple[int, int]], object]
"""Called with a graph whose capture could not end, and the id of its pool."""


class CUDAGraph(torch.cuda.CUDAGraph):
    """A ``torch.cuda.CUDAGraph`` that checks its regions before each replay.

    It needs the region that it was captured into, and the regions that ``memsaver.graph(needs=...)`` names. The
    constructor has the parameters of ``torch.cuda.CUDAGraph``, and raises memsaver.Error if torch was built without
    CUDA.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cuda")
        >>> cache = kv.empty((16,)).zero_()
        >>> torch.cuda.synchronize()
        >>> graph = memsaver.CUDAGraph()
        >>> with memsaver.graph(graph, needs="kv_cache"):
        ...     _ = cache.add_(1)
        >>> graph.replay()
        >>> _ = kv.pause()
        >>> graph.replay()
        Traceback (most recent call last):
        memsaver.errors.RegionPausedError: the graph needs region 'kv_cache', which is paused
    """

    def __new__(cls, keep_graph: bool = False) -> CUDAGraph:
        """Makes a graph.

        Args:
            keep_graph: As for ``torch.cuda.CUDAGraph``.

        Raises:
            memsaver.Error: torch was built without CUDA.
        """
        if not torch.backends.cuda.is_built():
            raise Error(f"this build of torch ({torch.__version__}) has no CUDA, and graphs are made of CUDA kernels")
        made: CUDAGraph = super().__new__(cls, keep_graph)
        made._needs = ()
        return made

    _needs: tuple[Region, ...]

    @property
    def needs(self) -> tuple[Region, ...]:
        """The regions that must be active for a replay."""
        return self._needs

    def _add_needs(self, needed: Iterable[Region]) -> None:
        self._needs = tuple(dict.fromkeys((*self._needs, *needed)))

    def capture_begin(self, pool: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Begins a capture, as ``torch.cuda.CUDAGraph`` does. ``memsaver.graph()`` calls it.

        Args:
            pool: The id of a memory pool. If it is that of a region's pool, the graph needs the region.
            kwargs: As for ``torch.cuda.CUDAGraph.capture_begin``.
        """
        _begin_capture(self, pool, partial(super().capture_begin, pool=pool, **kwargs))
        region = adapter().graph_region(tuple(pool)) if pool is not None else None
        self._needs = () if region is None else (region,)  # an earlier graph of this object is gone: see reset()

    def capture_end(self) -> None:
        """Ends a capture, as ``torch.cuda.CUDAGraph`` does. ``memsaver.graph()`` calls it."""
        _end_capture(self, super().capture_end, adapter().capture_failed)

    def replay(self) -> None:
        """Launches the graph on the current stream. No pause of its regions begins before the launch is queued.

        Raises:
            RegionPausedError: A region that the graph needs is not active.
        """
        for region in self._needs:
            region._arrive()
        check_first_use(self._needs)
        cores = [region._core for region in self._needs]
        # From here until the launch is queued no pause can begin; a later one waits for the device.
        paused = _core.acquire(cores)
        if paused is not None:
            raise RegionPausedError(
                f"the graph needs region {paused.tag!r}, which is {paused.state}", tag=paused.tag, state=paused.state
            )
        try:
            super().replay()
        finally:
            _core.release(cores)


@contextmanager
def graph(
    cuda_graph: CUDAGraph,
    region: str | Region = "cuda_graph",
    *,
    needs: Selection = (),
    stream: torch.cuda.Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """Captures a graph into the graph pool of a region, as ``torch.cuda.graph`` does into a private pool.

    Graphs that are captured into one region share its pool. If a capture fails, its error is raised, and region and
    pool stay usable.

    Args:
        cuda_graph: The graph.
        region: A region, or the tag of a region with ``backup="host"`` on the current device. Graph pools hold state
            that kernels keep between replays, so a policy that discards contents has to be chosen by a Region.
        needs: A tag, a Region, or several of either: other regions that the graph's kernels use. None: all regions.
        stream: As for ``torch.cuda.graph``.
        capture_error_mode: As for ``torch.cuda.graph``.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A tag in ``needs`` has no region, or ``stream`` is on another device than the region.
        RegionPausedError: A region is not active. The capture has not begun.
        ConfigError: ``torch.distributed`` has process groups of several ranks with NCCL, and ``NCCL_GRAPH_REGISTER`` is
            not 0. The capture has not begun.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cuda")
        >>> cache = kv.empty((4,)).zero_()
        >>> torch.cuda.synchronize()
        >>> graph = memsaver.CUDAGraph()
        >>> with memsaver.graph(graph, region="cuda_graph", needs="kv_cache"):
        ...     _ = cache.add_(1)
        >>> graph.replay()
        >>> cache.tolist()
        [1.0, 1.0, 1.0, 1.0]
    """
    if not isinstance(cuda_graph, CUDAGraph):
        raise TypeError(f"cuda_graph is {type(cuda_graph).__name__}, expected a memsaver.CUDAGraph")
    check_registration()
    home = region if isinstance(region, Region) else regions.region(region, backup="host")
    needed = [home, *regions.find(needs, "needs")]
    home._check_fillable("take a capture")
    for each in needed:
        each.check_active("be used by a capture")
    pool: Any = adapter().pool(home).id
    device = torch.device(home.device)
    if stream is None:  # torch has one stream for captures on all devices, and captures on the stream's device
        stream = _stream(device)
    elif stream.device != device:
        raise ValueError(f"stream is on {stream.device}, expected one on {home.device}, the device of {home.tag!r}")
    before = torch.cuda.current_stream(device)
    try:
        with (
            regions.outside(),
            torch.cuda.device(device),
            # Backward on this thread too: autograd's own may lack a cuBLAS handle, which cannot be made in a capture.
            torch.autograd.set_multithreading_enabled(False),
            torch.cuda.graph(cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode),
        ):
            yield
    except BaseException:
        _clean_up(device, before)
        raise
    cuda_graph._add_needs(needed)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of captures on a device. Graphs with one pool share its blocks by stream."""
    return torch.cuda.Stream(device)


def check_registration() -> None:
    """Raises ConfigError if NCCL would hold on to the physical memory of a graph's buffers.

    NCCL, from 2.19 on by default, registers the buffers of captured collectives with peers and network cards. A pause
    takes the memory away, and a replay after the resume hangs. Python does not see if a graph has collectives. NCCL
    reads the variable at its first captured collective: a later change has no effect.
    """
    name = "NCCL_GRAPH_REGISTER"
    value = os.environ.get(name)
    if value == "0" or not _has_communicators():
        return
    text = (
        f"{name} is {'not set' if value is None else repr(value)}, expected '0' before the first process group exists: "
        "NCCL would register the buffers of captured collectives, and replays would hang after a pause and a resume"
    )
    raise ConfigError(checked(text), option=name, value=value)


def _has_communicators() -> bool:
    """Whether torch has process groups of several ranks with NCCL. One rank alone registers nothing."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return False
    world = dist.distributed_c10d._world
    return any(
        len(ranks) > 1 and "nccl" in str(world.pg_backend_config.get(group)).lower()
        for group, ranks in list(world.pg_group_ranks.items())
    )


def _clean_up(device: torch.device, before: torch.cuda.Stream) -> None:
    """Resets the state that torch leaves when ending a capture fails: its stream, and the random generator's state."""
    torch.cuda.set_stream(before)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())


def _begin_capture(graph: torch.cuda.CUDAGraph, pool: Any, call: Callable[[], None]) -> None:
    """Begins a capture by a function of torch."""
    if id(graph) in _under_way:  # a memsaver.CUDAGraph, whose method calls that of torch
        call()
        return
    begun: list[None] = []
    ends = weakref.finalize(graph, _ended, id(graph), begun)  # also when a graph goes away in mid-capture
    ends.atexit = False
    try:
        regions.begin_capture(begun)
        _under_way[id(graph)] = ends, pool
        call()
    except BaseException:
        ends()
        raise


def _end_capture(graph: torch.cuda.CUDAGraph, call: Callable[[], None], failed: Failed) -> None:
    """Ends a capture by a function of torch."""
    ends, pool = _under_way.pop(id(graph), (lambda: None, None))
    try:
        call()
    except BaseException:
        if pool is not None:
            failed(graph, tuple(pool))
        raise
    finally:
        ends()


def _ended(key: int, begun: list[None]) -> None:
    _under_way.pop(key, None)
    regions.end_capture(begun)


def observe_captures(failed: Failed) -> None:
    """Extends the methods of torch.cuda.CUDAGraph: see docs/what-it-touches.md."""
    original_begin, original_end = torch.cuda.CUDAGraph.capture_begin, torch.cuda.CUDAGraph.capture_end

    def capture_begin(graph: torch.cuda.CUDAGraph, pool: Any = None, *args: Any, **kwargs: Any) -> None:
        _begin_capture(graph, pool, partial(original_begin, graph, pool, *args, **kwargs))

    def capture_end(graph: torch.cuda.CUDAGraph) -> None:
        _end_capture(graph, partial(original_end, graph), failed)

    torch.cuda.CUDAGraph.capture_begin = capture_begin  # type: ignore[method-assign,assignment]
    torch.cuda.CUDAGraph.capture_end = capture_end  # type: ignore[method-assign,assignment]
    note("captures")
