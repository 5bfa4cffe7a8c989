"""Reads traces, and merges those of several processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memsaver.errors import Error

Event = dict[str, Any]


class Events(NamedTuple):
    """The events of traces: first those that name processes and tracks, the others in the order of their times.

    ``torn``: the number of lines that the end of a process has cut.
    """

    events: list[Event]
    torn: int


def read(paths: Iterable[str]) -> Events:
    """Reads traces of one host. Raises OSError, and Error for a file that is no trace, or of another boot or host."""
    names: dict[str, Event] = {}
    events: list[Event] = []
    boots: dict[str, str] = {}
    torn = 0
    for path in paths:
        is_trace = False
        for line in Path(path).read_text(errors="replace").splitlines():
            if not (text := line.strip().removesuffix(",")) or text in ("[", "]"):
                continue
            try:
                event = json.loads(text)
                is_name = event["ph"] == "M"
                boot = event["args"].get("boot") if is_name else None
                if not is_name:
                    float(event["ts"])
            except (ValueError, KeyError, TypeError, AttributeError):  # also a line of another program
                torn += 1
                continue
            if boot:
                boots.setdefault(boot, path)
                is_trace = True
            if is_name:
                names[text] = event
            else:
                events.append(event)
        if not is_trace:
            raise Error(f"{path} is no trace: expected a file of configure(trace=...) or MEMSAVER_TRACE")
    if len(boots) > 1:
        raise Error(
            f"{' and '.join(boots.values())} are of several hosts, or of several boots of one: their times do not "
            "have one clock"
        )
    events.sort(key=lambda event: event["ts"])  # at one time in the order of the file: a stage follows its transition
    return Events([*names.values(), *events], torn)


def merge(paths: Sequence[str], output: str) -> Events:
    """Writes one trace with the events of several. Raises as ``read()`` does."""
    found = read(paths)
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in found.events)
    Path(output).write_text(f"[\n{lines}\n]\n")
    return found
