"""What a transition did, or, in the background, will have done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # another class before Python 3.11
from dataclasses import astuple, dataclass
from typing import Any

from memsaver.errors import Error

Progress = Callable[[int, int], object]  # bytes copied, bytes to copy


@dataclass(frozen=True)
class Outcome:
    """Fields as in :class:`Transition`."""

    paused: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    released_bytes: int = 0
    restored_bytes: int = 0
    copied_bytes: int = 0
    seconds: float = 0.0


class Transition:
    """What a pause, a resume or a switch did; with ``wait=False``, what it is doing.

    ``paused`` and ``resumed`` are tags, of the regions that changed. ``released_bytes`` and ``restored_bytes`` are
    device memory handed back and mapped, ``copied_bytes`` is contents moved in either direction, ``seconds`` includes
    waiting for the device and for memory. They can be read once the transition is done; one that failed raises its
    error there, and in :meth:`wait`. ``await transition`` waits without holding up the event loop.
    """

    def __init__(
        self,
        paused: tuple[str, ...] = (),
        resumed: tuple[str, ...] = (),
        released_bytes: int = 0,
        restored_bytes: int = 0,
        copied_bytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        self._future: Future[Outcome] = Future()
        self._future.set_result(Outcome(paused, resumed, released_bytes, restored_bytes, copied_bytes, seconds))

    @classmethod
    def under_way(cls, future: Future[Outcome]) -> Transition:
        """One whose outcome, or error, is yet to come."""
        transition = cls.__new__(cls)
        transition._future = future
        return transition

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> Transition:
        """Waits until it has ended, at most ``timeout`` seconds, and returns itself.

        Raises what the transition raised, and TimeoutError; that ends the waiting, and nothing else.
        """
        try:
            self._future.result(timeout)
        except FutureTimeoutError:
            if not self._future.done():
                raise TimeoutError(f"the transition is still under way after {timeout} s") from None
            raise
        return self

    def __await__(self) -> Generator[Any, None, Transition]:
        yield from asyncio.wrap_future(self._future).__await__()
        return self

    @property
    def paused(self) -> tuple[str, ...]:
        return self._outcome.paused

    @property
    def resumed(self) -> tuple[str, ...]:
        return self._outcome.resumed

    @property
    def released_bytes(self) -> int:
        return self._outcome.released_bytes

    @property
    def restored_bytes(self) -> int:
        return self._outcome.restored_bytes

    @property
    def copied_bytes(self) -> int:
        return self._outcome.copied_bytes

    @property
    def seconds(self) -> float:
        return self._outcome.seconds

    @property
    def _outcome(self) -> Outcome:
        if not self._future.done():
            raise Error("the transition is still under way: wait() for it first")
        return self._future.result()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transition):
            return NotImplemented
        if self is other:
            return True
        ended_well = all(each.done and each._future.exception() is None for each in (self, other))
        return ended_well and self._outcome == other._outcome

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        if not self._future.done():
            return "<memsaver.Transition under way>"
        error = self._future.exception()
        if error is not None:
            return f"<memsaver.Transition failed: {error}>"
        return repr(self._outcome).replace("Outcome", "Transition")

    def __reduce__(self) -> tuple[Any, ...]:
        return Transition, astuple(self._outcome)
