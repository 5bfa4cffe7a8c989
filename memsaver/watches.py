"""Processes whose end is of interest, each by a pidfd: ready to be read once the kernel has torn the process down."""

from __future__ import annotations

import os
import select
import selectors
from collections.abc import Callable


class Watches:
    """The watched processes of a selector's owner, who is told of each ``exited`` and asked which ``is_needed``."""

    def __init__(
        self, selector: selectors.BaseSelector, exited: Callable[[int], None], is_needed: Callable[[int], bool]
    ) -> None:
        self._selector = selector
        self._exited = exited
        self._is_needed = is_needed
        self._files: dict[int, int] = {}  # pid -> pidfd

    def begin(self, pid: int) -> None:
        """Raises OSError where that process is gone, or cannot be watched."""
        known = self._files.get(pid)
        if known is not None:
            poll = select.poll()
            poll.register(known, select.POLLIN)
            if not poll.poll(0):
                return
            self._exited(pid)  # and its number is another's
        file = os.pidfd_open(pid)
        self._files[pid] = file

        def ready(_: int) -> None:
            if self._files.get(pid) == file:  # else it was closed earlier in this turn
                self._exited(pid)

        self._selector.register(file, selectors.EVENT_READ, ready)

    def end(self, pid: int) -> None:
        """Ends the watch, if nobody needs it any more."""
        if pid not in self._files or self._is_needed(pid):
            return
        file = self._files.pop(pid)
        self._selector.unregister(file)
        os.close(file)
