"""Ray actors that take turns on the same GPUs: what an actor offers, and the group that moves all of them at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

try:
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "memsaver.ray needs Ray; expected it from pip install 'memsaver[ray]'", name="ray"
    ) from error

from memsaver.colocated import AsyncColocated, Colocated, Ready
from memsaver.errors import Error
from memsaver.members import Call, Errors, Member, Results, barrier, collect, submit
from memsaver.placement import Broker, device, placement, start_brokers
from memsaver.regions import seconds, several
from memsaver.transitions import Transition

__all__ = [
    "AsyncColocated", "Broker", "Colocated", "Group", "Ready", "Turn", "device", "placement", "start_brokers",
]  # fmt: skip

log = logging.getLogger("memsaver")

_TELL_S = 10.0  # how long the group waits until everybody has heard of a failure
_RESTART_S = 60.0  # how long Ray may refuse calls of an actor that restarts; while its __init__ runs they wait
_POLL_S = 0.05
_HANDOVER_S = 60.0  # how long a resume waits at least for memory that is on its way from another member

_Tags = Mapping[str, list[str]]  # by role


@dataclass(frozen=True)
class Turn:
    """How a group entered a phase. Transitions by role, then by rank; what other members return stands as it is.

    Seconds count from when all actors concerned have started.
    """

    phase: str
    paused: dict[str, list[Any]]
    resumed: dict[str, list[Any]]
    pause_seconds: float  # until the last rank had paused
    resume_seconds: float  # from when the ranks were told to resume until the last rank had
    seconds: float  # until all was done: less than the two together where they were side by side
    side_by_side: bool  # ranks resumed while others paused: their memory is in shared pools

    @property
    def transitions(self) -> list[Transition]:
        """Those of all ranks, pauses first."""
        ranks = (each for turn in (self.paused, self.resumed) for ranks in turn.values() for each in ranks)
        return [each for each in ranks if isinstance(each, Transition)]


class Group:
    """All ranks of all roles, and the phases that they enter together. For one caller at a time.

    ``phases``: name -> role -> tags. ``roles``: the members of each, one or a list in the order of their ranks. They
    are Ray actors that derive from :class:`Colocated` or :class:`AsyncColocated`, or any actors or objects of this
    process that have ``pause(tags)`` and ``resume(tags)`` which may be called twice. Objects are called in threads, and
    what they return may be awaitable::

        Group(engine=engines, trainer=trainers, phases={"rollout": {"engine": ["weights", "kv_cache"]},
                                                        "train": {"trainer": ["params", "optimizer"]}})

    Raises ValueError or TypeError for roles without members, and phases with unknown roles or without tags.
    """

    def __init__(self, *, phases: Mapping[str, Mapping[str, Iterable[str]]], **roles: Any) -> None:
        if not roles:
            raise ValueError("no roles, expected at least one, such as engine=[actor]")
        self._members = [member for role, given in roles.items() for member in _ranks(role, given)]
        self._phases = _checked_phases(phases, roles)
        self._entered: str | None = None
        self._starting = set(self._members)  # perhaps: they are new, or died and may have restarted

    @property
    def entered(self) -> str | None:
        """The phase that all ranks are in. None before the first, and after one that failed until one succeeds."""
        return self._entered

    def replace(self, role: str, rank: int, actor: Any) -> None:
        """Another member in place of one that has died: its regions are active, or still to be made.

        The group is in no phase then, until it enters one. Raises ValueError where there is no such rank, TypeError
        for what has no pause() and resume().
        """
        for at, member in enumerate(self._members):
            if (member.role, member.rank) == (role, rank):
                self._members[at] = Member(role, rank, actor)
                self._starting.discard(member)
                self._starting.add(self._members[at])
                self._entered = None
                return
        raise ValueError(f"there is no {role!r} {rank!r}; there are {_listed(map(str, self._members))}")

    @contextmanager
    def phase(self, name: str, *, timeout: float = 0.0, restore: bool | Mapping[str, bool] = True) -> Iterator[Turn]:
        """Enters a phase: of all tags that any phase names for a role, exactly this phase's are resident.

        All ranks prepare: what leaves drains, and what its pause needs is reserved. When the last is done, all pause,
        and resume what comes: side by side where the memory of all of them is in shared pools, else when the last has
        paused. On exit nothing moves: the next phase says what leaves.

        - ``timeout``: seconds to wait for memory that others hold; at least 60 for what is on its way from a member.
        - ``restore``: False for contents about to be overwritten, for all roles or as ``{role: bool}``.

        Members that do not pause in two halves (see :class:`Colocated`) pause once all others are prepared.

        Raises ValueError or TypeError for wrong arguments, and memsaver.Error (``phase``, ``role``, ``rank``; its cause
        chained) where a rank fails or has died. Where that was while they prepared, nothing has changed on any rank.
        Later, ranks that had resumed in this turn have paused again. Everybody was told through ``colocated_failed``,
        and this phase, or another, can be entered.
        """
        leaving, coming = self._moves(name)
        options = self._resume_options(timeout, restore)
        self._entered = None
        turn = self._enter(name, leaving, coming, options)
        self._entered = name
        yield turn

    def _moves(self, name: str) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """Tags that leave, and tags that come, by role."""
        if name not in self._phases:
            raise ValueError(f"there is no phase {name!r}; there are {_listed(self._phases)}")
        coming = self._phases[name]
        leaving: dict[str, list[str]] = {}
        for phase in self._phases.values():
            for role, tags in phase.items():
                found = leaving.setdefault(role, [])
                found += [tag for tag in tags if tag not in coming.get(role, ()) and tag not in found]
        return leaving, coming

    def _resume_options(self, timeout: float, restore: bool | Mapping[str, bool]) -> dict[str, dict[str, Any]]:
        """By role, what its resumes are told beyond the tags."""
        timeout = seconds(timeout)
        roles = dict.fromkeys(member.role for member in self._members)
        by_role = dict(restore) if isinstance(restore, Mapping) else dict.fromkeys(roles, restore)
        for role, restored in by_role.items():
            if role not in roles:
                raise ValueError(f"restore names the role {role!r}, expected one of {_listed(roles)}")
            if not isinstance(restored, bool):
                raise TypeError(f"restore is {restored!r}, expected True or False")
        waits: dict[str, Any] = {"timeout": timeout} if timeout else {}
        return {role: {**waits, **({} if by_role.get(role, True) else {"restore": False})} for role in roles}

    def _enter(self, name: str, leaving: _Tags, coming: _Tags, options: Mapping[str, dict[str, Any]]) -> Turn:
        going = [member for member in self._members if leaving.get(member.role)]
        due = [member for member in self._members if coming.get(member.role)]

        self._await_starts({*going, *due})
        begin = time.perf_counter()
        ready, paused = self._prepare(name, leaving, coming, going, due)
        side_by_side = all(member in ready and ready[member].pooled for member in {*going, *due})
        if side_by_side and any(ready[member].moves for member in going):
            options = {role: {**given, "timeout": _patience(given)} for role, given in options.items()}

        def resume(member: Member) -> Call:
            return member.submit("resume", coming[member.role], **options[member.role])

        # Past the point of no return. What fails from here on rolls forward: what leaves is paused.
        commits, failed = submit([each for each in going if each not in paused], _commit)
        told = time.perf_counter()
        resumes, refused = submit(due, resume) if side_by_side else ({}, {})
        done, errors = collect(commits)
        failed.update(errors)
        paused.update(done)
        middle = time.perf_counter()
        if not side_by_side and not failed:
            told = middle
            resumes, refused = submit(due, resume)
        resumed, errors = collect(resumes)
        refused.update(errors)
        end = time.perf_counter()

        if failed or refused:
            self._undo(resumed, coming)
            self._fail(name, [(failed, "pause", leaving), (refused, "resume", coming)])
        return Turn(
            phase=name,
            paused=_by_role(going, paused),
            resumed=_by_role(due, resumed),
            pause_seconds=middle - begin,
            resume_seconds=end - told,
            seconds=end - begin,
            side_by_side=side_by_side,
        )

    def _prepare(
        self, name: str, leaving: _Tags, coming: _Tags, going: Sequence[Member], due: Sequence[Member]
    ) -> tuple[dict[Member, Ready], Results]:
        """What the members answered, and what came of pauses in one piece. Where this raises, no other has paused."""
        concerned = [each for each in self._members if each in going or each in due]
        colocated = [member for member in concerned if member.has("colocated_prepare")]
        prepared = [member for member in colocated if member in going]

        def prepare(member: Member) -> Call:
            leaves, comes = leaving.get(member.role, []), coming.get(member.role, [])
            return member.submit("colocated_prepare", leaves, comes)

        def pause(member: Member) -> Call:
            method = "colocated_pause" if member.has("colocated_pause") else "pause"
            return member.submit(method, leaving[member.role])

        try:
            ready, errors = barrier(colocated, prepare)
            if errors:
                out = {member: error for member, error in errors.items() if member in going}
                inward = {member: error for member, error in errors.items() if member not in going}
                failures = [(out, "prepare to pause", leaving), (inward, "prepare to resume", coming)]
                self._fail(name, failures, aborting=prepared)
            whole = [member for member in going if member not in ready or not ready[member].halves]
            paused, errors = barrier(whole, pause)
            if errors:
                self._fail(name, [(errors, "pause", leaving)], aborting=prepared)
        except Error:
            raise
        except BaseException:  # such as Ctrl-C
            submit(prepared, _abort)
            raise
        return {member: ready[member] for member in colocated if member not in whole}, paused

    def _await_starts(self, concerned: set[Member]) -> None:
        deadline = time.monotonic() + _RESTART_S
        waiting = {member for member in self._starting & concerned if member.has("__ray_ready__")}
        self._starting -= concerned
        while waiting and time.monotonic() < deadline:
            _, errors = barrier(waiting, lambda member: member.submit("__ray_ready__"))
            waiting = {member for member, error in errors.items() if isinstance(error, ActorUnavailableError)}
            time.sleep(_POLL_S if waiting else 0.0)

    def _undo(self, resumed: Results, coming: _Tags) -> None:
        """Pauses again what did resume, so that ranks that wait for each other's memory can all try again."""

        def changed(member: Member) -> list[str]:
            outcome = resumed[member]
            return list(outcome.resumed) if isinstance(outcome, Transition) else coming[member.role]

        members = [member for member in resumed if changed(member)]
        _, errors = barrier(members, lambda member: member.submit("pause", changed(member)))
        for member, error in errors.items():
            log.error("%s stays resident: it could not pause again: %s", member, error)

    def _fail(
        self, name: str, failures: Sequence[tuple[Errors, str, _Tags]], aborting: Sequence[Member] = ()
    ) -> NoReturn:
        """Has what is prepared taken back, tells everybody of the first failure, and raises it."""
        errors = {member: error for each, _, _ in failures for member, error in each.items()}
        failed, cause, verb, tags = next(
            (member, error, verb, tags[member.role]) for each, verb, tags in failures for member, error in each.items()
        )
        self._starting |= {member for member, error in errors.items() if isinstance(error, RayActorError)}
        # One that died has nothing prepared, and would answer when it has restarted.
        _, left = barrier((each for each in aborting if not isinstance(errors.get(each), RayActorError)), _abort)
        for member, error in left.items():
            if member not in errors:
                log.warning("%s could not take back what it had prepared: %s", member, error)
        # What a rank raised may be of a class that others cannot load.
        told = cause if isinstance(cause, Error) else Error(_described(cause))
        others = [each for each in self._members if each not in errors and each.has("colocated_failed")]
        _tell(others, failed, told)
        also = "".join(f"; {each}: {_described(error)}" for each, error in errors.items() if each is not failed)
        said = f"{failed} could not {verb} {_listed(tags)}: {_described(cause)}{also}"
        raise Error(
            f"phase {name!r} could not be entered: {said}",
            phase=name,
            role=failed.role,
            rank=failed.rank,
        ) from cause


def _commit(member: Member) -> Call:
    return member.submit("colocated_commit")


def _abort(member: Member) -> Call:
    return member.submit("colocated_abort")


def _tell(members: Sequence[Member], failed: Member, error: Error) -> None:
    calls, errors = submit(members, lambda member: member.submit("colocated_failed", failed.role, failed.rank, error))
    deadline = time.monotonic() + _TELL_S
    for member, call in calls.items():
        try:
            call.result(max(0.0, deadline - time.monotonic()))
        except Exception as raised:  # TimeoutError among them
            errors[member] = raised
    for member, unheard in errors.items():
        log.warning("%s could not be told of a failure: %s", member, _described(unheard))


def _patience(options: Mapping[str, Any]) -> float:
    return max(options.get("timeout", 0.0), _HANDOVER_S)


def _ranks(role: str, given: Any) -> list[Member]:
    actors = list(given) if isinstance(given, (list, tuple)) else [given]
    if not actors:
        raise ValueError(f"the role {role!r} has no members, expected one or more")
    return [Member(role, rank, actor) for rank, actor in enumerate(actors)]


def _checked_phases(
    phases: Mapping[str, Mapping[str, Iterable[str]]], roles: Mapping[str, object]
) -> dict[str, dict[str, list[str]]]:
    if not isinstance(phases, Mapping):
        raise TypeError(f"phases is {phases!r}, expected a dict of name -> role -> tags")
    if not phases:
        raise ValueError("phases is empty, expected a dict of name -> role -> tags")
    checked: dict[str, dict[str, list[str]]] = {}
    for name, by_role in phases.items():
        if not isinstance(by_role, Mapping):
            raise TypeError(f"phase {name!r} is {by_role!r}, expected a dict of role -> tags")
        checked[name] = {}
        for role, tags in by_role.items():
            if role not in roles:
                raise ValueError(f"phase {name!r} names the role {role!r}, expected one of {_listed(roles)}")
            checked[name][role] = list(dict.fromkeys(several(tags, f"phase {name!r} for {role!r}")))
    if not any(tags for by_role in checked.values() for tags in by_role.values()):
        raise ValueError("no phase names a tag, expected at least one")
    return checked


def _by_role(members: Iterable[Member], results: Results) -> dict[str, list[Any]]:
    by_role: dict[str, list[Any]] = {}
    for member in members:
        by_role.setdefault(member.role, []).append(results[member])
    return by_role


def _described(error: Exception) -> str:
    """The kind of an error, and what it says in one line where it is Ray that speaks at length."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if isinstance(error, RayError) and text else text}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
