"""Ray actors that take turns on the same GPUs: what an actor offers, and the group that moves all of them at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import memsaver
from memsaver import regions
from memsaver.errors import Error
from memsaver.regions import Tags
from memsaver.transitions import Transition

log = logging.getLogger("memsaver")

_TELL_S = 10.0  # how long the group waits until everybody has heard of a failure


class Colocated:
    """Base of an actor with regions: ``@ray.remote class Engine(Colocated)``. Everything it returns or raises pickles.

    A group calls :meth:`pause` and :meth:`resume`; override them to drain before, or to rebuild after.
    """

    def pause(self, tags: Tags = None, backup: str | None = None) -> Transition:
        """See :func:`memsaver.pause`."""
        return memsaver.pause(tags, backup=backup)

    def resume(self, tags: Tags = None, restore: bool = True, timeout: float = 0.0) -> Transition:
        """See :func:`memsaver.resume`."""
        return memsaver.resume(tags, restore=restore, timeout=timeout)

    def switch(
        self,
        pause: Tags = (),
        resume: Tags = (),
        backup: str | None = None,
        restore: bool = True,
        timeout: float = 0.0,
    ) -> Transition:
        """See :func:`memsaver.switch`."""
        return memsaver.switch(pause=pause, resume=resume, backup=backup, restore=restore, timeout=timeout)

    def stats(self) -> dict[str, Any]:
        """See :func:`memsaver.stats`."""
        return memsaver.stats()

    def colocated_pause(self, tags: Sequence[str]) -> Transition:
        """Pauses what must leave for a phase. A tag whose regions are still to be made is left out."""
        existing = {each.tag for each in regions.all_regions()}
        return self.pause([tag for tag in tags if tag in existing])

    def colocated_failed(self, role: str, rank: int, error: Exception) -> None:
        """Another rank could not follow into a phase. To be overridden; this one logs."""
        log.warning("%s %d failed in a transition: %s", role, rank, error)


@dataclass(frozen=True)
class Turn:
    """How a group entered a phase. Transitions by role, then by rank; what other members return stands as it is."""

    phase: str
    paused: dict[str, list[Any]]
    resumed: dict[str, list[Any]]
    pause_seconds: float  # until the last rank had paused
    resume_seconds: float  # from then until the last rank had resumed

    @property
    def seconds(self) -> float:
        return self.pause_seconds + self.resume_seconds

    @property
    def transitions(self) -> list[Transition]:
        """Those of all ranks, pauses first."""
        ranks = (each for turn in (self.paused, self.resumed) for ranks in turn.values() for each in ranks)
        return [each for each in ranks if isinstance(each, Transition)]


@dataclass(frozen=True, eq=False)
class _Member:
    role: str
    rank: int
    actor: Any

    def call(self, method: str, *args: object, **options: object) -> Any:
        return getattr(self.actor, method).remote(*args, **options)

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


_Results = dict[_Member, Any]
_Errors = dict[_Member, Exception]


class Group:
    """All ranks of all roles, and the phases that they enter together. For one caller at a time.

    ``phases``: name -> role -> tags. ``roles``: the actors of each, one or a list in the order of their ranks; they
    derive from :class:`Colocated`, or have ``pause(tags)`` and ``resume(tags)`` that may be called twice::

        Group(engine=engines, trainer=trainers, phases={"rollout": {"engine": ["weights", "kv_cache"]},
                                                        "train": {"trainer": ["params", "optimizer"]}})

    Raises ValueError or TypeError for roles without actors, and phases with unknown roles or without tags.
    """

    def __init__(self, *, phases: Mapping[str, Mapping[str, Iterable[str]]], **roles: Any) -> None:
        if not roles:
            raise ValueError("no roles, expected at least one, such as engine=[actor]")
        self._members = [_Member(role, *each) for role, given in roles.items() for each in _ranks(role, given)]
        self._phases = _checked_phases(phases, roles)
        self._entered: str | None = None

    @property
    def entered(self) -> str | None:
        """The phase that all ranks are in. None before the first, and after one that failed until one succeeds."""
        return self._entered

    @contextmanager
    def phase(self, name: str, *, timeout: float = 0.0, restore: bool | Mapping[str, bool] = True) -> Iterator[Turn]:
        """Enters a phase: of all tags that any phase names for a role, exactly this phase's are resident.

        All ranks pause what leaves, side by side; when the last is done, all resume what comes. On exit nothing moves:
        the next phase says what leaves. ``timeout``: seconds to wait for memory that others hold. ``restore``: False
        for contents about to be overwritten, for all roles or as ``{role: bool}``.

        Raises ValueError or TypeError for wrong arguments, and memsaver.Error (``phase``, ``role``, ``rank``; its cause
        chained) where a rank fails or has died. Then ranks that had resumed in this turn have paused again, everybody
        was told through ``colocated_failed``, and this phase, or another, can be entered.
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

    def _resume_options(self, timeout: float, restore: bool | Mapping[str, bool]) -> dict[str, dict[str, object]]:
        """By role, what its resumes are told beyond the tags."""
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
            raise TypeError(f"timeout is {timeout!r}, expected seconds")
        if not timeout >= 0:
            raise ValueError(f"timeout is {timeout!r}, expected seconds of 0 or more")
        roles = dict.fromkeys(member.role for member in self._members)
        by_role = dict(restore) if isinstance(restore, Mapping) else dict.fromkeys(roles, restore)
        for role, restored in by_role.items():
            if role not in roles:
                raise ValueError(f"restore names the role {role!r}, expected one of {_listed(roles)}")
            if not isinstance(restored, bool):
                raise TypeError(f"restore is {restored!r}, expected True or False")
        waits: dict[str, object] = {"timeout": timeout} if timeout else {}
        return {role: {**waits, **({} if by_role.get(role, True) else {"restore": False})} for role in roles}

    def _enter(
        self,
        name: str,
        leaving: Mapping[str, list[str]],
        coming: Mapping[str, list[str]],
        options: Mapping[str, Mapping[str, object]],
    ) -> Turn:
        def pause(member: _Member) -> Any:
            method = "colocated_pause" if hasattr(member.actor, "colocated_pause") else "pause"
            return member.call(method, leaving[member.role])

        def resume(member: _Member) -> Any:
            return member.call("resume", coming[member.role], **options[member.role])

        begin = time.perf_counter()
        paused, errors = _barrier(self._concerned(leaving), pause)
        if errors:
            self._fail(name, "pause", leaving, errors)
        middle = time.perf_counter()
        resumed, errors = _barrier(self._concerned(coming), resume)
        if errors:
            self._undo(resumed, coming)
            self._fail(name, "resume", coming, errors)
        end = time.perf_counter()
        return Turn(name, _by_role(paused), _by_role(resumed), middle - begin, end - middle)

    def _concerned(self, tags: Mapping[str, list[str]]) -> list[_Member]:
        return [member for member in self._members if tags.get(member.role)]

    def _undo(self, resumed: _Results, coming: Mapping[str, list[str]]) -> None:
        """Pauses again what did resume, so that ranks that wait for each other's memory can all try again."""

        def changed(member: _Member) -> list[str]:
            outcome = resumed[member]
            return list(outcome.resumed) if isinstance(outcome, Transition) else coming[member.role]

        members = [member for member in resumed if changed(member)]
        _, errors = _barrier(members, lambda member: member.call("pause", changed(member)))
        for member, error in errors.items():
            log.error("%s stays resident: it could not pause again: %s", member, error)

    def _fail(self, name: str, verb: str, tags: Mapping[str, list[str]], errors: _Errors) -> None:
        """Tells everybody of the first failure and raises it."""
        failed, cause = next(iter(errors.items()))
        # What a rank raised may be of a class that others cannot load.
        told = cause if isinstance(cause, Error) else Error(_described(cause))
        others = [each for each in self._members if each not in errors and hasattr(each.actor, "colocated_failed")]
        _tell(others, failed, told)
        also = "".join(f"; {each}: {_described(error)}" for each, error in list(errors.items())[1:])
        raise Error(
            f"phase {name!r} could not be entered: {failed} could not {verb} "
            f"{_listed(tags[failed.role])}: {_described(cause)}{also}",
            phase=name,
            role=failed.role,
            rank=failed.rank,
        ) from cause


def placement(ranks: int = 1, roles: int = 2, num_cpus: float = 1.0, timeout: float = 60.0) -> tuple[Any, list[Any]]:
    """Room for actors of several roles, one of each on every one of ``ranks`` GPUs.

    Returns Ray's placement group, which lasts until ``ray.util.remove_placement_group`` or the end of the driver, and
    for each rank the options of its actors: ``Engine.options(**options[rank]).remote()``. On a cluster without a GPU
    there are CPUs only, ``num_cpus`` for each actor. Raises memsaver.Error if there is no room within ``timeout``
    seconds.
    """
    for what, count in (("ranks", ranks), ("roles", roles)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{what} is {count!r}, expected a number of 1 or more")
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    bundle = {"CPU": num_cpus * roles, **({"GPU": 1.0} if on_gpu else {})}
    group = ray.util.placement_group([bundle] * ranks)
    if not group.wait(timeout):
        ray.util.remove_placement_group(group)
        raise Error(f"no room for {ranks} times {bundle} within {timeout} s; free are {ray.available_resources()}")
    fraction = 10_000 // roles / 10_000 if on_gpu else 0.0  # Ray counts in steps of 1/10000
    return group, [
        {
            "num_cpus": num_cpus,
            "num_gpus": fraction,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        }
        for rank in range(ranks)
    ]


def _ranks(role: str, given: Any) -> list[tuple[int, Any]]:
    actors = list(given) if isinstance(given, (list, tuple)) else [given]
    if not actors:
        raise ValueError(f"the role {role!r} has no actors, expected one or more")
    for actor in actors:
        for method in ("pause", "resume"):
            if not hasattr(getattr(actor, method, None), "remote"):
                raise TypeError(f"{actor!r} of the role {role!r} has no {method}(), expected a Ray actor with one")
    return list(enumerate(actors))


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
            if isinstance(tags, str) or not isinstance(tags, Iterable):
                raise TypeError(f"phase {name!r} has {tags!r} for {role!r}, expected a list of tags")
            checked[name][role] = list(dict.fromkeys(tags))
            for tag in checked[name][role]:
                if not isinstance(tag, str):
                    raise TypeError(f"phase {name!r} has the tag {tag!r} for {role!r}, expected a string")
    if not any(tags for by_role in checked.values() for tags in by_role.values()):
        raise ValueError("no phase names a tag, expected at least one")
    return checked


def _barrier(members: Iterable[_Member], submit: Callable[[_Member], Any]) -> tuple[_Results, _Errors]:
    """Has all members do something side by side, and waits for the last of them, also where one fails."""
    pending: dict[_Member, Any] = {}
    results: _Results = {}
    errors: _Errors = {}
    for member in members:
        try:
            pending[member] = submit(member)
        except RayError as error:
            errors[member] = error
    for member, reference in pending.items():
        try:
            results[member] = ray.get(reference)
        except RayTaskError as error:
            errors[member] = error.cause if isinstance(error.cause, Exception) else error
        except RayError as error:
            errors[member] = error
    return results, errors


def _tell(members: Sequence[_Member], failed: _Member, error: Error) -> None:
    references = []
    for member in members:
        try:
            references.append(member.call("colocated_failed", failed.role, failed.rank, error))
        except RayError as unreachable:
            log.warning("%s could not be told of a failure: %s", member, unreachable)
    if not references:
        return
    heard, silent = ray.wait(references, num_returns=len(references), timeout=_TELL_S)
    if silent:
        log.warning("%d ranks have not answered to a failure within %s s", len(silent), _TELL_S)
    for reference in heard:
        try:
            ray.get(reference)
        except RayError as raised:
            log.warning("colocated_failed failed: %s", raised)


def _by_role(results: _Results) -> dict[str, list[Any]]:
    by_role: dict[str, list[Any]] = {}
    for member, outcome in results.items():
        by_role.setdefault(member.role, []).append(outcome)
    return by_role


def _described(error: Exception) -> str:
    """The kind of an error, and what it says in one line where it is Ray that speaks at length."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if isinstance(error, RayError) and text else text}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
