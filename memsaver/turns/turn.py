"""Turns of a group, one after the other, each in two halves: all ranks prepare, then all ranks commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from memsaver.errors import BackupError, Error
from memsaver.policies import as_option
from memsaver.transitions import Transition
from memsaver.turns.members import Ready
from memsaver.turns.plan import Plan, TurnOptions, listed
from memsaver.turns.ranks import Call, Calls, Errors, Rank, Results, barrier, collect, submit, unanswered

log = logging.getLogger("memsaver")

_NOTIFY_S = 10.0  # bound of the calls that take preparations back, and of those that report a failure
_RESTART_S = 60.0  # the calls of a rank may be refused for this long while it restarts
_POLL_S = 0.05

Reporting = Callable[[str, Sequence[Rank]], "TurnReport"]
"""Writes the report of a turn that has exceeded its deadline: its error, and the ranks that have not answered."""
TagsByRole = Mapping[str, list[str]]


@dataclass(frozen=True)
class Turn:
    """The result of a group's turn into a phase.

    As a context manager it guards contents that the phase overwrites: see ``Group.enter()``. A copy, such as an
    unpickled one, cannot be entered, and raises memsaver.Error.

    Attributes:
        phase: The phase that was entered.
        paused: By role, the transitions of the pauses, in the order of the ranks. A rank without memsaver's transitions
            has the value that its method returned in their place.
        resumed: The same for the resumes.
        pause_seconds: Seconds until the last rank had paused, from the start of the last actor concerned.
        resume_seconds: Seconds from the calls of ``resume()`` until the last rank had resumed.
        seconds: Seconds of the whole turn. Less than the sum of the two above if they overlapped.
        side_by_side: Whether ranks resumed while others paused. Their memory comes from shared pools.
        unrestored: By role, the tags that are resident with ``restore=False``, to be overwritten.

    Examples:
        >>> class Engine(memsaver.ray.Colocated):
        ...     def __init__(self):
        ...         self.weights = memsaver.region("weights", device="cpu")
        >>> phases = {"rollout": {"engine": ["weights"]}, "train": {"engine": []}}
        >>> turn = memsaver.ray.Group(engine=Engine(), phases=phases).enter("train")
        >>> turn.phase, turn.paused["engine"][0].paused
        ('train', ('weights',))
    """

    phase: str
    paused: dict[str, list[Any]]
    resumed: dict[str, list[Any]]
    pause_seconds: float
    resume_seconds: float
    seconds: float
    side_by_side: bool
    unrestored: dict[str, list[str]]

    def _guarded(self, on_error: Callable[[Turn], None]) -> Turn:
        """This turn, which calls ``on_error`` if the body of its with statement raises.

        The call is no field of the dataclass: copies by asdict() and replace() do not refer to the group.
        """
        self.__dict__["_on_error"] = on_error  # the dataclass is frozen
        return self

    def __enter__(self) -> Turn:
        if "_on_error" not in self.__dict__:
            raise Error(f"this turn into the phase {self.phase!r} is a copy, expected the result of Group.enter()")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.__dict__["_on_error"](self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_on_error"}

    @property
    def transitions(self) -> list[Transition]:
        """The transitions of all ranks, pauses first. Values of ranks without memsaver's transitions are left out."""
        ranks = (each for by_role in (self.paused, self.resumed) for ranks in by_role.values() for each in ranks)
        return [each for each in ranks if isinstance(each, Transition)]


@dataclass(frozen=True)
class TurnReport:
    """The report of a turn that has exceeded its deadline.

    ``path``: of the file; None if there is none. ``doing``: the present actions of ranks, as far as known, in words.
    """

    path: str | None = None
    doing: Mapping[Rank, str] = field(default_factory=dict)


class RunningTurn:
    """A turn under way: ``prepare()``, then ``commit()``."""

    def __init__(self, turns: Turns, phase: str, options: TurnOptions) -> None:
        self._pauses, self._resumes = turns.plan.moves(phase)
        self._report, self._ranks, self._on_error = turns.report, turns.ranks, turns.mark_unwritten
        self._unwritten, self._starting, self._late = turns.unwritten, turns.starting, turns.late
        self._phase, self._options = phase, options
        self._pausing = [rank for rank in self._ranks if self._pauses.get(rank.role)]
        self._resuming = [rank for rank in self._ranks if self._resumes.get(rank.role)]
        self._ready: dict[Rank, Ready] = {}  # the ranks that pause by prepare and commit
        self._paused: Results = {}  # the ranks that paused in one call
        self._unwritten_before: dict[Rank, set[str]] = {}
        self._begin = 0.0

    def prepare(self) -> None:
        """Prepares all ranks, then pauses those that pause in one call. If this raises, no other rank has paused."""
        options = self._options
        self._check_answered()
        self._await_starts()
        self._begin = time.perf_counter()
        self._check_written()
        concerned = [rank for rank in self._ranks if rank in self._pausing or rank in self._resuming]
        colocated = [rank for rank in concerned if rank.has("colocated_prepare")]
        prepared = [rank for rank in colocated if rank in self._pausing]

        def prepare(rank: Rank) -> Call:
            pauses, resumes = self._pauses.get(rank.role, []), self._resumes.get(rank.role, [])
            return rank.submit("colocated_prepare", pauses, resumes, **options.of_pauses(rank.role, pauses))

        def pause(rank: Rank) -> Call:
            method = "colocated_pause" if rank.has("colocated_pause") else "pause"
            tags = self._pauses[rank.role]
            return rank.submit(method, tags, **options.of_pauses(rank.role, tags))

        try:
            ready, errors = barrier(colocated, prepare, options.until)
            if errors:
                of_pauses = {rank: error for rank, error in errors.items() if rank in self._pausing}
                of_resumes = {rank: error for rank, error in errors.items() if rank not in self._pausing}
                failures = [
                    (of_pauses, "prepare to pause", self._pauses),
                    (of_resumes, "prepare to resume", self._resumes),
                ]
                self._fail(failures, aborting=prepared)
            discarded = {
                rank: [tag for tag in each.discarded if options.restores(rank.role, tag)]
                for rank, each in ready.items()
            }
            errors = {
                rank: _without_contents(tags, "a pause kept no backup") for rank, tags in discarded.items() if tags
            }
            if errors:
                self._fail([(errors, "prepare to resume", self._resumes)], aborting=prepared)
            in_one_call = [rank for rank in self._pausing if rank not in ready or not ready[rank].halves]
            calls, refused = self._submit(in_one_call, pause)
            self._paused, errors = self._collect(calls, options.until)
            errors = {**refused, **errors}
            if errors:
                self._fail([(errors, "pause", self._pauses)], aborting=prepared)
        except Error:
            raise
        except BaseException:  # such as Ctrl-C
            submit(prepared, _abort)
            raise
        self._ready = {rank: ready[rank] for rank in colocated if rank not in in_one_call}

    def abort(self) -> None:
        """Takes the preparation of all ranks back, in the place of ``commit()``."""
        submit(self._ready, _abort)

    def commit(self) -> Turn:
        """Pauses the prepared ranks and resumes the others. If this raises, the tags to pause are paused."""
        both = {*self._pausing, *self._resuming}
        side_by_side = all(rank in self._ready and self._ready[rank].pooled for rank in both)
        handover = side_by_side and any(self._ready[rank].moves for rank in self._pausing)

        def resume(rank: Rank) -> Call:
            tags = self._resumes[rank.role]
            return rank.submit("resume", tags, **self._options.of_resumes(rank.role, tags, handover))

        # From here on a failure rolls forward: the pauses are not taken back.
        until = self._options.completes_until
        paused = dict(self._paused)
        commits, pause_errors = self._submit([rank for rank in self._pausing if rank not in paused], _commit)
        resume_begin = time.perf_counter()
        resumes, resume_errors = self._submit_resumes(resume) if side_by_side else ({}, {})
        results, errors = self._collect(commits, until)
        pause_errors.update(errors)
        paused.update(results)
        pause_end = time.perf_counter()
        if not side_by_side and not pause_errors:
            resume_begin = pause_end
            resumes, resume_errors = self._submit_resumes(resume)
        resumed, errors = self._collect(resumes, until)
        resume_errors.update(errors)
        end = time.perf_counter()
        silent = unanswered(resume_errors)
        for rank, error in resume_errors.items():
            # memsaver's own error, unless the rank has left: the resume has changed nothing, or names its tags
            if isinstance(error, Error) and rank not in silent and not rank.has_left:
                self._unwritten[rank] = self._unwritten_before[rank]

        if pause_errors or resume_errors:
            self._undo(resumed, resume_errors)
            self._fail([(pause_errors, "pause", self._pauses), (resume_errors, "resume", self._resumes)])
        return Turn(
            phase=self._phase,
            paused=_by_role(self._pausing, paused),
            resumed=_by_role(self._resuming, resumed),
            pause_seconds=pause_end - self._begin,
            resume_seconds=end - resume_begin,
            seconds=end - self._begin,
            side_by_side=side_by_side,
            unrestored={rank.role: tags for rank in self._resuming if (tags := self._unrestored(rank))},
        )._guarded(self._on_error)

    def _submit_resumes(self, resume: Callable[[Rank], Call]) -> tuple[Calls, Errors]:
        """Starts the resumes. Contents with ``restore=False`` count as not written, until ``Turns.enter()`` returns."""
        for rank in self._resuming:
            self._unwritten_before[rank] = self._unwritten.get(rank, set())
            self._unwritten[rank] = self._unwritten_before[rank].union(self._unrestored(rank))
        return self._submit(self._resuming, resume)

    def _submit(self, ranks: Iterable[Rank], to: Callable[[Rank], Call]) -> tuple[Calls, Errors]:
        """Starts calls that move regions. They are late until they are collected: an interrupt may come before."""
        calls, errors = submit(ranks, to)
        self._late.update(calls)
        return calls, errors

    def _collect(self, calls: Calls, until: float | None) -> tuple[Results, Errors]:
        results, errors = collect(calls, until)
        silent = unanswered(errors)
        for rank, call in calls.items():
            if rank in silent:
                self._late.setdefault(rank, call)
            elif self._late.get(rank) is call:  # else that of a later call to the rank
                del self._late[rank]
        return results, errors

    def _unrestored(self, rank: Rank) -> list[str]:
        """The tags that are resident in the phase with ``restore=False``."""
        return [tag for tag in self._resumes[rank.role] if not self._options.restores(rank.role, tag)]

    def _check_answered(self) -> None:
        """Refuses the turn while a rank is still in a call of an earlier one."""
        _, errors = collect(self._late, time.monotonic())
        waiting = unanswered(errors)
        for rank in [rank for rank in self._late if rank not in waiting]:
            del self._late[rank]
            if rank in errors and rank.is_lost(errors[rank]):
                self._starting.add(rank)
                self._unwritten.pop(rank, None)
            elif rank in errors:
                log.error("a call of an earlier turn has failed in %s: %s", rank, errors[rank])
        if self._late:
            rank = next(iter(self._late))
            named = ", ".join(map(str, self._late))
            text = f"phase {self._phase!r} could not be entered: {named} has not answered a call of an earlier turn"
            raise Error(text, phase=self._phase, role=rank.role, rank=rank.index) from errors[rank]

    def _check_written(self) -> None:
        errors: Errors = {}
        for rank in self._resuming:
            unwritten = self._unwritten.get(rank, set()).difference(self._unrestored(rank))
            tags = [tag for tag in self._resumes[rank.role] if tag in unwritten]
            if tags:
                errors[rank] = _without_contents(tags, "the phase that was to write them failed")
        if errors:
            self._fail([(errors, "prepare to resume", self._resumes)])

    def _await_starts(self) -> None:
        """Waits until the actors have started, at most until the bound of the turn. The calls that follow report it."""
        concerned = {*self._pausing, *self._resuming}
        until = self._options.until
        deadline = time.monotonic() + _RESTART_S
        deadline = deadline if until is None else min(deadline, until)
        waiting = {rank for rank in self._starting & concerned if rank.reports_start}
        self._starting -= concerned
        while waiting and time.monotonic() < deadline:
            _, errors = barrier(waiting, lambda rank: rank.start(), until)
            waiting = {rank for rank, error in errors.items() if rank.is_starting(error)}
            time.sleep(_POLL_S if waiting else 0.0)

    def _undo(self, resumed: Results, errors: Errors) -> None:
        """Pauses the ranks that resumed, so that ranks that wait for each other's memory can all try again.

        ``errors``: of the ranks that could not resume. They may have memory again, as with a guest that could not come
        back. The bound of these pauses is that of the whole turn, since the rest of the turn's time may be 0. Tags that
        resumed without contents pause without a backup.
        """
        again = replace(self._options, since=time.monotonic(), backup={})

        def changed(rank: Rank) -> list[str]:
            if rank in errors:
                error = errors[rank]
                return list(error.resumed) if isinstance(error, Error) else []
            result = resumed[rank]
            return list(result.resumed) if isinstance(result, Transition) else self._resumes[rank.role]

        def pause(rank: Rank) -> Call:
            tags = changed(rank)
            unrestored = {tag: "none" for tag in tags if not again.restores(rank.role, tag)}
            self._unwritten[rank] = self._unwritten.get(rank, set()).union(unrestored)
            backup = as_option("backup", unrestored, tags) if rank.has("colocated_prepare") else {}
            return rank.submit("pause", tags, **again.of_pauses(rank.role, tags), **backup)

        calls, refused = submit([rank for rank in (*resumed, *errors) if changed(rank)], pause)
        behind = _behind(calls, self._late)
        _, failed = collect({rank: call for rank, call in calls.items() if rank not in behind}, again.until)
        for rank, error in {**refused, **failed}.items():
            log.error("%s stays resident: it could not pause again: %s", rank, error)
        for rank in behind:
            log.warning("%s pauses again when the call that hangs in its process has ended", rank)
        for rank in [*behind, *unanswered(failed)]:
            self._late.setdefault(rank, calls[rank])

    def _fail(self, failures: Sequence[tuple[Errors, str, TagsByRole]], aborting: Sequence[Rank] = ()) -> NoReturn:
        """Aborts the prepared ranks, reports the first failure to the others, and raises it."""
        errors = {rank: error for each, _, _ in failures for rank, error in each.items()}
        failed, cause, verb, tags = min(  # a rank that has died: the others may have failed since they wait for it
            ((rank, error, verb, tags[rank.role]) for each, verb, tags in failures for rank, error in each.items()),
            key=lambda failure: not failure[0].is_lost(failure[1]),
        )
        dead = {rank for rank, error in errors.items() if rank.is_lost(error)}
        self._starting |= dead
        for rank in dead:  # its contents are lost, and a restart writes new ones
            self._unwritten.pop(rank, None)
        silent = unanswered(errors)
        report = TurnReport()
        if silent and not dead and self._report is not None:  # else they wait for the dead ranks
            title = f"phase {self._phase!r} could not be entered: {failed} could not {verb}: {failed.described(cause)}"
            report = self._report(title, [rank for rank in errors if rank in silent])
        # A dead rank has nothing prepared, and its answer would wait for its restart. A rank without an answer still
        # prepares: its abort runs after that.
        submit((rank for rank in aborting if rank in silent), _abort)
        answering = [rank for rank in aborting if rank not in silent and rank not in dead]
        behind = _behind(answering, silent)
        submit(behind, _abort)  # they run after the calls that hang, too
        bound = time.monotonic() + _NOTIFY_S
        _, abort_errors = barrier((rank for rank in answering if rank not in behind), _abort, bound)
        hanging = [*behind, *unanswered(abort_errors)]
        for rank, error in abort_errors.items():
            if rank not in errors and rank not in hanging:
                log.warning("%s could not abort its prepared pause: %s", rank, error)
        # Other processes may be unable to load the class of an error that a rank raised.
        portable = cause if isinstance(cause, Error) else Error(failed.described(cause))
        told = [rank for rank in self._ranks if rank not in errors and rank.has("colocated_failed")]
        _notify(told, failed, portable, _behind(told, silent))
        stages = {rank: f"; it {doing}" for rank, doing in report.doing.items()}
        also = "".join(
            f"; {rank}: {rank.described(error)}{stages.get(rank, '')}"
            for rank, error in errors.items()
            if rank is not failed
        )
        also += "".join(f"; {rank} has not answered that it took its preparation back" for rank in hanging)
        steps = [step for rank in errors if (step := rank.replacement(errors[rank])) is not None]
        also += f"; unless Ray restarts it: {', '.join(steps)}" if steps else ""
        also += f"; report: {report.path}" if report.path is not None else ""
        why = f"{failed.described(cause)}{stages.get(failed, '')}{also}"
        text = f"{failed} could not {verb} {', '.join(map(repr, tags))}: {why}"
        raise Error(
            f"phase {self._phase!r} could not be entered: {text}",
            phase=self._phase,
            role=failed.role,
            rank=failed.index,
            report=report.path,
        ) from cause


class Turns:
    """Runs the turns of all ranks. One caller at a time."""

    def __init__(self, plan: Plan, ranks: Sequence[Rank], report: Reporting | None = None) -> None:
        self.plan, self.ranks, self.report = plan, list(ranks), report  # without ranks that were replaced
        self._writers: dict[tuple[Rank, str], Turn] = {}  # by tag, the last turn that was to overwrite its contents
        self.unwritten: dict[Rank, set[str]] = {}  # tags that resumed to be overwritten in a phase that failed
        self.late: Calls = {}  # of ranks that had not answered when their turn ended
        self.starting = set(self.ranks)  # ranks that may still start: new ones, and dead ones
        self.entered: str | None = None
        """The phase of all ranks. None before the first phase, and after a turn that failed."""

    def enter(self, name: str, options: TurnOptions, between: Callable[[], None] | None = None) -> Turn:
        """Runs a turn. ``between`` is called between its halves; if it raises, the prepared ranks abort."""
        running = RunningTurn(self, name, options)
        self.entered = None
        running.prepare()
        if between is not None:
            try:
                between()
            except BaseException:
                running.abort()
                raise
        turn = running.commit()
        writers = dict(self._writers)
        unwritten = {rank: set(tags) for rank, tags in self.unwritten.items()}
        for rank in self.ranks:
            overwritten = set(turn.unrestored.get(rank.role, ()))
            unwritten.get(rank, set()).difference_update(overwritten)
            for tag in self.plan.moves(name)[1].get(rank.role, ()):
                if tag in overwritten:
                    writers[rank, tag] = turn
                else:  # a phase that uses the contents: the turn that was to write them has done so
                    writers.pop((rank, tag), None)
        # At once: after an interrupt before it, the contents that the phase was to write count as not written.
        self._writers, self.unwritten, self.entered = writers, unwritten, name
        return turn

    def replace(self, new: Rank) -> None:
        """Puts a rank in the place of the one with its role and index. Raises ValueError if there is none."""
        for at, old in enumerate(self.ranks):
            if (old.role, old.index) == (new.role, new.index):
                self.ranks[at] = new
                self.unwritten.pop(old, None)
                self.late.pop(old, None)
                self._writers = {key: turn for key, turn in self._writers.items() if key[0] != old}
                self.starting.discard(old)
                self.starting.add(new)
                self.entered = None
                return
        there = listed(map(str, self.ranks))
        raise ValueError(f"there is no {new.role!r} {new.index!r}; there are {there}")

    def mark_unwritten(self, turn: Turn) -> None:
        """The body of a turn has failed before a later phase used the contents that it was to write."""
        for (rank, tag), writer in self._writers.items():
            if writer is turn:
                self.unwritten.setdefault(rank, set()).add(tag)

    def awaits(self, turn: Turn) -> bool:
        """Whether contents that a turn was to overwrite have not been used since."""
        return any(writer is turn for writer in self._writers.values())


def _without_contents(tags: Sequence[str], why: str) -> BackupError:
    names = ", ".join(map(repr, tags))
    text = f"the contents of {names} are not there: {why}; expected restore=False for them, and to be written"
    return BackupError(text, needed_bytes=0, held_bytes=0, available_bytes=0)


def _commit(rank: Rank) -> Call:
    return rank.submit("colocated_commit")


def _abort(rank: Rank) -> Call:
    return rank.submit("colocated_abort")


def _behind(ranks: Iterable[Rank], silent: Iterable[Rank]) -> list[Rank]:
    """The ranks whose calls wait for calls that hang. ``silent``: the ranks that hang."""
    lanes = {rank.lane for rank in silent}
    return [rank for rank in ranks if rank.lane in lanes]


def _notify(ranks: Sequence[Rank], failed: Rank, error: Error, behind: Sequence[Rank]) -> None:
    """Reports a failure. ``behind``: ranks that are not waited for, since other calls of their processes hang."""
    calls, errors = submit(ranks, lambda rank: rank.submit("colocated_failed", failed.role, failed.index, error))
    deadline = time.monotonic() + _NOTIFY_S
    for rank, call in ((rank, call) for rank, call in calls.items() if rank not in behind):
        try:
            call.result(max(0.0, deadline - time.monotonic()))
        except Exception as raised:  # TimeoutError among them
            errors[rank] = raised
    for rank, each in errors.items():
        log.warning("%s did not take the report of a failure: %s", rank, rank.described(each))


def _by_role(ranks: Iterable[Rank], results: Results) -> dict[str, list[Any]]:
    by_role: dict[str, list[Any]] = {}
    for rank in ranks:
        by_role.setdefault(rank.role, []).append(results[rank])
    return by_role
