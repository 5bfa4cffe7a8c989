"""Memory, files and threads of processes and a device, sample by sample, and their growth."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from support.host import MIB, status

Sample = dict[str, int]  # figure -> bytes, or a count

# The most growth of a figure, between the medians of the first and the last quarter of its samples.
TOLERANCES: Sample = {
    "device": 32 * MIB,  # a context loads kernels when they are first used
    "pool": 0,
    "pinned": 2 * MIB,
    "disk": 2 * MIB,
    "rss": 16 * MIB,  # the interpreter and malloc keep some freed memory
    "pss": 16 * MIB,
    "addresses": 256 * MIB,  # malloc reserves 64 MiB for a thread that finds none free
    "descriptors": 2,
    "threads": 1,
    "unreleased": 0,
}
FEWEST = 8  # samples of one run of the processes, for quarters that mean something


def of_process(pid: int) -> Sample:
    memory = status(f"/proc/{pid}/status")
    return {
        "rss": memory["VmRSS"],
        "pss": status(f"/proc/{pid}/smaps_rollup")["Pss"],
        "addresses": memory["VmSize"],
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
    }


@dataclass(frozen=True)
class Growth:
    """One figure of one holder. ``first`` and ``last``: medians of quarters; ``grown``: summed over runs."""

    holder: str
    figure: str
    first: float
    last: float
    grown: float

    @property
    def tolerance(self) -> int:
        return TOLERANCES[self.figure]

    @property
    def is_too_much(self) -> bool:
        return self.grown > self.tolerance

    def text(self) -> str:
        unit = 1 if self.figure in ("descriptors", "threads") else MIB
        cells = "".join(f"{value / unit:12.1f}" for value in (self.first, self.last, self.grown, self.tolerance))
        return f"{self.holder:10}{self.figure:14}{cells}  {'grows' if self.is_too_much else ''}"


HEAD = f"{'':10}{'MiB or count':14}{'first':>12}{'last':>12}{'grown':>12}{'tolerance':>12}"


def growths(runs: Sequence[Sequence[dict[str, Sample]]]) -> list[Growth]:
    """Of each holder's figures. ``runs``: samples by holder, those of each run of the processes together.

    A run with fewer than ``FEWEST`` samples counts for nothing; nor do its first two, in which all begins.
    """
    long = [run[2:] for run in runs if len(run) >= FEWEST]
    found = []
    for holder, figures in (long[0][0] if long else {}).items():
        for figure in figures:
            series = [[sample[holder][figure] for sample in run] for run in long]
            quarters = [(_median(each, 0), _median(each, -1)) for each in series]
            grown = sum(last - first for first, last in quarters)
            found.append(Growth(holder, figure, quarters[0][0], quarters[-1][1], grown))
    return found


def counted(runs: Sequence[Sequence[object]]) -> int:
    """How many samples growths() looks at."""
    return sum(len(run) - 2 for run in runs if len(run) >= FEWEST)


def _median(series: Sequence[int], side: int) -> float:
    quarter = max(1, len(series) // 4)
    return statistics.median(series[:quarter] if side == 0 else series[-quarter:])
