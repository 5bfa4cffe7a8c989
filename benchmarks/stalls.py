"""How long other threads are held up while one allocates a KV cache: with memsaver, and in torch's default pool.

    python benchmarks/stalls.py [--part 0.6] [--rounds 5] [--device cuda:0]

While the main thread allocates ``--part`` of the device in one tensor, another thread does one of three things again
and again: it enters a region and leaves it (torch: a MemPool over its default allocator), it replays a small graph
(memsaver: a guarded one), or it does nothing, which shows waits for the GIL. Prints the longest of these calls
in ms while nothing is allocated, and during the allocation (medians over rounds), then one JSON line. With ``--device
cpu`` it runs on the host driver, without graphs, and measures nothing.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

import memsaver
from support.arguments import add_device, count, parse, parser_for, positive
from support.environment import environment
from support.host import GIB, MIB
from support.processes import Sample, in_process
from support.work import size, synchronize

SUBJECTS = ("memsaver", "torch")
DEEDS = ("enter and leave", "replay", "nothing")
PAUSE_S = 50e-6  # between two calls
QUIET_S = 0.05  # of each round, before and after the allocation


class Watch:
    """A thread that calls something again and again; begin and end of each call."""

    def __init__(self, act: Callable[[], object], device: str) -> None:
        self._act = act
        self._device = device
        self._over = threading.Event()
        self._begun = threading.Event()
        self.calls: list[tuple[float, float]] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            if self._device != "cpu":
                torch.cuda.set_device(self._device)
            for _ in range(10):  # a thread's first calls make its pool, its state in torch, its driver's context
                self._act()
            self._begun.set()
            while not self._over.is_set():
                begin = time.perf_counter()
                self._act()
                self.calls.append((begin, time.perf_counter()))
                time.sleep(PAUSE_S)
        except BaseException as error:
            self._error = error
            self._begun.set()

    def __enter__(self) -> Watch:
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def longest_ms(self, begin: float, end: float, within: bool) -> float:
        """Of the calls that overlap this time, or of the others."""
        took = [to - since for since, to in self.calls if (since < end and to > begin) == within]
        return 1e3 * max(took, default=0.0)


def stalls(subject: str, nbytes: int, rounds: int, device: str) -> Sample:
    if device != "cpu":
        torch.cuda.set_device(device)
    regions = subject == "memsaver"
    cache = memsaver.region("kv_cache", device=device) if regions else None
    found: Sample = {}
    for deed in DEEDS:
        act = _act(subject, deed, device)
        if act is None:
            continue
        quiet, during, allocations = [], [], []
        for _ in range(rounds):
            with Watch(act, device) as watch:
                time.sleep(QUIET_S)
                with cache if cache is not None else nullcontext():
                    begin = time.perf_counter()
                    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
                    end = time.perf_counter()
                time.sleep(QUIET_S)
            allocations.append(1e3 * (end - begin))
            quiet.append(watch.longest_ms(begin, end, within=False))
            during.append(watch.longest_ms(begin, end, within=True))
            del tensor
            synchronize(device)
            if cache is not None:
                memsaver.trim(cache.tag)
            elif device != "cpu":
                torch.cuda.empty_cache()
        found[deed] = {"allocation_ms": allocations, "quiet_ms": quiet, "during_ms": during}
    return found


def _act(subject: str, deed: str, device: str) -> Callable[[], object] | None:
    """None where there is nothing to compare."""
    if deed == "nothing":
        return lambda: time.sleep(PAUSE_S)
    if deed == "enter and leave":
        enter: Callable[[], AbstractContextManager[Any]]
        if subject == "memsaver":
            region = memsaver.region("entered", device=device)
            enter = lambda: region  # noqa: E731
        elif device != "cpu":
            pool = torch.cuda.MemPool()
            enter = lambda: torch.cuda.use_mem_pool(pool)  # noqa: E731
        else:
            return None

        def enter_and_leave() -> None:
            with enter():
                pass

        return enter_and_leave
    return None if device == "cpu" else _graph(subject, device).replay


def _graph(subject: str, device: str) -> torch.cuda.CUDAGraph:
    value = torch.zeros(1000, device=device)
    value.add_(1)
    graph = memsaver.CUDAGraph() if subject == "memsaver" else torch.cuda.CUDAGraph()
    with _capture(graph, subject):
        value.add_(1)
    graph.value = value  # type: ignore[attr-defined]  # the graph itself keeps no reference to it
    return graph


@contextmanager
def _capture(graph: Any, subject: str) -> Iterator[None]:
    with memsaver.graph(graph) if subject == "memsaver" else torch.cuda.graph(graph):
        yield


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--part", type=positive, default=0.6, help="of the GPU, for the KV cache")
    parser.add_argument("--rounds", type=count, default=5)
    add_device(parser)
    options = parse(parser)
    begin = time.monotonic()
    if options.device == "cpu":
        nbytes = int(options.part * GIB)
    else:
        nbytes = int(options.part * torch.cuda.get_device_properties(options.device).total_memory)
    nbytes = nbytes // (2 * MIB) * 2 * MIB
    print(f"longest call of another thread while {size(nbytes)} are allocated, ms")
    print(f"{'':12}{'':18}{'quiet':>10}{'during':>10}{'allocation':>12}")
    samples = {}
    for subject in SUBJECTS:
        found = samples[subject] = in_process(
            stalls, subject=subject, nbytes=nbytes, rounds=options.rounds, device=options.device
        )
        if "error" in found:
            print(f"{subject:12}{found['error']}")
            continue
        for deed, row in found.items():
            cells = (statistics.median(row[key]) for key in ("quiet_ms", "during_ms", "allocation_ms"))
            print(f"{subject:12}{deed:18}" + "{:10.3f}{:10.3f}{:12.1f}".format(*cells), flush=True)
    result = {"benchmark": "stalls", **environment(options.device), "bytes": nbytes, "samples": samples}
    print(json.dumps({**result, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
