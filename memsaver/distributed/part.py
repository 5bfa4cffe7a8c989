"""The part of one process in the turns of its group: its members execute the calls of the leader."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from memsaver.distributed.link import Inbox, Link, Outbox
from memsaver.distributed.liveness import Watch, hello
from memsaver.distributed.messages import loads
from memsaver.distributed.reports import Activity, Silence, name_of_method
from memsaver.errors import Error, WaitTimeoutError
from memsaver.guests.store import Pace
from memsaver.turns.ranks import settled

log = logging.getLogger("memsaver")

_T = TypeVar("_T")
_Member = tuple[str, int]  # its role, and its index among the members of the role in this process


class Part:
    """Serves the calls of the leader, in the thread that called enter().

    This thread has the current device and the other state that the members' methods expect.
    """

    def __init__(
        self,
        link: Link,
        process: int,
        members: Mapping[str, Sequence[Any]],
        watch: Watch,
        activity: Activity,
        silence: Silence,
    ) -> None:
        self._link, self._process, self._members = link, process, members
        self._outbox = Outbox(link, f"from/{process}")
        self._inbox = Inbox(f"to/{process}", self._outbox)
        self._watch, self._activity, self._silence = watch, activity, silence
        self._leader: dict[str, Any] | None = None  # its identity
        self._messages: deque[dict[str, Any]] = deque()
        self._prepared: dict[_Member, None] = {}
        self.broken: str | None = None
        """Why no further turn can be entered: the leader or the store is lost."""

    def take(self, number: int, entry: Mapping[str, Any], until: float | None) -> dict[str, Any]:
        """Takes part in a turn. Returns the fields of its Turn, or raises its error.

        ``until``: the bound of the wait for the leader, by ``time.monotonic()``.
        """
        phase = entry["enter"]
        self._link.until = until
        self._watch.forget_silence()
        self._silence.begin()
        self._activity.begin(f"waits for the other ranks in enter({phase!r})")
        try:
            self._send({"turn": number, **entry})
            return self._serve(number, phase, until)
        except _LostLeaderError as lost:
            self.broken = str(lost)
            text, report = f"phase {phase!r} could not be entered: {lost}{self._settle(number)}", self._silence.report
            text += f"; report: {report}" if report is not None else ""
            self._leave(number, lost.__cause__ or lost)  # the leader may live, and be slow
            raise Error(text, phase=phase, role=None, rank=0, report=report) from lost.__cause__
        except _FailedTurnError as failed:
            self._abort_prepared()
            raise failed.error from failed.cause
        except BaseException as error:  # such as Ctrl-C in a member's method, or in a wait
            try:
                self._abort_prepared()
            finally:  # after a second interrupt, too: the leader waits for it
                self._leave(number, error)
            raise
        finally:
            self._activity.begin("is outside of enter()")

    def _leave(self, number: int, error: BaseException) -> None:
        why = f"{type(error).__name__}: {error}".removesuffix(": ")
        with contextlib.suppress(_LostLeaderError):
            self._send({"turn": number, "left": True, "error": Error(why)})

    def _serve(self, number: int, phase: str, until: float | None) -> dict[str, Any]:
        begin = time.monotonic()
        begun = False
        while True:
            pace = Pace()
            while (command := self._next(number, phase)) is None:
                late = until is not None and time.monotonic() >= until
                if late and not begun and not self._leader_has_begun(number):
                    waited = time.monotonic() - begin
                    text = f"rank 0 has not called enter() (stage 'answer', after {waited:.2f} s)"
                    cause = WaitTimeoutError(text, stage="answer", waited_s=waited)
                    message = f"phase {phase!r} could not be entered: {text}"
                    raise Error(message, phase=phase, role=None, rank=0) from cause
                if late:
                    self._reached(self._silence.look, number, phase)
                pace.sleep()
            begun = True
            if command.get("end") == "failed":
                raise _FailedTurnError(command["error"], command["cause"])
            if command.get("end") == "done":
                result = loads(self._reached(self._link.get, "result") or b"")
                return dict(result["fields"])
            self._answer(command)

    def _next(self, number: int, phase: str) -> dict[str, Any] | None:
        """The next message of the leader in this turn. None: there is none yet."""
        self._messages += self._inbox.take(self._reached(self._link.get, self._inbox.key))
        while self._messages:
            message = self._messages.popleft()
            if message["turn"] == number:
                return message
        identity = self._leader_identity()
        try:
            self._watch.check(0, identity)
        except Error as error:
            if identity is None:  # it may still start, and this rank can enter the next turn with it
                raise Error(f"phase {phase!r} could not be entered: {error}", phase=phase, role=None, rank=0) from error
            raise _LostLeaderError(str(error)) from error
        return None

    def _answer(self, command: Mapping[str, Any]) -> None:
        role, place = command["member"]
        method = command["method"]
        self._activity.begin(name_of_method(role, place, method))
        try:
            result = settled(getattr(self._members[role][place], method)(*command["args"], **command["options"]))
            done = True
        except Exception as error:  # of any class: the leader reports it to all ranks
            result, done = error, False
        if done and method == "colocated_prepare" and command["args"][0] and getattr(result, "halves", False):
            self._prepared[role, place] = None
        elif method in ("colocated_commit", "colocated_abort"):
            self._prepared.pop((role, place), None)
        self._activity.begin("waits for the other ranks")
        self._send({"call": command["call"], "done": done, "result": result})

    def _settle(self, number: int) -> str:
        """Commits or aborts the prepared calls, as the leader decided. Returns the outcome, in words."""
        try:
            decided = self._link.exchange("decision", f"{number} open", f"{number} abort")
        except Error:  # without the store no process commits: the decision was not read
            decided = ""
        if not self._prepared:
            return ""
        if decided != f"{number} commit":
            self._abort_prepared()
            return "; this rank has taken its preparation back"
        self._end_prepared("colocated_commit")
        return "; all ranks had prepared, so this rank has paused"

    def _abort_prepared(self) -> None:
        self._end_prepared("colocated_abort")

    def _end_prepared(self, method: str) -> None:
        while self._prepared:
            (role, place), _ = self._prepared.popitem()
            try:
                settled(getattr(self._members[role][place], method)())
            except Exception as error:  # the error of the turn is the one to raise
                log.warning("%s() of the role %r failed after a failed turn: %s", method, role, error)
            except BaseException:  # such as Ctrl-C: the other members of this process would stay prepared
                self._end_prepared(method)
                raise

    def _leader_has_begun(self, number: int) -> bool:
        found = self._reached(self._link.get, "decision")
        return found is not None and found.decode().startswith(f"{number} ")

    def _leader_identity(self) -> dict[str, Any] | None:
        if self._leader is None:
            self._leader = self._reached(hello, self._link, 0)
        return self._leader

    def _send(self, message: Mapping[str, Any]) -> None:
        self._reached(self._outbox.send, dict(message), self._inbox.read)

    def _reached(self, function: Callable[..., _T], *args: Any) -> _T:
        """Calls a function that needs the store."""
        try:
            return function(*args)
        except Error as error:
            raise _LostLeaderError(str(error)) from error


class _FailedTurnError(Exception):
    """The leader has reported that a turn failed."""

    def __init__(self, error: Exception, cause: Exception | None) -> None:
        super().__init__(str(error))
        self.error, self.cause = error, cause


class _LostLeaderError(Exception):
    """The leader or the store is lost. The cause says how."""
