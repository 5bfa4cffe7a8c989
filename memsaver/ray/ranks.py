"""The ranks of a group: Ray actors, or objects of this process."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

from ray.actor import ActorClass, ActorHandle
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from memsaver.turns.calls import Caller, LocalRank
from memsaver.turns.plan import TurnOptions
from memsaver.turns.ranks import Call, Rank, Tags

_RESTART_S = 60.0  # the calls of a rank may be refused for this long while it restarts
_POLL_S = 0.05


class ActorRank(LocalRank):
    """An actor, or an object of this process.

    The calls of an actor run one after the other, unless the actor itself is threaded or async.
    """

    def __init__(self, role: str, index: int, actor: Any) -> None:
        """Raises TypeError for a class, and for an object without the methods of Colocated."""
        if isinstance(actor, ActorClass):
            raise TypeError(f"{actor!r} of the role {role!r} is a class, expected an instance of it")
        super().__init__(role, index, actor)
        self.is_actor = isinstance(actor, ActorHandle)
        self.is_new = True

    def submit(self, call: Call) -> Future[Any]:
        if not self.is_actor:
            return super().submit(call)
        future: Future[Any] = getattr(self.member, call.method).remote(*call.args, **call.options).future()
        return future

    def failure(self, error: Exception) -> Exception:
        cause = getattr(error, "cause", None) if isinstance(error, RayTaskError) else None
        return cause if isinstance(cause, Exception) else error

    def is_lost(self, error: Exception) -> bool:
        # The calls of an actor that Ray's memory monitor has killed for good raise the second one, no RayActorError.
        return isinstance(error, (RayActorError, OutOfMemoryError))

    def described(self, error: Exception) -> str:
        """Of Ray's own errors, which have many lines, the first line."""
        if not isinstance(error, RayError):
            return super().described(error)
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        remedy = f"; unless Ray restarts it: group.replace({self.role!r}, {self.index}, actor)"
        return text + remedy if self.is_lost(error) else text


class ActorCaller(Caller):
    """The caller of all actors. A turn begins when new and restarted actors have started, or at its bound."""

    def begin(self, turn: int, phase: str, options: TurnOptions, unwritten: Tags) -> tuple[Tags, set[Rank]]:
        _, died = super().begin(turn, phase, options, unwritten)
        deadline = time.monotonic() + _RESTART_S
        deadline = deadline if options.until is None else min(deadline, options.until)
        starting = [rank for rank in self.ranks if rank.is_actor and (rank.is_new or rank in died)]
        while starting and time.monotonic() < deadline:
            calls = {rank: Call("__ray_ready__") for rank in starting}
            errors = self._collect(*self._start(calls), options.until).errors  # calls of the turn report them
            # While an actor restarts, Ray may refuse its calls. During its __init__ they wait.
            starting = [rank for rank in starting if isinstance(errors.get(rank), ActorUnavailableError)]
            time.sleep(_POLL_S if starting else 0.0)
        for rank in self.ranks:
            rank.is_new = False
        return unwritten, died
