"""The ranks of a group, and concurrent calls to them."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from functools import cached_property
from typing import Any, Protocol

from memsaver.errors import WaitTimeoutError


class NoAnswerError(TimeoutError):
    """A call is still under way. The methods of ranks do not raise this error."""


class Call(Protocol):
    """A call of a rank's method under way."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end. Raises the method's error, Ray's error for a dead actor, or NoAnswerError."""


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

    def described(self, error: Exception) -> str:
        """The class of an error of this rank, and its text."""
        return f"{type(error).__name__}: {str(error).strip()}"

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


class LocalRank(Rank):
    """An object of this process. Its calls run one after the other in a thread of its own."""

    def __init__(self, role: str, index: int, member: Any) -> None:
        """Raises TypeError for a class, and for an object without pause() and resume()."""
        super().__init__(role, index)
        check_member(role, member)
        self.member = member

    def has(self, method: str) -> bool:
        return is_method(getattr(self.member, method, None))

    def submit(self, method: str, *args: object, **options: object) -> Call:
        bound = getattr(self.member, method)
        return _LocalCall(self._thread.submit(lambda: self._settled(bound(*args, **options))))

    def _settled(self, result: Any) -> Any:
        return settled(result)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix=f"memsaver {self}")


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
    of the stage "answer". None: no bound.
    """
    begin = time.monotonic()
    results: Results = {}
    errors: Errors = {}
    for rank, call in calls.items():
        try:
            results[rank] = call.result(None if until is None else max(0.0, until - time.monotonic()))
        except NoAnswerError:
            waited = time.monotonic() - begin
            text = f"it has not answered (stage 'answer', after {waited:.2f} s)"
            errors[rank] = WaitTimeoutError(text, stage="answer", waited_s=waited)
        except Exception as error:
            errors[rank] = error
    return results, errors


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
    """What a method returned. If it returned an awaitable, the result of awaiting it."""
    if isinstance(result, Future):
        return result.result()
    if not inspect.isawaitable(result):
        return result
    if asyncio.isfuture(result) and result.get_loop().is_running():  # of a loop that another thread runs
        return asyncio.run_coroutine_threadsafe(_awaited(result), result.get_loop()).result()
    return asyncio.run(_awaited(result))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
