"""Members of groups without regions, which record their calls, and can hang or fail."""

from __future__ import annotations

import threading
from typing import Any

from memsaver.transitions import Transition
from memsaver.turns.members import Ready

WAIT_S = 60


class Halved:
    """A member that pauses by prepare and commit.

    ``calls``: by call, the method, the tags and the options. ``errors``: by method, what its next call raises.
    ``held``: by method, what its calls wait for.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str], dict[str, Any]]] = []
        self.errors: dict[str, BaseException] = {}
        self.held: dict[str, threading.Event] = {}
        self.threads: set[str] = set()

    def pause(self, tags: list[str], **options: Any) -> Any:
        return self._called("pause", tags, options)

    def resume(self, tags: list[str], **options: Any) -> Any:
        self._called("resume", tags, options)
        return Transition(resumed=tuple(tags))

    def colocated_prepare(self, tags: list[str], coming: list[str], **options: Any) -> Ready:
        self._called("prepare", tags, options)
        return Ready(moves=True, pooled=False)

    def colocated_commit(self) -> Transition:
        self._called("commit", [], {})
        return Transition(paused=("paused",))

    def colocated_background(self, tags: list[str], coming: list[str], **options: Any) -> None:
        self._called("background", [*tags, *coming], options)

    def colocated_abort(self) -> None:
        self._called("abort", [], {})

    def _called(self, method: str, tags: list[str], options: dict[str, Any]) -> None:
        self.calls.append((method, tags, options))
        self.threads.add(threading.current_thread().name)
        if method in self.held:
            assert self.held[method].wait(WAIT_S)
        if method in self.errors:
            raise self.errors.pop(method)

    def seen(self) -> list[str]:
        """The methods that were called since the last look."""
        calls, self.calls = self.calls, []
        return [method for method, _, _ in calls]

    def hold(self, method: str) -> threading.Event:
        self.held[method] = threading.Event()
        return self.held[method]

    def let_go(self) -> None:
        for event in self.held.values():
            event.set()
        self.held.clear()
