"""The ranks of a group (Ray actors, or objects of this process), and concurrent calls to them."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from functools import cached_property, partial
from typing import Any, Protocol

import ray
from ray.actor import ActorClass
from ray.exceptions import GetTimeoutError, RayTaskError

from memsaver.errors import WaitTimeoutError


class NoAnswerError(TimeoutError):
    """A call is still under way. The methods of ranks do not raise this error."""


class Call(Protocol):
    """A call of a rank's method under way."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the end. Raises the method's error, Ray's error for a dead actor, or NoAnswerError."""


class Rank:
    """An actor or object with a role and an index in it.

    Its calls run one after the other, unless the actor itself is threaded or async.
    """

    def __init__(self, role: str, index: int, actor: Any) -> None:
        """Raises TypeError for a class, and for an object without pause() and resume()."""
        if isinstance(actor, (type, ActorClass)):
            raise TypeError(f"{actor!r} of the role {role!r} is a class, expected an instance of it")
        for method in ("pause", "resume"):
            if not _callable(getattr(actor, method, None)):
                raise TypeError(
                    f"{actor!r} of the role {role!r} has no {method}(), expected an actor or object with one"
                )
        self.role, self.index, self.actor = role, index, actor

    def has(self, method: str) -> bool:
        return _callable(getattr(self.actor, method, None))

    def submit(self, method: str, *args: object, **options: object) -> Call:
        """Starts a call. Raises if Ray refuses it."""
        bound = getattr(self.actor, method)
        if hasattr(bound, "remote"):
            return _RemoteCall(bound.remote(*args, **options))
        return _LocalCall(self._thread.submit(_settled, partial(bound, *args, **options)))

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix=f"memsaver {self}")

    def __str__(self) -> str:
        return f"{self.role} {self.index}"


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


class _RemoteCall:
    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def result(self, timeout: float | None = None) -> Any:
        try:
            return ray.get(self._reference, timeout=timeout)
        except GetTimeoutError as error:
            raise NoAnswerError(str(error)) from None
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None


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


def _callable(method: object) -> bool:
    return callable(method) or hasattr(method, "remote")


def _settled(function: Callable[[], Any]) -> Any:
    """The result of a method. If the result is awaitable, the result of awaiting it."""
    result = function()
    if isinstance(result, Future):
        return result.result()
    if isinstance(result, ray.ObjectRef):
        return _RemoteCall(result).result()
    if not inspect.isawaitable(result):
        return result
    if asyncio.isfuture(result) and result.get_loop().is_running():  # of a loop that another thread runs
        return asyncio.run_coroutine_threadsafe(_awaited(result), result.get_loop()).result()
    return asyncio.run(_awaited(result))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
