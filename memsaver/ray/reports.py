"""The report of a turn that exceeds its deadline: the parts of all actors come through Ray's key-value store.

A thread of each actor looks for requests, so its part arrives while the call of the turn hangs.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.experimental import internal_kv

from memsaver.turns import reports
from memsaver.turns.ranks import METHODS, LocalRank, Rank
from memsaver.turns.turn import TurnReport

log = logging.getLogger("memsaver")

_LOOK_S = 0.5
_PARTS_S = 4.0  # bound of the wait for the parts
_POLL_S = 0.05
_SPACE = "memsaver"


@dataclass
class _Look:
    """The watch of an actor for requests. ``until``: by ``time.monotonic()``."""

    until: float
    actor: Any


class Collector:
    """Asks the actors of a group for their parts, and writes the file. In the process of the group."""

    def __init__(self) -> None:
        self._group = uuid.uuid4().hex
        self._names: dict[Rank, str] = {}  # in the keys; an actor that was replaced may still write under its own
        self._requests = 0

    def watch(self, ranks: Sequence[Rank], seconds: float) -> None:
        """The actors look for requests for so long. A restarted actor has forgotten it, so each turn calls this."""
        self._names = {rank: self._names.get(rank) or uuid.uuid4().hex for rank in ranks}
        for rank in ranks:
            if rank.has("__ray_call__"):
                try:
                    rank.submit("__ray_call__", look_for_requests, self._group, self._names[rank], seconds)
                except Exception as error:  # of Ray: the turn reports a dead actor
                    log.debug("%s does not look for requests of reports: %s", rank, error)

    def collect(self, title: str, ranks: Sequence[Rank], silent: Sequence[Rank]) -> TurnReport:
        self._requests += 1
        request = f"{self._requests}"
        actors = [rank for rank in ranks if rank.has("__ray_call__")]
        try:
            parts = self._parts(request, actors) if actors else {}
        except Exception as error:  # of Ray, which has many: the report has the part of this process
            log.warning("no parts of the report came from the actors: %s", error)
            parts = {}
        path = reports.save(title, "the process of the group", _lines(actors, parts))
        doing = {rank: part["doing"] for rank, part in parts.items() if rank in silent}
        for rank in silent:
            if isinstance(rank, LocalRank) and rank not in actors:
                doing[rank] = f"{_doing(rank.member)}, in this process"
        return TurnReport(path, doing)

    def _parts(self, request: str, actors: Sequence[Rank]) -> dict[Rank, dict[str, str]]:
        parts: dict[Rank, dict[str, str]] = {}
        _put(f"{self._group}/request", request)
        until = time.monotonic() + _PARTS_S
        while len(parts) < len(actors) and time.monotonic() < until:
            for rank in actors:
                if rank not in parts:
                    found = _get(f"{self._group}/part/{self._names[rank]}")
                    part = {} if found is None else json.loads(found)
                    if part.get("request") == request:
                        parts[rank] = part
            time.sleep(_POLL_S)
        for key in ("request", *(f"part/{self._names[rank]}" for rank in actors)):
            internal_kv._internal_kv_del(f"{self._group}/{key}", namespace=_SPACE)
        return parts


def _lines(actors: Sequence[Rank], parts: dict[Rank, dict[str, str]]) -> list[str]:
    lines = ["", f"== the process of the group, {_here()} ==", reports.part()]
    for rank in actors:
        if rank in parts:
            lines += ["", f"== {rank}, {parts[rank]['where']} ==", f"it {parts[rank]['doing']}", parts[rank]["text"]]
        else:
            why = "it starts, has ended, or a native call holds the GIL"
            lines += ["", f"== {rank} ==", f"it has sent no part within {_PARTS_S:g} s: {why}"]
    return lines


_looking: dict[tuple[str, str], _Look] = {}  # in an actor: by group, and its own name there
_lock = threading.Lock()


def look_for_requests(actor: Any, group: str, name: str, seconds: float) -> None:
    """Runs in an actor. A thread looks for requests of the group for so many seconds."""
    with _lock:
        idle = not _looking
        _looking[group, name] = _Look(time.monotonic() + seconds, actor)
        if idle:
            threading.Thread(target=_look, name="memsaver reports", daemon=True).start()


def _look() -> None:
    seen: dict[str, bytes] = {}
    while True:
        with _lock:
            now = time.monotonic()
            for key in [key for key, look in _looking.items() if look.until < now]:
                del _looking[key]
            if not _looking:
                return
            looks = list(_looking.items())
        try:
            for (group, name), look in looks:
                request = _get(f"{group}/request")
                if request is not None and seen.get(f"{group}/{name}") != request:
                    seen[f"{group}/{name}"] = request
                    _put(f"{group}/part/{name}", json.dumps(_part(request.decode(), look.actor)))
        except Exception as error:  # of Ray, such as a cluster that ends
            log.debug("the requests of reports cannot be read: %s", error)
        time.sleep(_LOOK_S)


def _part(request: str, actor: Any) -> dict[str, str]:
    return {"request": request, "doing": _doing(actor), "where": _here(), "text": reports.part()}


def _doing(member: Any) -> str:
    """The call of a rank, and the stages of the transitions of its process, in words."""
    call, stage = reports.call_of(member, METHODS), reports.stage()
    if call is None:
        return f"answers: {stage or 'no transition is under way'}"
    return call if stage is None else f"{call}; {stage}"


def _here() -> str:
    return f"pid {os.getpid()} on {reports.host()}"


def _put(key: str, value: str) -> None:
    internal_kv._internal_kv_put(key, value, overwrite=True, namespace=_SPACE)


def _get(key: str) -> bytes | None:
    found: bytes | None = internal_kv._internal_kv_get(key, namespace=_SPACE)
    return found
