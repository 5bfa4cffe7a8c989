"""Reads traces, and merges those of several processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from memsaver.errors import Error

Event = dict[str, Any]
_BEGIN = '{"ph":'  # the first characters of each line. A name does not have them: its quotes are escaped


class Events(NamedTuple):
    """The events of traces: first those that name processes and tracks, the others in the order of their times.

    ``torn``: the number of lines that the end of a process has cut.
    """

    events: list[Event]
    torn: int


def read(paths: Iterable[str]) -> Events:
    """Reads traces of one host. Raises OSError, and Error for a file that is no trace, or of another boot or host."""
    names: dict[str, Event] = {}
    events: dict[str, Event] = {}  # by line: a file may be read twice, also as a part of a merged one
    boots: dict[str, str] = {}
    torn = 0
    for path in paths:
        is_trace = False
        for line in Path(path).read_text(errors="replace").splitlines():
            if not (text := line.strip().removesuffix(",")) or text in ("[", "]"):
                continue
            event = _parsed(text)
            if event is None:
                torn += 1
                text = text[max(0, text.rfind(_BEGIN)) :]  # the line that another process has appended to it
                event = _parsed(text)
            if event is None:
                continue
            if event["ph"] != "M":
                events[text] = event
                continue
            names[text] = event
            if boot := event["args"].get("boot"):
                boots.setdefault(boot, path)
                is_trace = True
        if not is_trace:
            raise Error(f"{path} is no trace: expected a file of configure(trace=...) or MEMSAVER_TRACE")
    if len(boots) > 1:
        raise Error(
            f"{' and '.join(boots.values())} are of several hosts, or of several boots of one: their times do not "
            "have one clock"
        )
    # At one time in the order of the file: a stage follows its transition.
    return Events([*names.values(), *sorted(events.values(), key=lambda event: event["ts"])], torn)


def _parsed(text: str) -> Event | None:
    """The event of a line. None: it was cut, or is of another program."""
    try:
        event: Event = json.loads(text)
        if event["ph"] == "M":
            event["args"].get("boot")
        else:
            float(event["ts"])
        return event
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def merge(paths: Sequence[str], output: str) -> Events:
    """Writes one trace with the events of several. Raises as ``read()`` does."""
    found = read(paths)
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in found.events)
    Path(output).write_text(f"[\n{lines}\n]\n")
    return found
