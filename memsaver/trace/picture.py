"""Draws the memory of a device by owner over time."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from html import escape
from pathlib import Path

from memsaver.errors import GIB, Error
from memsaver.process_names import UNKNOWN
from memsaver.trace.files import Event
from memsaver.trace.writer import IDLE, OUTSIDE

MOVING = "moving"  # to or from regions, or allocated since the last transition
Samples = list[tuple[float, dict[str, float]]]
"""Seconds, and bytes by owner from then on. An owner is ``"PROCESS: REGION"``, ``OUTSIDE`` or ``IDLE``."""

_WIDTH, _HEIGHT, _LEFT, _TOP = 620, 300, 64, 12  # of the plot, and its place, in pixels
_LEGEND, _LINE, _BELOW = 240, 17, 40
_HUES = (210, 28, 120, 275, 0, 180, 50, 320)  # of processes, in degrees


def samples(events: Sequence[Event], device: str | None = None) -> Samples:
    """The memory of a device after each change. ``device``: its UUID; None: the only one of the trace. Raises Error.

    A transition notes the bytes of regions at its ends. Meanwhile the loans of a pool show what has moved.
    """
    changes = [(event, str(event["name"]).rpartition(" ")[2]) for event in events if event["ph"] == "C"]
    uuids = sorted({uuid for _, uuid in changes})
    if (device not in uuids) if device is not None else len(uuids) > 1:
        raise Error(f"the device is {device}, expected one of the trace: {', '.join(uuids) or 'it has none'}")
    names = {each["pid"]: str(each["args"]["name"]) for each in events if each["name"] == "process_name"}
    regions: dict[int, dict[str, float]] = {}  # by pid and label
    loans: dict[int, float] = {}  # by pid. The loan of a process that has ended is 0
    pool: dict[str, float] = {}
    found: Samples = []
    for event in [event for event, uuid in changes if device in (None, uuid)]:
        if event["cat"] == "memory":
            regions[event["pid"]] = event["args"]
            names.setdefault(event["pid"], UNKNOWN)  # the line with its name was cut
        elif event["cat"] == "pool":
            pool = event["args"]
        else:
            loans = dict.fromkeys(loans, 0.0)
            for text, nbytes in event["args"].items():
                name, _, pid = text[:-1].rpartition(" (")
                names.setdefault(int(pid), name)  # of a process without a trace
                loans[int(pid)] = nbytes
        held, several = dict(pool), Counter(names.values())
        for pid in {**regions, **loans}:
            process = names[pid] if several[names[pid]] == 1 else f"{names[pid]} {pid}"
            noted = sum(regions.get(pid, {}).values())
            lent = loans.get(pid, noted)
            for label, nbytes in regions.get(pid, {}).items():
                held[f"{process}: {label}"] = nbytes * min(1.0, lent / noted) if noted else 0.0
            if lent > noted:
                held[f"{process}: {MOVING}"] = lent - noted
        if found and found[-1][0] == event["ts"] / 1e6:  # counters of one moment
            found.pop()
        found.append((event["ts"] / 1e6, held))
    return found


def draw(found: Samples, file: Path) -> None:
    """Writes an SVG. The time begins with the first sample, and the last one is the end. Raises Error and OSError."""
    if not found:
        raise Error("there is nothing to draw: the trace has no memory")
    first, seconds = found[0][0], max(found[-1][0] - found[0][0], 1e-6)
    top = max(sum(held.values()) for _, held in found) or 1.0
    unit, unit_name = (GIB, "GiB") if top >= GIB else (1 << 20, "MiB")
    right, bottom = _LEFT + _WIDTH, _TOP + _HEIGHT
    thinned = list({int(2 * _WIDTH * (at - first) / seconds): (at, held) for at, held in found}.values())
    xs = [_LEFT + _WIDTH * (at - first) / seconds for at, _ in thinned]
    lower = [0.0] * len(thinned)
    parts = []
    colors = _colors(found)
    for at, (owner, color) in enumerate(colors.items()):
        upper = [low + held.get(owner, 0.0) for low, (_, held) in zip(lower, thinned)]
        edge = [*_steps(xs, upper, top), *reversed(_steps(xs, lower, top))]
        lower = upper
        most = f"{owner}: at most {max(held.get(owner, 0.0) for _, held in found) / unit:.2f} {unit_name}"
        y = _TOP + _LINE * (len(colors) - 1 - at)
        parts += [
            f'<polygon points="{" ".join(edge)}" fill="{color}"><title>{escape(most)}</title></polygon>',
            f'<rect x="{right + 16}" y="{y}" width="12" height="12" fill="{color}"/>',
            f'<text x="{right + 34}" y="{y + 10}">{escape(owner)}</text>',
        ]
    for value in _ticks(seconds):
        x = _LEFT + _WIDTH * value / seconds
        parts.append(f'<path d="M{x:.1f},{bottom}v5"/><text x="{x:.1f}" y="{bottom + 17}" class="x">{value:g}</text>')
    for value in _ticks(top / unit):
        y = round(bottom - _HEIGHT * value * unit / top)
        parts.append(f'<path d="M{_LEFT},{y}h-5"/><text x="{_LEFT - 8}" y="{y + 4}" class="y">{value:g}</text>')
    width, height = right + _LEGEND, max(bottom + _BELOW, _TOP + _LINE * len(colors))
    style = "text{font:11px sans-serif}.x{text-anchor:middle}.y{text-anchor:end}path{stroke:#000;fill:none}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{style}</style><rect width="{width}" height="{height}" fill="#fff"/>',
        *parts,
        f'<path d="M{_LEFT},{_TOP}h{_WIDTH}v{_HEIGHT}h-{_WIDTH}z"/>',
        f'<text x="{_LEFT + _WIDTH // 2}" y="{bottom + 34}" class="x">s</text>',
        f'<text x="8" y="{_TOP + _HEIGHT // 2}">{unit_name}</text>',
        "</svg>\n",
    ]
    file.write_text("\n".join(parts), encoding="utf-8")


def _colors(found: Samples) -> dict[str, str]:
    """Owners from below: a hue for each process, and its darkest shade for the owner with most memory."""
    total: defaultdict[str, float] = defaultdict(float)  # byte seconds
    for (at, held), (until, _) in zip(found, [*found[1:], (found[-1][0] + 1e-6, {})]):
        for owner, nbytes in held.items():
            total[owner] += nbytes * (until - at)
    groups: dict[str, list[str]] = {}
    for owner in sorted({*total} - {OUTSIDE, IDLE}, key=lambda each: -total[each]):
        groups.setdefault(owner.partition(": ")[0], []).append(owner)
    colors = {OUTSIDE: "#888"} if total[OUTSIDE] else {}
    for hue, (_, group) in zip(_HUES * len(groups), sorted(groups.items())):
        colors |= {owner: f"hsl({hue},65%,{35 + 50 * at // len(group)}%)" for at, owner in enumerate(group)}
    return colors | ({IDLE: "#f2f2f2"} if total[IDLE] else {})


def _steps(xs: Sequence[float], values: Sequence[float], top: float) -> list[str]:
    """Points of a line that changes at each x."""
    ys = [_TOP + _HEIGHT * (1 - value / top) for value in values]
    points = [(xs[0], ys[0])]
    for x, before, y in zip(xs[1:], ys, ys[1:]):
        points += [(x, before), (x, y)] if y != before else []
    return [f"{x:.1f},{y:.1f}" for x, y in [*points, (xs[-1], ys[-1])]]


def _ticks(most: float) -> list[float]:
    """At most eight round values from 0 on."""
    power = 10 ** math.floor(math.log10(most))
    step = next(power * each for each in (0.2, 0.5, 1, 2) if most / (power * each) <= 7)
    return [round(step * number, 9) for number in range(int(most / step) + 1)]
