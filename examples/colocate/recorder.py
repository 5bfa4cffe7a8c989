"""The recording of the steps that a picture shows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from .report import Report, Span
from .timeline import BOOT_ID, ProcessSamples, Timeline, within
from .workers import Workers


class Recorder:
    """Has all actors sample their memory during the last steps of a run, and joins the samples to a timeline."""

    def __init__(self, report: Report, steps: int) -> None:
        """`steps`: the number of steps to record; 0 records nothing."""
        self._report, self._steps = report, steps
        self._spans: list[Span] = []
        self.timeline: Timeline | None = None

    @contextmanager
    def step(self, number: int, last: int, workers: Workers) -> Iterator[None]:
        """Around a step of a run whose last step is `last`. Steps before the recorded ones run without sampling."""
        if number <= last - self._steps:
            yield
            return
        # In each step, since an actor may have replaced another.
        ray.get([actor.start_sampling.remote() for actors in workers.by_role.values() for actor in actors])
        began = time.monotonic()
        yield
        self._spans.append(Span(f"{number}", began, time.monotonic()))

    def finish(self, workers: Workers) -> None:
        """End the sampling and make the timeline."""
        if not self._spans:
            return
        calls = [actor.stop_sampling.remote() for actors in workers.by_role.values() for actor in actors]
        found: list[ProcessSamples] = ray.get(calls)
        here, steps, figures = BOOT_ID.read_text().strip(), self._spans[-self._steps :], self._report.provenance()
        self.timeline = Timeline(
            hardware=figures["hardware"],
            date=figures["date"],
            commit=figures["commit"],
            phases=within(self._report.phase_spans(), steps),
            steps=steps,
            processes=[each for each in found if each.boot_id == here],
            left_out=[f"{each.role} {each.rank}" for each in found if each.boot_id != here],
        )
