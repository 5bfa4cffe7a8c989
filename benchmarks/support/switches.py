"""One region out, another in: with contents on a full device, and without."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import memsaver
from memsaver import _core
from support.host import MIB
from support.processes import Sample
from support.work import RETAIN, Contents, Work, milliseconds

SPARE = 768 * MIB  # left free on a full device
WARM_UP = 6


class Sides:
    """Two regions of the same work with ``backup="host"``, of which one is resident."""

    def __init__(self, work: Work, device: str) -> None:
        self.device, self._resident = device, 1
        self.regions = [memsaver.region(f"side {i}", device=device, backup="host") for i in range(2)]
        self.contents = []
        for region in self.regions:
            with region:
                tensors = work.allocate(device)
            self.contents.append(Contents(tensors))
            if len(self.contents) == 1:
                region.pause()

    def turn(self, act: Callable[[Any, Any], object]) -> float:
        """Milliseconds of ``act(out, into)``; the contents that came in are compared."""
        out, into = self._resident, 1 - self._resident
        self.contents[out].change()
        took = milliseconds(self.device, partial(act, self.regions[out], self.regions[into]))
        self.contents[into].check()
        self._resident = into
        return took


def switch(out: Any, into: Any) -> None:
    memsaver.switch(pause=out.tag, resume=into.tag)


def one_after_the_other(out: Any, into: Any) -> None:
    out.pause()
    into.resume()


def free_bytes(device: str) -> int:
    free: int = _core.open_driver(device).memory()[0]
    return free


def spare_bytes(device: str) -> int:
    row = memsaver.stats().asdict()["devices"][device]
    return int(row["free_bytes"]) + int(row["retained_bytes"])


def fill(device: str) -> torch.Tensor:
    """Takes all but SPARE bytes of the device; on CUDA without memsaver."""
    memsaver.configure(retain=0)  # idle chunks go: they would be room to spare
    memsaver.configure(retain=RETAIN)
    nbytes = free_bytes(device) - SPARE
    if nbytes < 0:
        raise RuntimeError(f"{device} has {nbytes + SPARE} bytes free, and {SPARE} are to be left")
    if device == "cpu":
        return memsaver.region("filler", device=device).empty((nbytes,), torch.uint8)  # type: ignore[no-any-return]
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


class LeastFree:
    """The least that the device had free in a stretch, looked at all the time by a thread."""

    def __init__(self, device: str) -> None:
        self._driver = _core.open_driver(device)
        self.before = self.least = self._driver.memory()[0]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._stop.wait(0.0002):
            self.least = min(self.least, self._driver.memory()[0])

    def __enter__(self) -> LeastFree:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def measure_full(work: Work, cycles: int, device: str) -> Sample:
    """Switches both ways round on a full device, in turn with pause and then resume.

    Two more switches show the additional memory of a switch, since the sampling disturbs the times.
    """
    memsaver.configure(retain=RETAIN)
    sides = Sides(work, device)
    for act in (switch, switch, one_after_the_other, one_after_the_other):
        sides.turn(act)
    filler = fill(device)
    spare = spare_bytes(device)
    with LeastFree(device) as free:
        for _ in range(2):
            sides.turn(switch)
    switches: list[float] = []
    others: list[float] = []
    for _ in range(cycles):
        for acts, into in ((switch, switches), (one_after_the_other, others)):
            into.extend(sides.turn(acts) for _ in range(2))
    after = spare_bytes(device)
    del filler
    return {
        "bytes": work.total,
        "switch_ms": switches,
        "one_after_the_other_ms": others,
        "spare_bytes": spare,
        "spare_after_bytes": after,
        "beyond_bytes": free.before - free.least,
    }


def measure_handover(work: Work, cycles: int, device: str) -> Sample:
    """The same without a backup: chunks handed on within the process."""
    memsaver.configure(retain=RETAIN)
    regions = [memsaver.region(f"side {i}", device=device) for i in range(2)]
    contents = []
    for region in regions:
        with region:
            contents.append(Contents(work.allocate(device), kept=False))
        region.pause()
    regions[0].resume()
    took = []
    for cycle in range(4 * cycles + WARM_UP):
        out, into = cycle % 2, 1 - cycle % 2
        took.append(milliseconds(device, partial(switch, regions[out], regions[into])))
        contents[into].check()
    return {"bytes": work.total, "switch_ms": took[WARM_UP:], "median_ms": statistics.median(took[WARM_UP:])}
