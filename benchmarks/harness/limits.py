"""The limit of the bus: plain copies between a device and pinned memory, one way, the other, and both at once."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import torch

from benchmarks.harness.machine import MIB, anonymous, pinned
from benchmarks.harness.processes import Process, Sample
from benchmarks.harness.work import timed

_PIECE = 64 * MIB


class PlainCopies:
    """Copies of ``nbytes`` each way in pieces of 64 MiB, each direction on a stream and in memory of its own.

    ``footprint``: bytes of memory that each direction goes through, again and again; all by default. Without CUDA the
    copies are host memory's, one after the other.
    """

    def __init__(self, nbytes: int, device: str, footprint: int | None = None) -> None:
        self.nbytes, self.device = nbytes, device
        length = min(nbytes, footprint or nbytes)
        if device == "cpu":
            self._out, self._into = anonymous(length), anonymous(length)
        else:
            torch.cuda.set_device(device)
            self._out, self._into = pinned(length), pinned(length)
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._source, self._target = (torch.ones(length, dtype=torch.uint8, device=device) for _ in range(2))
        self.ms("both")  # one-time work is done here

    def _copy(self, at: int, out: bool) -> None:
        at %= self._out.numel()
        piece = slice(at, min(at + _PIECE, self._out.numel()))
        to, source = (self._out, self._source) if out else (self._target, self._into)
        if self.device == "cpu":
            to[piece].copy_(source[piece])
            return
        with torch.cuda.stream(self._streams[out]):
            to[piece].copy_(source[piece], non_blocking=True)

    def ms(self, direction: str) -> float:
        """Milliseconds of copies "out", "into", or "both" ways at once."""
        ways = {"out": (True,), "into": (False,), "both": (True, False)}[direction]

        def copies() -> None:
            for at in range(0, self.nbytes, _PIECE):
                for out in ways:
                    self._copy(at, out)

        return timed(self.device, copies)


def _samples(nbytes: int, device: str) -> Iterator[Sample]:
    copies = PlainCopies(nbytes, device)
    while True:
        yield {direction: copies.ms(direction) for direction in ("out", "into", "both")}


class Limit:
    """The plain copies in a process that stays. A machine's speed drifts, so :meth:`measure` is called again and again.

    A context manager that ends the process. ``samples``: milliseconds of ``nbytes`` each way.
    """

    def __init__(self, nbytes: int, device: str) -> None:
        self.nbytes = nbytes
        self.samples: list[Sample] = []
        self._process = Process(_samples, nbytes=nbytes, device=device)

    def measure(self) -> None:
        self.samples.append(self._process.ask())

    def ms(self, direction: str, nbytes: float, since: int = 0) -> float | None:
        """The median for so many bytes each way, of the samples from number ``since`` on. None if there is none."""
        found = [sample[direction] for sample in self.samples[since:]]
        return statistics.median(found) * nbytes / self.nbytes if found else None

    def __enter__(self) -> Limit:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()
