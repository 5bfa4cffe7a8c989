"""The ranks of a group, and concurrent calls to them."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from functools import cached_property
from typing import Any, Protocol

from memsaver._results import Lane
from memsaver.errors import WaitTimeoutError

_LOST_S = 5.0  # once a rank has died, the others have this long to answer: they may wait for it in their calls
_SLICE_S = 0.05  # longest wait for calls of one kind while there are others

# The methods of members that a turn may call.
METHODS = (
    "pause", "resume", "colocated_prepare", "colocated_commit", "colocated_abort", "colocated_pause",
    "colocated_failed",
)  # fmt: skip


class NoAnswerError(TimeoutError):
    """A call is still under way. The methods of ranks do not raise this error."""


class Call(Protocol):
    """A call of a rank's method under way."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end. Raises the method's error, Ray's error for a dead actor, or NoAnswerError."""

    @staticmethod
    def ended(calls: Sequence[Any], timeout: float | None) -> Collection[Any]:
        """Waits until one of several calls of this class has ended, or its rank has died. Returns such calls."""


class Rank:
    """A member of a role, by its index in it. How its calls travel is a matter of the derived class."""

    def __init__(self, role: str, index: int) -> None:
        self.role, self.index = role, index

    def has(self, method: str) -> bool:
        raise NotImplementedError

    def submit(self, method: str, *args: object, **options: object) -> Call:
        """Starts a call. Raises if it cannot be started."""
        raise NotImplementedError

    @property
    def reports_start(self) -> bool:
        """Whether the rank may still start, and ``start()`` reports it."""
        return False

    def start(self) -> Call:
        """Starts a call that ends when the rank has started."""
        raise NotImplementedError

    def is_starting(self, error: Exception) -> bool:
        """Whether a call was refused since the rank still starts."""
        return False

    def is_lost(self, error: Exception) -> bool:
        """Whether the error of a call means that the rank has died."""
        return False

    @property
    def has_left(self) -> bool:
        """Whether the rank has left the turn: its calls may have had any effect."""
        return False

    def replacement(self, error: Exception) -> str | None:
        """The call that puts another member in the place of a rank that has died, if there is one."""
        return None

    @property
    def lane(self) -> object:
        """Equal for ranks whose calls run one after the other: a call that hangs delays those of all of them."""
        return self

    def described(self, error: Exception) -> str:
        """The class of an error of this rank, and its text."""
        return f"{type(error).__name__}: {str(error).strip()}"

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


class LocalRank(Rank):
    """An object of this process. Its calls run one after the other in a daemon thread of its own: they may hang."""

    def __init__(self, role: str, index: int, member: Any) -> None:
        """Raises TypeError for a class, and for an object without pause() and resume()."""
        super().__init__(role, index)
        check_member(role, member)
        self.member = member

    def has(self, method: str) -> bool:
        return is_method(getattr(self.member, method, None))

    def submit(self, method: str, *args: object, **options: object) -> Call:
        bound = getattr(self.member, method)
        return _LocalCall(self._lane.submit(lambda: self._settled(bound(*args, **options))))

    def _settled(self, result: Any) -> Any:
        return settled(result)

    @cached_property
    def _lane(self) -> Lane:
        return Lane(f"memsaver {self}")


Calls = dict[Rank, Call]
Results = dict[Rank, Any]
Errors = dict[Rank, Exception]


def submit(ranks: Iterable[Rank], to: Callable[[Rank], Call]) -> tuple[Calls, Errors]:
    """Starts a call of each rank. Returns the calls, and the errors of those that could not be started."""
    calls: Calls = {}
    errors: Errors = {}
    for rank in ranks:
        try:
            calls[rank] = to(rank)
        except Exception as error:  # of any class: the group reports it to the other ranks
            errors[rank] = error
    return calls, errors


def collect(calls: Calls, until: float | None = None) -> tuple[Results, Errors]:
    """Waits for all calls, including those after one that failed.

    ``until``: by ``time.monotonic()``; a call that has no answer by then goes on, and its error is a WaitTimeoutError
    of the stage "answer". None: no bound. When a rank has died, the wait for the others ends 5 s later at the latest.
    """
    begin = time.monotonic()
    results: Results = {}
    errors: Errors = {}
    waiting = dict(calls)
    while waiting:
        late = until is not None and time.monotonic() >= until
        for rank in _ended(waiting, until):
            try:
                results[rank] = waiting.pop(rank).result(0.0)
            except Exception as error:
                errors[rank] = error
                if rank.is_lost(error):
                    bound = time.monotonic() + _LOST_S
                    until = bound if until is None else min(until, bound)
        if late:
            break
    for rank in waiting:
        waited = time.monotonic() - begin
        text = f"it has not answered (stage 'answer', after {waited:.2f} s)"
        errors[rank] = WaitTimeoutError(text, stage="answer", waited_s=waited)
    # In the order of the calls: the first error is the one that a turn raises.
    return {rank: results[rank] for rank in calls if rank in results}, {
        rank: errors[rank] for rank in calls if rank in errors
    }


def _ended(calls: Calls, until: float | None) -> list[Rank]:
    """Waits until a call has ended, at most until the bound. Returns the ranks whose calls have ended."""
    kinds: dict[type[Call], list[Call]] = {}
    for call in calls.values():
        kinds.setdefault(type(call), []).append(call)
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        timeout = left if len(kinds) == 1 else _SLICE_S if left is None else min(left, _SLICE_S)
        found = {id(each) for kind, its in kinds.items() for each in kind.ended(its, timeout)}
        if found or (until is not None and time.monotonic() >= until):
            return [rank for rank, call in calls.items() if id(call) in found]


def barrier(ranks: Iterable[Rank], to: Callable[[Rank], Call], until: float | None = None) -> tuple[Results, Errors]:
    calls, refused = submit(ranks, to)
    results, errors = collect(calls, until)
    return results, {**refused, **errors}


def unanswered(errors: Errors) -> set[Rank]:
    """The ranks whose calls still run."""
    return {rank for rank, error in errors.items() if isinstance(error, WaitTimeoutError) and error.stage == "answer"}


class _LocalCall:
    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self._future.result(timeout)
        except FutureTimeoutError:
            if self._future.done():
                raise  # the method's own
            raise NoAnswerError(f"no answer within {timeout} s") from None

    @staticmethod
    def ended(calls: Sequence[_LocalCall], timeout: float | None) -> Collection[_LocalCall]:
        done = wait([each._future for each in calls], timeout, FIRST_COMPLETED).done
        return [each for each in calls if each._future in done]


def check_member(role: str, member: Any) -> None:
    """Raises TypeError unless a value can be a member of a role."""
    if isinstance(member, type):
        raise TypeError(f"{member!r} of the role {role!r} is a class, expected an instance of it")
    for method in ("pause", "resume"):
        if not is_method(getattr(member, method, None)):
            raise TypeError(f"{member!r} of the role {role!r} has no {method}(), expected an actor or object with one")


def is_method(value: object) -> bool:
    """Whether a value can be called, directly or as a method of a Ray actor."""
    return callable(value) or hasattr(value, "remote")


def settled(result: Any) -> Any:
    """The result of a method. If the method returned an awaitable, the result of awaiting it."""
    if isinstance(result, Future):
        return result.result()
    if not inspect.isawaitable(result):
        return result
    if asyncio.isfuture(result) and result.get_loop().is_running():  # of a loop that another thread runs
        return asyncio.run_coroutine_threadsafe(_awaited(result), result.get_loop()).result()
    return asyncio.run(_awaited(result))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
