"""Device memory over the last steps of a run: samples of all actors, and the phases and steps of the loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .report import Span
from .sampler import Sample

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProcessSamples:
    """The samples of one actor."""

    role: str
    rank: int
    pid: int
    device: str  # its UUID
    device_bytes: int
    boot_id: str  # of the machine: clocks of different machines cannot be compared
    samples: list[Sample]


@dataclass(frozen=True)
class Timeline:
    """Times are in seconds by `time.monotonic()` of the machine of the loop.

    `phases`: a span from the end of the turn into a phase to the begin of the next turn. The time between two spans is
    a transition. `left_out`: actors on other machines, whose clocks differ.
    """

    hardware: str
    date: str
    commit: str
    phases: list[Span]
    steps: list[Span]
    processes: list[ProcessSamples]
    left_out: list[str]

    @property
    def begin(self) -> float:
        return self.steps[0].begin

    @property
    def end(self) -> float:
        return self.steps[-1].end

    def last_steps(self, count: int) -> Timeline:
        """The same for the last steps alone."""
        steps = self.steps[-count:]
        return replace(self, steps=steps, phases=within(self.phases, steps))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Timeline:
        """Raises ValueError for a file that `save` did not write."""
        try:
            found = json.loads(path.read_text())
            for name in ("phases", "steps"):
                found[name] = [Span(**each) for each in found[name]]
            found["processes"] = [
                ProcessSamples(**{**each, "samples": [Sample(**one) for one in each["samples"]]})
                for each in found["processes"]
            ]
            return cls(**found)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{str(path)!r} cannot be read: {error!r}, expected a file of --picture") from error


def within(phases: Sequence[Span], steps: Sequence[Span]) -> list[Span]:
    """The parts of the phases within these steps."""
    begin, end = steps[0].begin, steps[-1].end
    cut = [Span(each.name, max(each.begin, begin), min(each.end, end)) for each in phases]
    return [each for each in cut if each.begin < each.end]
