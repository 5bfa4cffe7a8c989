"""Samples of an actor's device memory, taken in a thread of the actor."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from memsaver import regions

log = logging.getLogger(__name__)

INTERVAL_S = 0.02


@dataclass(frozen=True)
class Sample:
    """Mapped bytes of an actor's regions by tag, at a time by `time.monotonic()`."""

    time: float
    regions: dict[str, int]


def mapped_bytes() -> dict[str, int]:
    """The mapped bytes of this process's regions by tag."""
    found: dict[str, int] = {}
    for region in regions.all_regions():
        found[region.tag] = found.get(region.tag, 0) + region.mapped_bytes
    return found


class Sampler:
    """Takes a sample every 20 ms, and one before and after each transition.

    A sample reads `mapped_bytes` of each region, as `memsaver.stats()` has it, without the other figures of `stats()`:
    those need calls to the driver and to the broker, which slowed the steps on two cores by a fifth.

    On Linux `time.monotonic()` is CLOCK_MONOTONIC, which all processes of one machine share.
    """

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._failed = False
        self._lock = threading.Lock()  # orders the samples of both threads
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin. A running sampler goes on."""
        if self._thread is None:
            self._failed = False
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="memory samples", daemon=True)
            self._take()
            self._thread.start()

    def stop(self) -> list[Sample]:
        """End, and return the samples in the order of their times."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
        samples, self._samples = self._samples, []
        return samples

    @contextmanager
    def around(self) -> Iterator[None]:
        """Take a sample before and after the body, where the sampler runs."""
        self._take()
        yield
        self._take()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._take()
            self._stopped.wait(INTERVAL_S)
        self._take()

    def _take(self) -> None:
        if self._thread is None or self._failed:
            return
        with self._lock:
            try:
                self._samples.append(Sample(time.monotonic(), mapped_bytes()))
            except Exception:  # a picture is no reason to end a run
                self._failed = True
                log.exception("a sample failed; the picture ends here")
