"""The ranks of a group: Ray actors, or objects of this process."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.actor import ActorClass
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)

from memsaver.turns.ranks import Call, LocalRank, NoAnswerError


class ActorRank(LocalRank):
    """An actor, or an object of this process.

    The calls of an actor run one after the other, unless the actor itself is threaded or async.
    """

    def __init__(self, role: str, index: int, actor: Any) -> None:
        """Raises TypeError for a class, and for an object without pause() and resume()."""
        if isinstance(actor, ActorClass):
            raise TypeError(f"{actor!r} of the role {role!r} is a class, expected an instance of it")
        super().__init__(role, index, actor)

    def submit(self, method: str, *args: object, **options: object) -> Call:
        bound = getattr(self.member, method)
        if hasattr(bound, "remote"):
            return _RemoteCall(bound.remote(*args, **options))
        return super().submit(method, *args, **options)

    def _settled(self, result: Any) -> Any:
        return _RemoteCall(result).result() if isinstance(result, ray.ObjectRef) else super()._settled(result)

    @property
    def reports_start(self) -> bool:
        return self.has("__ray_ready__")

    def start(self) -> Call:
        return self.submit("__ray_ready__")

    def is_starting(self, error: Exception) -> bool:
        """While an actor restarts, Ray may refuse its calls. During its __init__ they wait."""
        return isinstance(error, ActorUnavailableError)

    def is_lost(self, error: Exception) -> bool:
        # The calls of an actor that Ray's memory monitor has killed for good raise the second one, no RayActorError.
        return isinstance(error, (RayActorError, OutOfMemoryError))

    def replacement(self, error: Exception) -> str | None:
        return f"group.replace({self.role!r}, {self.index}, actor)" if self.is_lost(error) else None

    def described(self, error: Exception) -> str:
        """Of Ray's own errors, which have many lines, the first line."""
        text = str(error).strip()
        return f"{type(error).__name__}: {text.splitlines()[0] if isinstance(error, RayError) and text else text}"


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

    @staticmethod
    def ended(calls: Sequence[_RemoteCall], timeout: float | None) -> Collection[_RemoteCall]:
        by_reference = {each._reference: each for each in calls}
        references = list(by_reference)
        ray.wait(references, num_returns=1, timeout=timeout)
        done, _ = ray.wait(references, num_returns=len(references), timeout=0)
        return [by_reference[reference] for reference in done]
