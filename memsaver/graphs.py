"""CUDA graphs whose memory is a region, and which refuse to run while what they need is away."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memsaver import _core, regions
from memsaver.errors import Error, RegionPausedError
from memsaver.regions import Region, Tags


class CUDAGraph(torch.cuda.CUDAGraph):
    """A ``torch.cuda.CUDAGraph`` whose :meth:`replay` raises RegionPausedError while a region it needs has no memory.

    It needs the region it was captured into, and what ``memsaver.graph(needs=...)`` named. Making one raises
    memsaver.Error where torch was built without CUDA.
    """

    def __new__(cls, keep_graph: bool = False) -> CUDAGraph:
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

    def add_needs(self, needed: Iterable[Region]) -> None:
        self._needs = tuple(dict.fromkeys((*self._needs, *needed)))

    def capture_begin(self, pool: Any = None, **kwargs: Any) -> None:  # type: ignore[override]
        super().capture_begin(pool=pool, **kwargs)
        region = regions.adapter().graph_region(tuple(pool)) if pool is not None else None
        if region is not None:
            self.add_needs([region])

    def replay(self) -> None:
        cores = [region._core for region in self._needs]
        # From here until the launch is queued no pause can begin; a later one waits for the device.
        away = _core.acquire(cores)
        if away is not None:
            raise RegionPausedError(
                f"the graph needs region {away.tag!r}, which is {away.state}", tag=away.tag, state=away.state
            )
        try:
            super().replay()
        finally:
            _core.release(cores)


@contextmanager
def graph(
    cuda_graph: CUDAGraph,
    region: str | Region = "cuda_graph",
    needs: Tags | Iterable[Region] = (),
    stream: torch.cuda.Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """Captures into the graph pool of a region, as ``torch.cuda.graph`` does into a private one.

    ``region``: a region, or the tag of one with ``backup="host"`` on the current device (graph pools hold state that
    kernels keep between replays, so discarding them is a choice to be made by name). Graphs that share a region share
    its pool. ``needs``: tags or regions that the graph's kernels touch besides. Other arguments are torch's.

    Raises TypeError and ValueError for wrong arguments and RegionPausedError for regions without memory, before the
    capture begins. A capture that fails raises its reason; region and pool stay usable.
    """
    if not isinstance(cuda_graph, CUDAGraph):
        raise TypeError(f"cuda_graph is {type(cuda_graph).__name__}, expected a memsaver.CUDAGraph")
    home = region if isinstance(region, Region) else regions.region(region, backup="host")
    needed = [home, *_resolve(needs)]
    home.check_fillable("take a capture")
    for each in needed:
        each.check_active("be used by a capture")
    pool = regions.adapter().pool(home)
    device = torch.device(home.device)
    before = torch.cuda.current_stream(device)
    completed = False
    try:
        with (
            regions.outside(),
            torch.cuda.device(device),
            # Backward on this thread too: autograd's own may lack a cuBLAS handle, which cannot be made in a capture.
            torch.autograd.set_multithreading_enabled(False),
            torch.cuda.graph(cuda_graph, pool=pool.id, stream=stream, capture_error_mode=capture_error_mode),
        ):
            yield
        completed = True
    finally:
        if not completed:
            _clean_up(device, before)
    cuda_graph.add_needs(needed)


def _resolve(needs: Any) -> list[Region]:
    if needs is None or isinstance(needs, str):
        return regions.find(needs or ())
    found: list[Region] = []
    for each in needs:
        found += [each] if isinstance(each, Region) else regions.find([each])
    return found


def _clean_up(device: torch.device, before: torch.cuda.Stream) -> None:
    """Undoes what torch leaves behind when ending a capture fails: its stream, and the random generator's state."""
    torch.cuda.set_stream(before)
    generator = torch.cuda.default_generators[device.index]
    generator.graphsafe_set_state(generator.clone_state())
