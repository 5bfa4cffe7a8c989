"""The processes of a torch.distributed job as a crew: each calls its own members, and all agree on the answers."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from memsaver.distributed.liveness import Watch
from memsaver.distributed.messages import LostRankError, dumps, loads
from memsaver.errors import Error, WaitTimeoutError
from memsaver.guests.agreement import Agreement
from memsaver.guests.store import StoreError
from memsaver.turns import reports
from memsaver.turns.plan import Plan, TurnOptions
from memsaver.turns.ranks import Answers, Call, Calls, Rank, Tags, TurnReport, called, no_answer

log = logging.getLogger("memsaver")

_LOST_S = 5.0  # once a process has ended, the others have this long to answer: they may wait for it in their calls
_REPORT_S = 6.0  # for a process to write the report of a turn, before another one does
_LEFT = 1 << 30  # in the place of a question: the answer to all questions of a turn


class ProcessRank(Rank):
    """A member of a process. ``member``: itself, in its own process."""

    def __init__(self, role: str, index: int, process: int, member: Any = None) -> None:
        super().__init__(role, index)
        self.process, self.member = process, member

    def is_lost(self, error: Exception) -> bool:
        return isinstance(error, LostRankError)

    def __str__(self) -> str:
        return f"{self.role} {self.index} (rank {self.process})"


class Processes:
    """A ``Crew``. Each step of a turn is a question on which all processes agree: the answers of all ranks.

    A process that hangs, has ended or has left the turn has an error as its answer. The process that decides writes
    the report of a turn at its deadline.
    """

    def __init__(
        self, agreement: Agreement, process: int, count: int, plan: Plan, members: Mapping[str, Sequence[Any]],
        watch: Watch,
    ) -> None:  # fmt: skip
        self.ranks: list[ProcessRank] = []  # known from the first turn on
        self.report = TurnReport()
        self.doing = "is outside of enter()"
        """The present call of this process, in words."""
        self.interrupt: BaseException | None = None
        """An interrupt of the turn, such as Ctrl-C, after which the answers of all ranks were decided."""
        self._agreement, self._process, self._count, self._plan = agreement, process, count, plan
        self._members, self._watch = members, watch
        self._phase, self._turn, self._question = "", 0, 0
        self._doing: dict[str, str] = {}  # by process that was late in the last question, its call
        self._prepared: list[ProcessRank] = []  # of this process

    def begin(self, turn: int, phase: str, options: TurnOptions, unwritten: Tags) -> Tags:
        self._phase, self._turn, self._question, self._prepared = phase, turn, 0, []
        self.report, self.interrupt = TurnReport(), None
        self._agreement.link.until = options.until
        self._watch.forget_silence()
        given = {**asdict(options.bounds), **options.values}
        came = {
            "same": {"phase": phase, "options": given, "phases": self._plan.phases, **self._plan.values},
            "members": {role: len(found) for role, found in self._members.items()},
            "unwritten": [[rank.role, rank.index, sorted(tags)] for rank, tags in unwritten.items()],
        }
        try:
            arrived = self._agree(came, options.until, "called enter()")
            if self.interrupt is not None:
                raise self.interrupt
        except BaseException as error:
            self.leave(error, [], False)
            raise
        self._check(arrived)
        if not self.ranks:
            self.ranks = self._found([each["members"] for each in arrived])
        tags: dict[Rank, set[str]] = {rank: set() for rank in self.ranks}
        for rank in self.ranks:
            for each in arrived:
                tags[rank].update(*(found for *place, found in each["unwritten"] if place == [rank.role, rank.index]))
        return tags

    def call(self, *steps: Calls, until: float | None) -> list[Answers]:
        began = time.monotonic()
        own: list[tuple[float, list[tuple[bool, Any]]]] = []
        for calls in steps:
            answers = [self._call(rank, call) for rank, call in self._own(calls)]
            own.append((time.monotonic() - began, answers))
        if self.interrupt is not None:
            raise self.interrupt
        agreed = self._agree(own, until, "answered")
        return [self._answers(calls, number, agreed) for number, calls in enumerate(steps)]

    def undo(self, calls: Calls, until: float | None) -> None:
        self._end(self._own(calls))

    def leave(self, error: BaseException, prepared: list[Rank], commits: bool) -> None:
        try:
            if not isinstance(error, StoreError):
                self._agreement.answer((self._turn, _LEFT), dumps(self._left(error)))
        except StoreError as second:
            log.warning("the other ranks could not be told that this rank left the turn: %s", second)
        finally:  # after a second interrupt, too
            method = "colocated_commit" if commits else "colocated_abort"
            self._end([(rank, Call(method)) for rank in self._prepared])

    def _own(self, calls: Calls) -> list[tuple[ProcessRank, Call]]:
        return [
            (rank, call)
            for rank, call in calls.items()
            if isinstance(rank, ProcessRank) and rank.process == self._process
        ]

    def _call(self, rank: ProcessRank, call: Call) -> tuple[bool, Any]:
        """Whether a member's method has returned, and its result or error. It has the thread that called enter()."""
        self.doing = f"is in {call.method}() of its {rank.role!r}"
        if call.method == "colocated_prepare" and call.args[0]:
            self._prepared.append(rank)  # before: an interrupt may come when it has prepared
        try:
            answer = True, loads(dumps(called(rank.member, call)))
        except Exception as error:  # of any class: all processes report it
            answer = False, loads(dumps(error))
        if call.method in ("colocated_commit", "colocated_abort"):  # after an interrupt the call is made again
            self._prepared = [each for each in self._prepared if each is not rank]
        return answer

    def _end(self, calls: Iterable[tuple[ProcessRank, Call]]) -> None:
        """Makes calls after a turn that failed."""
        left = list(calls)
        try:
            while left:
                rank, call = left.pop(0)
                done, result = self._call(rank, call)
                if not done:
                    log.warning("%s could not end %s() after a failed turn: %s", rank, call.method, result)
        except BaseException:  # such as Ctrl-C: the other members of this process would stay prepared
            self._end(left)
            raise

    def _answers(self, calls: Calls, number: int, agreed: Sequence[Any]) -> Answers:
        """The answers to one step. ``agreed``: by process, its steps."""
        found = Answers(seconds=max((each[number][0] for each in agreed if isinstance(each, list)), default=0.0))
        steps = [iter(each[number][1]) if isinstance(each, list) else each for each in agreed]
        rank: Any
        for rank in calls:
            step = steps[rank.process]
            done, answer = (False, step) if isinstance(step, Exception) else next(step)
            (found.results if done else found.errors)[rank] = answer
        return found

    def _agree(self, answer: Any, until: float | None, missing: str) -> list[Any]:
        """The answers of all processes to the next question of the turn, the same in all. Some may be errors.

        ``missing``: what a process without an answer has not done.
        """
        self.doing = f"waits for the other ranks in enter({self._phase!r})"
        self._question += 1
        place = self._turn, self._question
        try:
            self._agreement.answer(place, dumps(answer))
            found = self._agreement.wait(place, until, self._reason(until, missing))
        except StoreError:
            raise
        except BaseException as error:  # such as Ctrl-C: this process has to know whether all ranks commit
            self.interrupt = error
            answers = [each if at >= place else None for at, each in self._agreement.answers()]
            answers[self._process], left = None, dumps(self._left(error))
            found = self._agreement.decide(place, answers, {"errors": [None if each else left for each in answers]})
        if found.place != place:
            return [Error(f"the other ranks have ended this turn without rank {self._process}")] * self._count
        reason: dict[str, Any] = found.reason or {}
        self._doing = reason.get("doing", {})
        self.report = TurnReport(
            reason.get("report"),
            {rank: self._doing[str(rank.process)] for rank in self.ranks if str(rank.process) in self._doing},
        )
        errors = reason.get("errors", found.answers)
        return [loads(error or each) for error, each in zip(errors, found.answers)]

    def _reason(self, until: float | None, action: str) -> Callable[[list[int]], Any]:
        """Returns a function for ``Agreement.wait()``. It finds lost processes, and reports late ones."""
        began = time.monotonic()
        lost: dict[int, Exception] = {}
        lost_until = math.inf

        def reason(missing: list[int]) -> Any:
            nonlocal lost_until
            for process in missing:
                try:
                    self._watch.check(process)
                except LostRankError as error:
                    lost.setdefault(process, error)
                    lost_until = min(lost_until, time.monotonic() + _LOST_S)
            gone, now = [process for process in missing if process in lost], time.monotonic()
            is_late = until is not None and now >= until
            if not is_late and gone != missing and not (gone and now >= lost_until):
                return None
            found: dict[str, Any] = {}
            if not gone:  # else the others wait for the lost ones
                before = sum(process not in missing for process in range(self._process))
                if before and until is not None and now < until + _REPORT_S * min(before, 2):
                    return None  # another process writes the report, unless it hangs
                title = f"phase {self._phase!r} could not be entered: rank {missing[0]} has not {action}"
                names = {self._watch.named(process): str(process) for process in range(self._count)}
                path, doing = reports.collect(self._agreement.link, title, f"rank {self._process}", names)
                calls = {names[label]: call for label, call in doing.items() if int(names[label]) in missing}
                found = {"report": path, "doing": calls}
            late = dumps(no_answer(now - began, action))
            errors = {process: dumps(lost[process]) if process in lost else late for process in missing}
            return {"errors": [errors.get(process) for process in range(self._count)], **found}

        return reason

    def _left(self, error: BaseException) -> Exception:
        text = f"{type(error).__name__}: {error}".removesuffix(": ")
        return RuntimeError(f"rank {self._process} left the turn: {text}")

    def _check(self, arrived: Sequence[Any]) -> None:
        """Raises memsaver.Error unless all processes have come to the same turn."""
        missing = [process for process, each in enumerate(arrived) if isinstance(each, Exception)]
        if missing:
            first: Exception = arrived[missing[0]]
            late = [each for each in missing if isinstance(arrived[each], WaitTimeoutError)]
            text = f"{', '.join(f'rank {each}' for each in late)} did not answer: {first}" if late else str(first)
            text += "".join(f"; rank {each} {self._doing[str(each)]}" for each in late if str(each) in self._doing)
            text += f"; report: {self.report.path}" if self.report.path is not None else ""
            raise self._refusal(text, missing[0]) from first
        for rank, each in enumerate(arrived):
            for name, mine in arrived[0]["same"].items():
                if each["same"][name] != mine:
                    text = f"rank 0 has the {name} {mine!r}, rank {rank} has {each['same'][name]!r}"
                    raise self._refusal(f"{text}; expected the same on all ranks", rank)

    def _refusal(self, text: str, rank: int) -> Error:
        text = f"phase {self._phase!r} could not be entered: {text}"
        return Error(text, phase=self._phase, role=None, rank=rank, report=self.report.path)

    def _found(self, members: Sequence[Mapping[str, int]]) -> list[ProcessRank]:
        """The ranks of all processes, in the order of roles. ``members``: by process and role, their number."""
        found: list[ProcessRank] = []
        for role in dict.fromkeys(role for each in members for role in each):
            places = [(process, at) for process, each in enumerate(members) for at in range(each.get(role, 0))]
            for index, (process, at) in enumerate(places):
                own = self._members[role][at] if process == self._process else None
                found.append(ProcessRank(role, index, process, own))
        there = list(dict.fromkeys(repr(rank.role) for rank in found))
        for role in self._plan.roles:
            if repr(role) not in there:
                text = f"no rank has a member of the role {role!r}, which a phase names; there are "
                raise Error(text + (", ".join(there) or "no members"))
        return found
