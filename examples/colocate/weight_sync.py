"""The way of the trainer's weights into the engines."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray

from .actors import WeightsWritten
from .report import Report


class WeightSync:
    """Brings the trainers' weights to the engines, within the phase "sync"."""

    def __init__(self, engines: Sequence[Any], trainers: Sequence[Any], way: str, report: Report) -> None:
        """`way`: "attach" (the trainers write into the engines' tensors) or "buckets" (through host memory)."""
        self._engines, self._trainers, self._way, self._report = engines, trainers, way, report

    def bring(self) -> list[WeightsWritten]:
        """Overwrite the engines' weights. Returns the figures of each rank; of buckets there are none."""
        began = time.perf_counter()
        written = self._write() if self._way == "attach" else self._send()
        self._report.sync_seconds.append(time.perf_counter() - began)
        return written

    def buckets(self) -> Iterator[Any]:
        """References to the buckets. The contents go from actor to actor."""
        ray.get([trainer.begin_sync.remote() for trainer in self._trainers])
        while True:
            pairs = [trainer.next_bucket.options(num_returns=2).remote() for trainer in self._trainers]
            if not ray.get([more for more, _ in pairs])[0]:
                return
            yield pairs[0][1]

    def _write(self) -> list[WeightsWritten]:
        shared = ray.get([engine.share_weights.remote() for engine in self._engines])
        written: list[WeightsWritten] = ray.get([trainer.write_weights.remote(shared) for trainer in self._trainers])
        return written

    def _send(self) -> list[WeightsWritten]:
        """One bucket is loaded while the next is gathered: two are in memory at a time."""
        loading: list[Any] = []
        for bucket in self.buckets():
            ray.get(loading)
            loading = [engine.load_bucket.remote(bucket) for engine in self._engines]
        ray.get([*loading, *(engine.end_load.remote() for engine in self._engines)])
        return []
