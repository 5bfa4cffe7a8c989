"""A turn of a group, in two halves: all ranks prepare, then all ranks commit."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from memsaver.errors import BackupError, Error, RegionPausedError
from memsaver.transitions import Transition
from memsaver.turns.members import Ready
from memsaver.turns.plan import Plan, TurnOptions
from memsaver.turns.ranks import Answers, Call, Calls, Crew, Rank, unanswered

_UNDO_S = 10.0  # bound of the calls that take preparations back
Failure = tuple[Rank, Exception, str]  # and the verb of its call


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
        >>> weights = memsaver.region("weights", device="cpu")
        >>> phases = {"rollout": {"engine": ["weights"]}, "train": {"engine": []}}
        >>> turn = memsaver.ray.Group(engine=memsaver.ray.Colocated(), phases=phases).enter("train")
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

    def __enter__(self) -> Turn:
        if "_on_error" not in self.__dict__:
            raise Error(f"this turn into the phase {self.phase!r} is a copy, expected the result of Group.enter()")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.__dict__["_on_error"]()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_on_error"}

    @property
    def transitions(self) -> list[Transition]:
        """The transitions of all ranks, pauses first. Values of ranks without memsaver's transitions are left out."""
        ranks = (each for by_role in (self.paused, self.resumed) for ranks in by_role.values() for each in ranks)
        return [each for each in ranks if isinstance(each, Transition)]


class RunningTurn:
    """A turn under way. In a torch.distributed job each process runs it, with the same answers: it asks no clock."""

    def __init__(
        self, plan: Plan, crew: Crew, unwritten: dict[Rank, set[str]], phase: str, options: TurnOptions
    ) -> None:
        self._crew, self._unwritten = crew, unwritten
        self._phase, self._options = phase, options
        self._parts = {rank: plan.part(phase, rank.role) for rank in crew.ranks}
        self._pausing = [rank for rank, part in self._parts.items() if part.leaving]
        self._resuming = [rank for rank, part in self._parts.items() if part.resident]
        self._prepared: list[Rank] = []  # ranks that may have a prepared pause
        self._has_failed = False
        self._begin = time.perf_counter()

    def run(self) -> Turn:
        """Prepares all ranks, then commits. A failure of a rank before the commits leaves all ranks as they were.

        After it the tags to pause are paused.
        """
        commits = False
        try:
            self._check_written()
            ready = self._prepare()
            commits = True
            return self._commit(ready)
        except BaseException as error:
            if not self._has_failed:  # such as Ctrl-C
                self._crew.leave(error, self._prepared, commits)
            raise

    def _check_written(self) -> None:
        failures: list[Failure] = []
        for rank, part in self._parts.items():
            unwritten = self._unwritten.get(rank, set()).difference(self._unrestored(rank))
            if tags := [tag for tag in part.resumes if tag in unwritten]:
                why = "the phase that was to write them failed"
                failures.append((rank, _without_contents(tags, why), "prepare to resume"))
        self._check(failures)

    def _prepare(self) -> dict[Rank, Ready]:
        calls: dict[Rank, Call] = {}
        for rank, part in self._parts.items():
            if part.pauses or part.resumes:
                options = self._options.of_pauses(rank.role, part.leaving)
                calls[rank] = Call("colocated_prepare", (part.leaving, part.resumes), options)
        self._prepared = [rank for rank in calls if rank in self._pausing]
        ready = self._call(calls, self._options.until)
        failures = [
            (rank, error, "prepare to pause" if rank in self._pausing else "prepare to resume")
            for rank, error in ready.errors.items()
        ]
        self._check(sorted(failures, key=lambda failure: failure[2]))
        for rank, each in ready.results.items():
            tags = [tag for tag in each.discarded if self._options.restores(rank.role, tag)]
            if tags:
                failures.append((rank, _without_contents(tags, "a pause kept no backup"), "prepare to resume"))
            for tag, source, state in each.derived:
                if self._options.restores(rank.role, tag) and not self._has_source(rank, tag, source, state):
                    text = f"{tag!r} is derived from {source!r}, which has no contents in this phase"
                    error = RegionPausedError(text, tag=source, state="paused")
                    failures.append((rank, error, "prepare to resume"))
        self._check(failures)
        return ready.results

    def _commit(self, ready: Mapping[Rank, Ready]) -> Turn:
        side_by_side = all(each.pooled for each in ready.values())
        handover = side_by_side and any(ready[rank].moves for rank in self._pausing)
        commits = {rank: Call("colocated_commit") for rank in self._prepared}
        commit_begin, resumed = time.perf_counter(), Answers()
        if side_by_side:
            paused, resumed = self._crew.call(commits, self._to_resume(handover), until=self._options.completes_until)
        else:
            paused = self._call(commits, self._options.completes_until)
        self._prepared = []  # a failure does not abort them
        if not side_by_side and not paused.errors:
            resumed = self._call(self._to_resume(handover), self._options.completes_until)
        if paused.errors or resumed.errors:
            self._pause_again(resumed, ready)
            failures = [(rank, error, "pause") for rank, error in paused.errors.items()]
            self._check([*failures, *((rank, error, "resume") for rank, error in resumed.errors.items())])
        begun = self._call(self._to_move_later(), self._options.completes_until)
        if begun.errors:
            self._pause_again(resumed, ready)
            self._check([(rank, error, "begin to resume") for rank, error in begun.errors.items()])
        return Turn(
            phase=self._phase,
            paused=_by_role(self._pausing, paused.results),
            resumed=_by_role(self._resuming, resumed.results),
            pause_seconds=commit_begin + paused.seconds - self._begin,
            resume_seconds=resumed.seconds,
            seconds=time.perf_counter() - self._begin,
            side_by_side=side_by_side,
            unrestored={rank.role: tags for rank in self._crew.ranks if (tags := self._unrestored(rank))},
        )

    def _to_resume(self, handover: bool) -> Calls:
        """The calls that resume. Contents with ``restore=False`` count as not written until the turn has ended."""
        calls: dict[Rank, Call] = {}
        for rank, part in self._parts.items():
            if unrestored := self._unrestored(rank):
                self._unwritten[rank] = self._unwritten.get(rank, set()).union(unrestored)
            if tags := part.resident:
                calls[rank] = Call("resume", (tags,), self._options.of_resumes(rank.role, tags, handover))
        return calls

    def _to_move_later(self) -> Calls:
        """The calls that begin to move late and lingering tags. The bounds count anew, as in ``memsaver.phase()``."""
        anew = replace(self._options, since=time.monotonic())
        calls: dict[Rank, Call] = {}
        for rank, part in self._parts.items():
            if part.lingering or part.late:
                of_pauses = anew.of_pauses(rank.role, part.lingering)
                of_resumes = anew.of_resumes(rank.role, part.late, True)
                options = {**of_pauses, **of_resumes, "phase": self._phase}
                calls[rank] = Call("colocated_background", (part.lingering, part.late), options)
        return calls

    def _has_source(self, rank: Rank, tag: str, source: str, state: str) -> bool:
        """Whether a source has contents when the derived tag resumes. ``state``: see ``Ready.derived``."""
        part = self._parts[rank]
        if source in part.pauses:
            return False
        comes = source in part.resident or (source in part.late and tag in part.late)
        return state == "active" or (state == "kept" and comes and self._options.restores(rank.role, source))

    def _call(self, calls: Calls, until: float | None) -> Answers:
        return self._crew.call(calls, until=until)[0] if calls else Answers()

    def _unrestored(self, rank: Rank) -> list[str]:
        """The tags that are resident in the phase with ``restore=False``."""
        return [tag for tag in self._parts[rank].resumes if not self._options.restores(rank.role, tag)]

    def _pause_again(self, resumed: Answers, ready: Mapping[Rank, Ready]) -> None:
        """Pauses the ranks that resumed, so that ranks that wait for each other's memory can all try again.

        Those with an error may have memory again, as with a guest that could not come back. The bound of these pauses
        is that of the whole turn, since the rest of the turn's time may be 0. Tags that resumed without contents pause
        without a backup.
        """
        values = {**self._options.values, "backup": {}}
        again = replace(self._options, since=time.monotonic(), values=values)
        calls: dict[Rank, Call] = {}
        silent = unanswered(resumed.errors)
        for rank, result in {**resumed.results, **resumed.errors}.items():
            tags = list(result.resumed) if isinstance(result, (Transition, Error)) else []
            if not isinstance(result, Transition) and rank not in silent:
                # An override of resume() may fail after its regions have come, or return no transition.
                tags = list(dict.fromkeys([*tags, *ready[rank]._resumes(self._parts[rank].resident)]))
            if tags:
                unrestored = {tag: "none" for tag in tags if not again.restores(rank.role, tag)}
                calls[rank] = Call("pause", (tags,), {**again.of_pauses(rank.role, tags), "backup": unrestored or None})
        self._crew.undo(calls, again.until)

    def _check(self, failures: Sequence[Failure]) -> None:
        """If ranks have failed, takes the preparations of the others back, and raises the first failure."""
        if not failures:
            return
        self._has_failed = True
        dead = {rank for rank, error, _ in failures if rank.is_lost(error)}
        self._crew.undo({rank: Call("colocated_abort") for rank in self._prepared}, time.monotonic() + _UNDO_S)
        # First a rank that has died: the others may have failed since they wait for it.
        failed, cause, verb = min(failures, key=lambda failure: failure[0] not in dead)
        report = self._crew.report
        doing = {rank: f"; it {each}" for rank, each in report.doing.items()}
        part = self._parts[failed]
        tags = (part.resumes if verb.endswith("resume") else part.leaving) or part.lingering
        text = f"{failed} could not {verb} {', '.join(map(repr, tags))}: "
        text += f"{failed.described(cause)}{doing.get(failed, '')}"
        others = {rank: error for rank, error, _ in failures if rank is not failed}
        text += "".join(f"; {rank}: {rank.described(each)}{doing.get(rank, '')}" for rank, each in others.items())
        text += f"; report: {report.path}" if report.path is not None else ""
        raise Error(
            f"phase {self._phase!r} could not be entered: {text}",
            phase=self._phase,
            role=failed.role,
            rank=failed.index,
            report=report.path,
        ) from cause


def _without_contents(tags: Sequence[str], why: str) -> BackupError:
    names = ", ".join(map(repr, tags))
    text = f"the contents of {names} are not there: {why}; expected restore=False for them, and to be written"
    return BackupError(text, needed_bytes=0, held_bytes=0, available_bytes=0)


def _by_role(ranks: Iterable[Rank], results: Mapping[Rank, Any]) -> dict[str, list[Any]]:
    by_role: dict[str, list[Any]] = {}
    for rank in ranks:
        by_role.setdefault(rank.role, []).append(results[rank])
    return by_role
