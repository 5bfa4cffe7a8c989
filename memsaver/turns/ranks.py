"""The ranks of a group, and calls to all of them at once. How calls travel is a matter of the derived classes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from memsaver.errors import Error, WaitTimeoutError
from memsaver.turns.members import short_loops
from memsaver.turns.plan import TurnOptions

# The methods of members that a turn calls.
METHODS = ("pause", "resume", "colocated_prepare", "colocated_commit", "colocated_abort", "colocated_background")


class Rank:
    """A member of a role, by its index in it."""

    def __init__(self, role: str, index: int) -> None:
        self.role, self.index = role, index

    def is_lost(self, error: Exception) -> bool:
        """Whether the error of a call means that the rank has died."""
        return False

    def described(self, error: Exception) -> str:
        """The class of an error of this rank, and its text."""
        return f"{type(error).__name__}: {str(error).strip()}"

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


@dataclass(frozen=True)
class Call:
    method: str
    args: tuple[Any, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


Calls = Mapping[Rank, Call]
Errors = dict[Rank, Exception]
Tags = Mapping[Rank, Collection[str]]


@dataclass
class Answers:
    """The answers of ranks. ``seconds``: until the last one came.

    The error of a rank that had not answered at the bound is a WaitTimeoutError of the stage "answer".
    """

    results: dict[Rank, Any] = field(default_factory=dict)
    errors: Errors = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class TurnReport:
    """The report of a turn that has exceeded its deadline.

    ``path``: of the file; None if there is none. ``doing``: the present actions of ranks, as far as known, in words.
    """

    path: str | None = None
    doing: Mapping[Rank, str] = field(default_factory=dict)


class Crew(Protocol):
    """All ranks of a group.

    In a group of Ray one caller calls all ranks. In a job of torch.distributed each process runs the same turn, calls
    its own ranks, and learns the answers of all. They are the same in all processes.
    """

    report: TurnReport
    """Of the turn under way, if it has exceeded its deadline."""

    @property
    def ranks(self) -> Sequence[Rank]: ...

    def begin(self, turn: int, phase: str, options: TurnOptions, unwritten: Tags) -> Tags:
        """Begins a turn: all ranks can be called. Raises memsaver.Error.

        ``unwritten``: tags whose contents count as not written. Returns those by all callers.
        """

    def call(self, *steps: Calls, until: float | None) -> list[Answers]:
        """Calls ranks, in each step at once. A rank makes its call of a step after its calls of the steps before.

        ``until``: by ``time.monotonic()``. A call without an answer by then goes on; no bound if None. When a rank has
        died, the wait for the others ends 5 s later at the latest, since they may wait for it.
        """

    def undo(self, calls: Calls, until: float | None) -> None:
        """Makes the calls that take parts of a failed turn back. Errors are logged."""

    def leave(self, error: BaseException, prepared: list[Rank], commits: bool) -> None:
        """The turn ends by an error that is no rank's. Ranks that have prepared commit if ``commits``, else abort."""


def unanswered(errors: Errors) -> set[Rank]:
    """The ranks whose calls still run."""
    return {rank for rank, error in errors.items() if isinstance(error, WaitTimeoutError) and error.stage == "answer"}


def no_answer(waited_s: float, missing: str = "answered") -> WaitTimeoutError:
    text = f"it has not {missing} (stage 'answer', after {waited_s:.2f} s)"
    return WaitTimeoutError(text, stage="answer", waited_s=waited_s)


def check_member(role: str, member: Any) -> None:
    """Raises TypeError unless a value can be a member of a role."""
    missing = [name for name in METHODS if not hasattr(member, name)]
    if missing or isinstance(member, type):
        what = "is a class" if isinstance(member, type) else f"has no {missing[0]}()"
        raise TypeError(f"{member!r} of the role {role!r} {what}, expected an object that derives from Colocated")


def check_distinct(members: Iterable[tuple[str, Any]]) -> None:
    """Raises ValueError if a member, given with its role, is there twice: it prepares one pause at a time."""
    roles: dict[object, str] = {}
    for role, member in members:
        key = getattr(member, "_actor_id", id(member))  # Ray makes several handles of an actor
        if key in roles:
            raise ValueError(
                f"{member!r} of the role {role!r} is a member of {roles[key]!r} already, expected one place for each "
                "member: a role can have the tags of both"
            )
        roles[key] = role


def called(member: Any, call: Call) -> Any:
    """The result of a member's method. If the method returned an awaitable, the result of awaiting it."""
    try:
        result = getattr(member, call.method)(*call.args, **call.options)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result
    except asyncio.CancelledError as error:  # no Exception: the caller would take it for a cancellation of its own
        raise Error(f"{call.method}() was cancelled, or awaited a task that was") from error


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    short_loops.add(asyncio.get_running_loop())
    return await awaitable
