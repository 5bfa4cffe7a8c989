"""The ranks as the leader sees them: calls that travel as messages through the store."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from memsaver.distributed.link import Inbox, Link, Outbox
from memsaver.distributed.liveness import LostRankError, Watch, hello
from memsaver.errors import Error
from memsaver.guests.store import Pace
from memsaver.turns.ranks import Call, NoAnswerError, Rank


class Processes:
    """All processes of the group, and the messages from and to them."""

    def __init__(self, link: Link, world_size: int, watch: Watch) -> None:
        self._link, self.count, self._watch = link, world_size, watch
        self._outboxes = [Outbox(link, f"to/{each}") for each in range(world_size)]
        self._inboxes = [Inbox(f"from/{each}", self._outboxes[each]) for each in range(world_size)]
        self._hellos: list[dict[str, Any] | None] = [None] * world_size
        self._calls = 0
        self._answers: dict[int, tuple[bool, Any]] = {}  # by call, whether it succeeded, and its result or error
        self._unanswered: dict[int, dict[int, str]] = {each: {} for each in range(world_size)}  # calls and methods
        self._hanging: dict[int, str] = {}  # by process, the method of an earlier turn that it had not answered
        self.turn = 0
        self._left: dict[int, Exception] = {}  # by process that left this turn before its end, its error
        self.arrivals: list[deque[dict[str, Any]]] = [deque() for _ in range(world_size)]

    def hello(self, process: int) -> dict[str, Any] | None:
        """The message of a process from the start of its group. None: it has not made the group yet."""
        if self._hellos[process] is None:
            self._hellos[process] = hello(self._link, process)
        return self._hellos[process]

    def send(self, process: int, message: Mapping[str, Any]) -> None:
        self._outboxes[process].send({"turn": self.turn, **message}, self._inboxes[process].read)

    def call(self, process: int, message: Mapping[str, Any]) -> int:
        if process in self._left:
            raise self._left[process]
        self._calls += 1
        self._unanswered[process][self._calls] = message["method"]
        try:
            self.send(process, {**message, "call": self._calls})
        except Error:
            del self._unanswered[process][self._calls]
            raise
        return self._calls

    def answer(self, call: int) -> tuple[bool, Any] | None:
        """The answer to a call of this turn. None: there is none yet."""
        return self._answers.get(call)

    def unanswered(self) -> list[int]:
        """The processes that have not answered a call of this turn. Another thread may ask."""
        return [process for process, calls in self._unanswered.items() if calls]

    def awaited(self, process: int) -> str:
        """The missing action of a process that has not called enter(), in words."""
        method = self._hanging.get(process)
        return "called enter()" if method is None else f"answered {method}() of an earlier turn"

    def has_left(self, process: int) -> bool:
        """Whether a process has left this turn before its end."""
        return process in self._left

    def look(self) -> None:
        """Reads the messages that have arrived, from all processes."""
        contents = self._link.get_all(inbox.key for inbox in self._inboxes)
        for process, content in enumerate(contents):
            for message in self._inboxes[process].take(content):
                self._take(process, message)

    def check_lives(self, process: int) -> None:
        """Raises LostRankError if a process has ended."""
        self._watch.check(process, self.hello(process))

    def begin(self, turn: int) -> None:
        """Begins a turn. Answers to earlier calls are not awaited any more."""
        self.turn = turn
        self._hanging.update((process, min(calls.items())[1]) for process, calls in self._unanswered.items() if calls)
        self._watch.forget_silence()
        self._answers.clear()
        self._left.clear()
        for calls in self._unanswered.values():
            calls.clear()

    def _take(self, process: int, message: dict[str, Any]) -> None:
        unanswered = self._unanswered[process]
        if "enter" in message:
            self._hanging.pop(process, None)
            self.arrivals[process].append(message)
        elif "left" in message:
            self.arrivals[process].append(message)
            if message["turn"] == self.turn:
                self._left[process] = message["error"]
                self._answers.update(dict.fromkeys(unanswered, (False, message["error"])))
                unanswered.clear()
        elif message["call"] in unanswered:
            del unanswered[message["call"]]
            self._answers[message["call"]] = (message["done"], message["result"])


class StoreRank(Rank):
    """A member in one of the processes. Its calls run one after the other, as do all calls of its process."""

    def __init__(
        self, role: str, index: int, processes: Processes, process: int, place: int, has: Collection[str]
    ) -> None:
        """``place``: the index of the member among those of its role in its process. ``has``: its methods."""
        super().__init__(role, index)
        self._processes, self.process, self._place, self._has = processes, process, place, has

    def has(self, method: str) -> bool:
        return method in self._has

    def submit(self, method: str, *args: object, **options: object) -> Call:
        member = (self.role, self._place)
        message = {"member": member, "method": method, "args": list(args), "options": options}
        return _StoreCall(self._processes, self.process, self._processes.call(self.process, message))

    @property
    def lane(self) -> object:
        return self.process

    def is_lost(self, error: Exception) -> bool:
        return isinstance(error, LostRankError)

    @property
    def has_left(self) -> bool:
        return self._processes.has_left(self.process)

    def __str__(self) -> str:
        return f"{self.role} {self.index} (rank {self.process})"


class _StoreCall:
    def __init__(self, processes: Processes, process: int, number: int) -> None:
        self._processes, self._process, self._number = processes, process, number
        self._turn = processes.turn
        self._lost: Error | None = None

    def result(self, timeout: float | None = None) -> Any:
        if not self.ended([self], timeout):
            raise NoAnswerError(f"no answer within {timeout} s")
        answer = self._processes.answer(self._number)
        if answer is None:
            assert self._lost is not None
            raise self._lost
        done, result = answer
        if not done:
            raise result
        return result

    @staticmethod
    def ended(calls: Sequence[_StoreCall], timeout: float | None) -> Collection[_StoreCall]:
        until = None if timeout is None else time.monotonic() + timeout
        pace = Pace()
        while not (found := [each for each in calls if each._has_ended()]):
            if until is not None and time.monotonic() >= until:
                break
            pace.sleep(until)
            calls[0]._processes.look()
        return found

    def _has_ended(self) -> bool:
        if self._lost is None and self._processes.answer(self._number) is None:
            try:
                if self._turn != self._processes.turn:  # its process has entered a later turn, so the call has ended
                    raise Error("the turn of this call has ended")
                self._processes.check_lives(self._process)
                return False
            except Error as error:
                self._lost = error
        return True


def ranks_of(processes: Processes, roles: Sequence[Mapping[str, Sequence[Collection[str]]]]) -> list[StoreRank]:
    """The ranks of all roles. ``roles``: by process and role, the methods of each member."""
    found: list[StoreRank] = []
    for role in dict.fromkeys(role for each in roles for role in each):
        members = [
            (process, place, has)
            for process, by_role in enumerate(roles)
            for place, has in enumerate(by_role.get(role, ()))
        ]
        found += [
            StoreRank(role, index, processes, process, place, has)
            for index, (process, place, has) in enumerate(members)
        ]
    return found
