"""The ranks of a group, which are Ray actors or objects of this process, and one caller that calls all of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cached_property, partial
from typing import Any

from ray.actor import ActorClass, ActorHandle
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from memsaver._results import Lane
from memsaver.errors import Error
from memsaver.turns.plan import TurnOptions
from memsaver.turns.ranks import (
    Answers,
    Call,
    Calls,
    Errors,
    Rank,
    Tags,
    TurnReport,
    called,
    check_member,
    no_answer,
    unanswered,
)

log = logging.getLogger("memsaver")

_LOST_S = 5.0  # once a rank has died, the others have this long to answer: they may wait for it in their calls
_LATE_S = 1.0  # at the begin of a turn, for answers to calls of an earlier one
_RESTART_S = 60.0  # the calls of a rank may be refused for this long while it restarts
_POLL_S = 0.05
# Ray raises OutOfMemoryError, and no RayActorError, for calls of an actor that its memory monitor has killed for good.
_DEATHS = (RayActorError, OutOfMemoryError)

Reporting = Callable[[str, Sequence[Any]], TurnReport]
"""Writes the report of a turn that has exceeded its deadline: its title, and the ranks that have not answered."""


class MemberRank(Rank):
    """An actor, or an object of this process.

    The calls of an actor run one after the other, unless the actor itself is threaded or async. Those of an object run
    one after the other in a daemon thread of its own: they may hang.
    """

    def __init__(self, role: str, index: int, member: Any) -> None:
        """Raises TypeError for a class, and for an object without the methods of Colocated."""
        if isinstance(member, ActorClass):
            raise TypeError(f"{member!r} of the role {role!r} is a class, expected an instance of it")
        super().__init__(role, index)
        check_member(role, member)
        self.member = member
        self.is_actor = isinstance(member, ActorHandle)
        self.is_new = True

    def submit(self, call: Call) -> Future[Any]:
        """Starts a call. Raises if it cannot be started."""
        if self.is_actor:
            # With retries, Ray repeats a call on a restarted actor, and raises no error.
            once = getattr(self.member, call.method).options(max_task_retries=0, retry_exceptions=False)
            future: Future[Any] = once.remote(*call.args, **call.options).future()
            return future
        return self._lane.submit(partial(called, self.member, call))

    def failure(self, error: Exception) -> Exception:
        """The error of the method that a call has raised."""
        cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
        # This cause is the death of another actor, which the method has called. is_lost() would take it for its own.
        return cause if isinstance(cause, Exception) and not isinstance(cause, _DEATHS) else error

    def is_lost(self, error: Exception) -> bool:
        return self.is_actor and isinstance(error, _DEATHS) and not isinstance(error, RayTaskError)

    def described(self, error: Exception) -> str:
        """Of Ray's own errors, which have many lines, the first line."""
        inner = error
        while isinstance(inner, RayTaskError) and isinstance(inner.cause, Exception):
            inner = inner.cause
        text = super().described(inner)
        if isinstance(inner, RayError):
            text = text.partition("\n")[0]
        if self.is_lost(error):
            return f"{text}; unless Ray restarts it: group.replace({self.role!r}, {self.index}, actor)"
        return f"a call of its own raised {text}" if isinstance(inner, _DEATHS) else text

    @cached_property
    def _lane(self) -> Lane:
        return Lane(f"memsaver {self}")


class Caller:
    """A ``Crew`` whose ranks have this caller alone. A turn begins when new and restarted actors have started."""

    def __init__(self, ranks: Sequence[MemberRank], report: Reporting | None = None) -> None:
        self.ranks = list(ranks)
        self.report = TurnReport()
        self.late: dict[Future[Any], MemberRank] = {}  # calls whose answers were not collected
        self._write_report, self._phase = report, ""
        self._committing: set[Rank] = set()  # in this turn
        self._lost: set[Rank] = set()  # since the last turn

    def begin(self, turn: int, phase: str, options: TurnOptions, unwritten: Tags) -> Tags:
        self.report, self._phase = TurnReport(), phase
        self._committing.clear()
        wait(self.late, _LATE_S)
        for future, rank in list(self.late.items()):
            if future.done():
                del self.late[future]
                error = future.exception()
                if isinstance(error, Exception) and rank.is_lost(rank.failure(error)):
                    self._lost.add(rank)
                elif error is not None:
                    log.error("a call of an earlier turn has failed in %s: %s", rank, error)
        if self.late:
            hanging = list(dict.fromkeys(self.late.values()))
            text = f"{', '.join(map(str, hanging))} has not answered a call of an earlier turn"
            text, first = f"phase {phase!r} could not be entered: {text}", hanging[0]
            raise Error(text, phase=phase, role=first.role, rank=first.index) from no_answer(_LATE_S)
        starting = [rank for rank in self.ranks if rank.is_actor and (rank.is_new or rank in self._lost)]
        self._start_actors(starting, options)
        self._lost.clear()  # after the start: a rank that restarts refuses its first calls, which adds it again
        return unwritten  # of lost ranks too: a rank whose answer was lost still runs

    def _start_actors(self, starting: list[MemberRank], options: TurnOptions) -> None:
        """Waits, within a bound, until actors have started. Calls of the turn report those that have not."""
        deadline = time.monotonic() + _RESTART_S
        deadline = deadline if options.until is None else min(deadline, options.until)
        while starting and time.monotonic() < deadline:
            calls: Calls = {rank: Call("__ray_ready__") for rank in starting}
            errors = self._collect(*self._start(calls), options.until).errors
            # While an actor restarts, Ray may refuse its calls. During its __init__ they wait.
            starting = [rank for rank in starting if isinstance(errors.get(rank), ActorUnavailableError)]
            time.sleep(_POLL_S if starting else 0.0)
        for rank in self.ranks:
            rank.is_new = False

    def call(self, *steps: Calls, until: float | None) -> list[Answers]:
        began = time.perf_counter()
        answers = []
        for futures, refused in [self._start(calls) for calls in steps]:
            answers.append(self._collect(futures, refused, until))
            answers[-1].seconds = time.perf_counter() - began
        errors = [(rank, error, calls) for each, calls in zip(answers, steps) for rank, error in each.errors.items()]
        silent = [(rank, calls[rank].method) for rank, error, calls in errors if rank in unanswered({rank: error})]
        if silent and self._write_report is not None and not any(rank.is_lost(error) for rank, error, _ in errors):
            rank, method = silent[0]  # if a rank has died, the others wait for it
            title = f"phase {self._phase!r} could not be entered: {rank} has not answered {method}()"
            self.report = self._write_report(title, [rank for rank, _ in silent])
        return answers

    def undo(self, calls: Calls, until: float | None) -> None:
        hanging = set(self.late.values())
        futures, refused = self._start(calls)
        for lost in [each for each in futures if each in self._lost]:
            # A lost rank may still run: perhaps only its answer was lost. So the call is made, without a wait for its
            # answer: a dead rank answers after its restart alone.
            del self.late[futures.pop(lost)]
        # A rank that hangs answers its calls in their order: there is no wait for its answer either.
        futures = {rank: future for rank, future in futures.items() if rank not in hanging}
        for rank, error in self._collect(futures, refused, until).errors.items():
            log.warning("%s could not end %s() after a failed turn: %s", rank, calls[rank].method, error)

    def leave(self, error: BaseException, prepared: list[Rank], commits: bool) -> None:
        method = "colocated_commit" if commits else "colocated_abort"
        self._start({rank: Call(method) for rank in prepared if rank not in self._committing})

    def replace(self, new: MemberRank) -> None:
        """Puts a rank in the place of the one with its role and index. Raises ValueError if there is none."""
        for at, old in enumerate(self.ranks):
            if (old.role, old.index) == (new.role, new.index):
                self.ranks[at] = new
                self.late = {future: rank for future, rank in self.late.items() if rank is not old}
                return
        there = ", ".join(repr(str(each)) for each in self.ranks)
        raise ValueError(f"there is no {new.role!r} {new.index!r}; there are {there}")

    def _start(self, calls: Calls) -> tuple[dict[MemberRank, Future[Any]], Errors]:
        """Starts calls. Returns them, and the errors of those that could not be started."""
        futures: dict[MemberRank, Future[Any]] = {}
        errors: Errors = {}
        rank: Any
        for rank, call in calls.items():
            try:
                futures[rank] = rank.submit(call)
                self.late[futures[rank]] = rank  # until it is collected: an interrupt may come before
                if call.method == "colocated_commit":
                    self._committing.add(rank)
            except Exception as error:  # of any class: it is that of the rank
                errors[rank] = error
        return futures, errors

    def _collect(self, futures: dict[MemberRank, Future[Any]], refused: Errors, until: float | None) -> Answers:
        """Waits for all calls, including those after one that failed. Errors are in the order of the calls."""
        began = time.monotonic()
        results: dict[Rank, Any] = {}
        errors: Errors = {}
        waiting = {future: rank for rank, future in futures.items()}
        while waiting:
            late = until is not None and time.monotonic() >= until
            left = None if until is None else max(0.0, until - time.monotonic())
            for future in wait(waiting, left, FIRST_COMPLETED).done:
                rank = waiting.pop(future)
                del self.late[future]
                try:
                    results[rank] = future.result()
                except Exception as raised:
                    errors[rank] = error = rank.failure(raised)
                    if rank.is_lost(error):
                        bound = time.monotonic() + _LOST_S
                        until = bound if until is None else min(until, bound)
            if late:
                break
        errors |= {rank: no_answer(time.monotonic() - began) for rank in waiting.values()}
        errors = {**refused, **{rank: errors[rank] for rank in futures if rank in errors}}
        self._lost.update(rank for rank, error in errors.items() if rank.is_lost(error))
        return Answers({rank: results[rank] for rank in futures if rank in results}, errors)
