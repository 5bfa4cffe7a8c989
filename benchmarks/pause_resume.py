"""Pause, resume and switch, beside torch_memory_saver and plain copies, on the same work in one run.

    python benchmarks/pause_resume.py [--only table first switch handover host_memory] [--rounds 1] [--cycles 5]
                                      [--scale 1.0] [--device cuda:0] [--no-peer]

Prints tables of milliseconds (medians) and of their part of the limit, then one JSON line with every sample. Subjects
take turns, each time in a new process, because a machine's speed drifts over seconds; the peer that pins anew at every
pause has one round of one cycle. The limit is measured before each of them: 16 GiB of plain copies between the device
and pinned memory, one way, the other, and both at once. Contents are random, change before every pause, and are
compared whole after every cycle where they are backed up. Needs 96 GiB of device memory and 80 of the host's, times
``--scale``. With ``--device cpu`` it runs on the host driver, on a small scale, which checks the benchmark and measures
nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from support import first_pause, subjects, switches
from support.arguments import add_device, count, parse, parser_for, positive
from support.environment import environment
from support.host import GIB, MIB
from support.limits import Limit
from support.processes import Sample, in_process
from support.work import LARGE, MEDIUM, SMALL, Work, size

PARTS = ("table", "first", "switch", "handover", "host_memory")
COLUMNS = ("first pause", "first resume", "pause", "resume")
NAME = 40  # characters


def median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None


def cell(took_ms: float | None, limit_ms: float | None = None) -> str:
    """Milliseconds, and how much of the limit's rate that is."""
    if took_ms is None:
        return f"{'-':>9}{'':7}"
    return f"{took_ms:9.1f}" + (f"{100 * limit_ms / took_ms:5.0f} %" if limit_ms else f"{'':7}")


class Row:
    """The samples of the processes of one subject, in ms; ``first``: of each process's first cycle."""

    def __init__(self) -> None:
        self.first_pause_ms: list[float] = []
        self.first_resume_ms: list[float] = []
        self.pause_ms: list[float] = []
        self.resume_ms: list[float] = []
        self.error: str | None = None

    def add(self, sample: Sample) -> None:
        self.error = sample.get("error", self.error)
        for name in ("pause_ms", "resume_ms"):
            first, *later = sample.get(name) or [None]
            if first is not None:
                getattr(self, f"first_{name}").append(first)
                getattr(self, name).extend(later)

    def text(self, out_ms: float | None, into_ms: float | None) -> str:
        columns = (self.first_pause_ms, self.first_resume_ms, self.pause_ms, self.resume_ms)
        cells = "".join(cell(median(each), limit) for each, limit in zip(columns, (out_ms, into_ms) * 2))
        return self.error if self.error is not None and not self.pause_ms else cells + (self.error or "")


class Run:
    """One run of the benchmark; each part prints its table and returns its part of the JSON line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device: str = options.device
        self.peer_version = None if options.no_peer or options.device == "cpu" else subjects.peer_version()
        self.peers = subjects.PEERS if self.peer_version else ()
        self.limit = Limit(MEDIUM.scaled(options.scale).total, self.device)
        self.peer_first_pause_ms: list[float] = []
        self.fresh: dict[Work, Sample] = {}  # samples of first pauses with the arena grown

    def scaled(self, work: Work) -> Work:
        return work.scaled(self.options.scale)

    def limit_of(self, work: Work, since: int) -> dict[str, float | None]:
        """Milliseconds for the bytes of this work: out, in, and out and in at once."""
        return {way: self.limit.milliseconds(way, work.total, since) for way in ("out", "into", "both")}

    def print_limit(self, limit: dict[str, float | None]) -> None:
        if self.limit.error is not None:
            print(f"{'plain pinned copies':{NAME}} {self.limit.error}")
            return
        out, into, both = limit["out"], limit["into"], limit["both"]
        print(f"{'plain pinned copies':{NAME}} {cell(out)}{cell(into)}  both ways at once {cell(both).strip()}")

    def table(self) -> Sample:
        return {str(self.scaled(work)): self.table_of(work) for work in (LARGE, MEDIUM, SMALL)}

    def table_of(self, work: Work) -> Sample:
        backed_up, scaled, since = work.backed_up, self.scaled(work), len(self.limit.all)
        names = subjects.OURS + (self.peers if backed_up else self.peers[:1])
        rows = {name: Row() for name in names}
        print(f"\n{scaled}\n{'':{NAME}} " + "".join(f"{column:>16}" for column in COLUMNS), flush=True)
        for turn in range(self.options.rounds):
            for name, row in rows.items():
                slow = backed_up and name == subjects.SLOW
                if turn > 0 and slow:
                    continue
                if backed_up:
                    self.limit.measure()
                cycles = min(1, self.options.cycles) if slow else self.options.cycles
                row.add(in_process(subjects.measure, name=name, work=scaled, cycles=cycles, device=self.device))
        if backed_up:
            self.limit.measure()
        limit = self.limit_of(scaled, since)
        for name, row in rows.items():
            print(f"{name:{NAME}} {row.text(limit['out'], limit['into'])}")
        if backed_up:
            self.print_limit(limit)
        if work is MEDIUM and subjects.SLOW in rows:
            self.peer_first_pause_ms = rows[subjects.SLOW].first_pause_ms
        return {"limit_ms": limit, "rows": {name: vars(row) for name, row in rows.items()}}

    def first(self) -> Sample:
        """First pauses with the arena grown in the background, and with that off; the peer's beside them."""
        work, since = self.scaled(MEDIUM), len(self.limit.all)
        ways = {"arena grown in the background": True, "background growth off": False}
        samples: dict[str, list[Sample]] = {way: [] for way in ways}
        for _ in range(max(2, self.options.rounds)):
            for way, ahead in ways.items():
                self.limit.measure()
                samples[way].append(in_process(first_pause.measure, work=work, device=self.device, ahead=ahead))
        self.fresh[work] = samples["arena grown in the background"][0]
        error = None
        if self.peers and not self.peer_first_pause_ms:
            peer = in_process(subjects.measure, name=subjects.SLOW, work=work, cycles=0, device=self.device)
            error, self.peer_first_pause_ms = peer.get("error"), peer.get("pause_ms", [])
        limit = self.limit_of(work, since)
        print(f"\nfirst pause of {work}, in new processes\n{'':{NAME}} {'pause':>16}{'then resume':>16}")
        for way, each in samples.items():
            row = {name: [one[name] for one in each if name in one] for name in ("pause_ms", "resume_ms")}
            notes = [one["error"] for one in each if "error" in one]
            for name, text in (
                ("growth_s", "grown {:.2f} s after the first allocation"),
                ("touch_s", "host memory touched before by the process, in {:.2f} s"),
            ):
                notes += [
                    text.format(statistics.median(found)) for found in [[o[name] for o in each if name in o]] if found
                ]
            cells = cell(median(row["pause_ms"]), limit["out"]) + cell(median(row["resume_ms"]), limit["into"])
            print(f"{way:{NAME}} {cells}  {'; '.join(notes)}")
        if self.peers:
            print(f"{subjects.SLOW:{NAME}} {error or cell(median(self.peer_first_pause_ms), limit['out'])}")
        self.print_limit(limit)
        return {"limit_ms": limit, "rows": samples, "peer_first_pause_ms": self.peer_first_pause_ms}

    def switch(self) -> Sample:
        work, since = self.scaled(MEDIUM), len(self.limit.all)
        self.limit.measure()
        sample = in_process(switches.measure_full, work=work, cycles=self.options.cycles, device=self.device)
        self.limit.measure()
        limit = self.limit_of(work, since)
        print(f"\n{size(work.total)} out of one region, as many into another, both backed up, on a full device")
        if "error" in sample:
            print(sample["error"])
        else:
            spare, after, beyond = (size(sample[f"{name}_bytes"]) for name in ("spare", "spare_after", "beyond"))
            both, one_by_one = median(sample["switch_ms"]) or 0, median(sample["one_after_the_other_ms"]) or 0
            rate = 2 * work.total / both / 1e6
            print(f"{'switch':{NAME}} {cell(both, limit['both'])}  {rate:.1f} GB/s in all")
            print(f"{'pause, then resume':{NAME}} {cell(one_by_one)}  {one_by_one / both:.2f} times as long")
            print(f"to spare: {spare} before, {after} after the cycles; a switch took {beyond} beyond what was there")
        self.print_limit(limit)
        return {"limit_ms": limit, **sample}

    def handover(self) -> Sample:
        work = self.scaled(LARGE)
        sample = in_process(switches.measure_handover, work=work, cycles=self.options.cycles, device=self.device)
        took = sample.get("error") or f"{sample['median_ms']:.1f} ms"
        print(f"\n{size(work.total)} out of one region, into another, without backup, chunks handed on: {took}")
        return sample

    def host_memory(self) -> Sample:
        """After a pause in a new process: its memory beyond that of the region's segments."""
        rows = {}
        print("\nhost memory after a pause, in a new process, GiB")
        print(f"{'':{NAME}} {'held':>9}{'torch says':>12}{'we say':>9}{'beyond':>12}{'RSS grew':>10}")
        for work in (self.scaled(MEDIUM), self.scaled(SMALL)):
            if "pause_ms" not in self.fresh.get(work, {}):
                self.fresh[work] = in_process(first_pause.measure, work=work, device=self.device, ahead=True)
            row = rows[str(work)] = self.fresh[work]
            if "error" in row:
                print(f"{work!s:{NAME}} {row['error']}")
                continue
            needed = row["segment_bytes"] or row["allocated_bytes"]
            held, beyond = row["host_held_bytes"], row["host_held_bytes"] - needed
            grew = row.get("VmRSS_growth_bytes", 0)
            verdict = "within" if abs(beyond) <= 0.02 * needed + 64 * MIB else "NOT within"
            print(
                f"{work!s:{NAME}} {held / GIB:9.3f}{(row['segment_bytes'] or 0) / GIB:12.3f}"
                f"{row['allocated_bytes'] / GIB:9.3f}{beyond / MIB:8.1f} MiB{grew / GIB:10.3f}"
                f"  {verdict} 2 % + 64 MiB"
            )
        return rows


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=count, default=1, help="processes for each subject of the table")
    parser.add_argument("--cycles", type=count, default=5, help="in each process, after a first")
    parser.add_argument("--scale", type=positive, help="of the sizes (default: 1, on the CPU 0.01)")
    add_device(parser)
    parser.add_argument("--no-peer", action="store_true", help="without torch_memory_saver")
    options = parse(parser, scale=(1.0, 0.01))
    begin = time.monotonic()
    run = Run(options)
    results: dict[str, Any] = {"benchmark": "pause_resume", **environment(options.device), "scale": options.scale}
    results["peer"] = {"name": subjects.SLOW, "version": run.peer_version}
    results["parts"] = {}
    for part in PARTS:
        if part in options.only:
            results["parts"][part] = getattr(run, part)()
    run.limit.close()
    results["limit"] = {"bytes": run.limit.nbytes, "samples": run.limit.all, "error": run.limit.error}
    results["seconds"] = time.monotonic() - begin
    print(f"\ntook {results['seconds']:.0f} s\n{json.dumps(results)}")


if __name__ == "__main__":
    main()
