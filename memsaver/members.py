"""The members of a group, Ray actors or objects of this process, and calls that they answer side by side."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from functools import cached_property, partial
from typing import Any, Protocol

import ray
from ray.actor import ActorClass
from ray.exceptions import GetTimeoutError, RayTaskError

from memsaver.transitions import Transition


class Call(Protocol):
    """A method of a member under way."""

    def result(self, timeout: float | None = None) -> Any:
        """Waits for its end. Raises what the method raised, Ray's error for a dead actor, or TimeoutError."""


class Member:
    """One rank of a role. Its calls run one after the other, unless the actor itself is threaded or async."""

    def __init__(self, role: str, rank: int, actor: Any) -> None:
        """Raises TypeError for a class, and for what has no pause() and resume()."""
        if isinstance(actor, (type, ActorClass)):
            raise TypeError(f"{actor!r} of the role {role!r} is a class, expected a member made of it")
        for method in ("pause", "resume"):
            if not _callable(getattr(actor, method, None)):
                raise TypeError(f"{actor!r} of the role {role!r} has no {method}(), expected a member with one")
        self.role, self.rank, self.actor = role, rank, actor

    def has(self, method: str) -> bool:
        return _callable(getattr(self.actor, method, None))

    def submit(self, method: str, *args: object, **options: object) -> Call:
        """Raises where Ray refuses the call."""
        bound = getattr(self.actor, method)
        if hasattr(bound, "remote"):
            return _RemoteCall(bound.remote(*args, **options))
        return _LocalCall(self._thread.submit(_settled, partial(bound, *args, **options)))

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, thread_name_prefix=f"memsaver {self}")

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


Calls = dict[Member, Call]
Results = dict[Member, Any]
Errors = dict[Member, Exception]


def submit(members: Iterable[Member], to: Callable[[Member], Call]) -> tuple[Calls, Errors]:
    """Has all members do something side by side."""
    calls: Calls = {}
    errors: Errors = {}
    for member in members:
        try:
            calls[member] = to(member)
        except Exception as error:  # whatever it is, the others must hear of it
            errors[member] = error
    return calls, errors


def collect(calls: Calls) -> tuple[Results, Errors]:
    """Waits for the last of them, also where one fails."""
    results: Results = {}
    errors: Errors = {}
    for member, call in calls.items():
        try:
            results[member] = call.result()
        except Exception as error:
            errors[member] = error
    return results, errors


def barrier(members: Iterable[Member], to: Callable[[Member], Call]) -> tuple[Results, Errors]:
    calls, refused = submit(members, to)
    results, errors = collect(calls)
    return results, {**refused, **errors}


class _RemoteCall:
    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def result(self, timeout: float | None = None) -> Any:
        try:
            return ray.get(self._reference, timeout=timeout)
        except GetTimeoutError as error:
            raise TimeoutError(str(error)) from None
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
            raise TimeoutError(f"no answer within {timeout} s") from None


def _callable(method: object) -> bool:
    return callable(method) or hasattr(method, "remote")


def _settled(function: Callable[[], Any]) -> Any:
    """What a method returns; where that is to be awaited, what comes of it."""
    result = function()
    if isinstance(result, Transition):
        return result.wait()
    if isinstance(result, ray.ObjectRef):
        return _RemoteCall(result).result()
    if not inspect.isawaitable(result):
        return result
    if asyncio.isfuture(result) and result.get_loop().is_running():  # of a loop that another thread runs
        return asyncio.run_coroutine_threadsafe(_awaited(result), result.get_loop()).result()
    return asyncio.run(_awaited(result))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
