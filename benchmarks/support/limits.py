"""The limits of the bus: plain copies between a device and pinned memory, one way, the other, and both at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from memsaver import _core
from support import host
from support.processes import Process, Sample
from support.work import milliseconds

PIECE = 64 * host.MIB


class PlainCopies:
    """Copies of ``nbytes`` each way in pieces of 64 MiB, each direction on a stream and in memory of its own.

    ``footprint``: bytes of memory that each direction goes through, again and again; all by default. Without CUDA the
    copies are host memory's, one after the other.
    """

    def __init__(self, nbytes: int, device: str, footprint: int | None = None) -> None:
        self.nbytes, self.device = nbytes, device
        length = min(nbytes, footprint or nbytes)
        if device == "cpu":
            self._out, self._into = (host.anonymous(length) for _ in range(2))
        else:
            torch.cuda.set_device(device)
            torch.cuda.init()
            node = _core.open_driver(device).host_node()
            self._out, self._into = (host.pinned(length, node) for _ in range(2))
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._source, self._target = (torch.ones(length, dtype=torch.uint8, device=device) for _ in range(2))
        self.both()  # one-time work is done here

    def _copy(self, at: int, out: bool) -> None:
        at %= self._out.numel()
        piece = slice(at, min(at + PIECE, self._out.numel()))
        to, source = (self._out, self._source) if out else (self._target, self._into)
        if self.device == "cpu":
            to[piece].copy_(source[piece])
            return
        with torch.cuda.stream(self._streams[out]):
            to[piece].copy_(source[piece], non_blocking=True)

    def _milliseconds(self, *directions: bool) -> float:
        def copies() -> None:
            for at in range(0, self.nbytes, PIECE):
                for out in directions:
                    self._copy(at, out)

        return milliseconds(self.device, copies)

    def out(self) -> float:
        return self._milliseconds(True)

    def into(self) -> float:
        return self._milliseconds(False)

    def both(self) -> float:
        return self._milliseconds(True, False)


def samples(nbytes: int, device: str) -> Iterator[Sample]:
    copies = PlainCopies(nbytes, device)
    while True:
        yield {"out_ms": copies.out(), "into_ms": copies.into(), "both_ms": copies.both()}


class Limit:
    """Measured by one process that stays, as often as :meth:`measure` is called: the machine's speed drifts."""

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        self.all: list[Sample] = []
        self.error: str | None = None
        self._process = Process(samples, nbytes=nbytes, device=device)

    def measure(self) -> None:
        if self.error is not None:
            return
        sample = self._process.ask()
        self.error = sample.get("error")
        if self.error is None:
            self.all.append(sample)

    def milliseconds(self, direction: str, nbytes: int, since: int = 0) -> float | None:
        """Median, for so many bytes each way, of the samples from number ``since`` on; None where there is none."""
        found = [sample[f"{direction}_ms"] for sample in self.all[since:]]
        return statistics.median(found) * nbytes / self.nbytes if found else None

    def close(self) -> None:
        self._process.close()
