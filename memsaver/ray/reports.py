"""The parts of a report, which travel through Ray's key-value store."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any

from ray.experimental import internal_kv

from memsaver.ray.ranks import MemberRank
from memsaver.turns import reports
from memsaver.turns.ranks import METHODS, Call, Rank, TurnReport

log = logging.getLogger("memsaver")

_LOOK_S = 0.5
_SPACE = "memsaver"


class _Mail:
    """The keys of one group."""

    def __init__(self, group: str) -> None:
        self._group = group

    def set(self, key: str, value: str) -> None:
        internal_kv._internal_kv_put(f"{self._group}/{key}", value, overwrite=True, namespace=_SPACE)

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        return [internal_kv._internal_kv_get(f"{self._group}/{key}", namespace=_SPACE) for key in keys]

    def delete(self) -> None:
        internal_kv._internal_kv_del(f"{self._group}/", del_by_prefix=True, namespace=_SPACE)


class Collector:
    """Asks the actors of a group for their parts, and writes the file. In the process of the group."""

    def __init__(self) -> None:
        self._group = uuid.uuid4().hex
        self._names: dict[Rank, str] = {}  # in the keys; an actor that was replaced may still write under its own

    def watch(self, ranks: Sequence[MemberRank], seconds: float) -> None:
        """The actors look for requests for so long. A restarted actor has forgotten it, so each turn calls this."""
        self._names = {rank: self._names.get(rank) or uuid.uuid4().hex for rank in ranks if rank.is_actor}
        for rank in ranks:
            if rank in self._names:
                try:
                    rank.submit(Call("__ray_call__", (look_for_requests, self._group, self._names[rank], seconds)))
                except Exception as error:  # of Ray: the turn reports a dead actor
                    log.debug("%s does not look for requests of reports: %s", rank, error)

    def collect(self, title: str, silent: Sequence[MemberRank]) -> TurnReport:
        mail = _Mail(self._group)
        own = ["", "== the process of the group ==", reports.part()]
        path, doing = reports.collect(mail, title, "the process of the group", self._names, own)
        if self._names:
            mail.delete()
        found: dict[Rank, str] = {rank: doing[rank] for rank in silent if rank in doing}
        for rank in silent:
            if rank not in self._names:
                found[rank] = f"{reports.described(reports.call_of(rank.member, METHODS))}, in this process"
        return TurnReport(path, found)


_looking: dict[tuple[str, str], float] = {}  # in an actor: by group and name there, the end by time.monotonic()
_lock = threading.Lock()


def look_for_requests(actor: Any, group: str, name: str, seconds: float) -> None:
    """Runs in an actor. A thread looks for requests of the group for so many seconds."""
    with _lock:
        is_new = (group, name) not in _looking
        _looking[group, name] = time.monotonic() + seconds
    if is_new:
        threading.Thread(target=_look, args=(actor, group, name), name="memsaver reports", daemon=True).start()


def _look(actor: Any, group: str, name: str) -> None:
    responder = reports.Responder(_Mail(group), name, lambda: reports.call_of(actor, METHODS))
    while True:
        with _lock:
            if _looking[group, name] < time.monotonic():
                del _looking[group, name]
                return
        try:
            responder.look()
        except Exception as error:  # of Ray, such as a cluster that ends
            log.debug("the requests of reports cannot be read: %s", error)
        time.sleep(_LOOK_S)
