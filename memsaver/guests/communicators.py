"""The guest of NCCL's communicators: their memory is released while they live, by NCCL 2.29.7 and newer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memsaver._arguments import seconds
from memsaver._guests import Guest
from memsaver.errors import Error
from memsaver.guests import nccl
from memsaver.guests.waits import Call, current_device

log = logging.getLogger("memsaver")


@dataclass(frozen=True)
class _Communicator:
    """Suspends one communicator, or all of a group of torch. ``device``: of CUDA."""

    name: str
    device: int | None
    suspend: Callable[[], None]
    resume: Callable[[], None]
    held_bytes: Callable[[], int]
    exists: Callable[[], bool]


@dataclass(frozen=True)
class _Running:
    """A call of NCCL that has not ended, or whose end has not been noted."""

    communicator: _Communicator
    call: Call[None]
    verb: str  # "suspended" or "resumed"


class Communicators(Guest):
    """Suspends NCCL communicators before a pause and resumes them after it. Their addresses stay the same.

    It needs NCCL 2.29.7 or newer; ``memsaver.guests.for_nccl()`` chooses between this guest and ``ProcessGroups``. By
    default it moves the communicators of all of torch's process groups that have been used. torch 2.12 and newer
    suspend all communicators of a group. With an older torch those that ``send()`` and ``recv()`` made for pairs of
    ranks stay.

    Suspending and resuming is collective: all ranks of a communicator pause and resume the guest's tags. No
    operation may be outstanding. NCCL refuses communicators that share resources with one that they were split from.

    A call of NCCL cannot be interrupted. A call that took too long goes on. The next pause or resume waits for its end
    and takes its result into account, before it calls NCCL. Communicators that were destroyed meanwhile are left out.

    Args:
        tags: As for ``memsaver.Guest``.
        name: As for ``memsaver.Guest``.
        order: As for ``memsaver.Guest``.
        communicators: Returns the communicators that exist, by name, as the addresses of their ``ncclComm_t``, on all
            ranks in the same order. It is called before each call of NCCL. None: those of torch's process groups.
        library: The path of NCCL. None: the one that this process has loaded.
        timeout: Seconds that one communicator may take, and that a pause or a resume waits for an earlier call.

    Raises:
        memsaver.Error: NCCL is not loaded, or cannot suspend.

    Examples:
        >>> try:
        ...     guest = memsaver.guests.Communicators("params", library="libc.so.6")
        ... except memsaver.Error as error:
        ...     print(error)
        libc.so.6 has no ncclGetVersion(), expected a library with NCCL
    """

    def __init__(
        self,
        tags: str | Iterable[str],
        *,
        name: str = "NCCL communicators",
        order: int = 0,
        communicators: Callable[[], Mapping[str, int]] | None = None,
        library: str | None = None,
        timeout: float = 20.0,
    ) -> None:
        super().__init__(name, tags, order=order)
        self.timeout = seconds(timeout)
        found = nccl.loaded() if library is None else nccl.Library(library)
        if found is None:
            raise Error("NCCL is not loaded, expected libnccl in this process")
        if not found.can_suspend:
            raise Error(f"{found.path} has NCCL {_version(found.version)}, expected 2.29.7 or newer")
        self._library = found
        self._communicators = communicators
        self._suspended: list[_Communicator] = []
        self._running: _Running | None = None
        self._seconds: dict[str, list[float]] = {}

    @property
    def suspended(self) -> list[str]:
        """The names of the communicators that are suspended now."""
        return [each.name for each in self._suspended]

    @property
    def seconds_by_group(self) -> dict[str, list[float]]:
        """By name, the seconds of the last suspension and, if it is resumed, of the last resume."""
        return {name: list(each) for name, each in self._seconds.items()}

    @property
    def nbytes(self) -> int:
        """Device memory of the communicators, as far as NCCL counts it."""
        return sum(each.held_bytes() for each in list(self._suspended) or self._found() if each.exists())

    def leave(self) -> None:
        """Suspends the communicators.

        Raises:
            memsaver.Error: NCCL refused. The communicators that were suspended before are resumed.
            TimeoutError: A communicator took longer than ``timeout`` seconds, or an earlier call has not ended. The
                communicators that were suspended before stay suspended until another pause and a resume.
        """
        self._end_earlier_call()
        try:
            for each in self._found():
                if each.name not in self.suspended:  # a resume after a failure has failed as well
                    self._move(each, "suspended")
        except BaseException:
            self._undo()
            raise

    def come_back(self) -> None:
        """Resumes the communicators, beginning with the last one. A repeated call continues.

        Raises:
            memsaver.Error: NCCL failed.
            TimeoutError: A communicator took longer than ``timeout`` seconds, as if one of its ranks has ended, or an
                earlier call has not ended.
        """
        self._end_earlier_call()
        while self._suspended:
            self._move(self._suspended[-1], "resumed")

    def _undo(self) -> None:
        if self._running is not None:  # NCCL's calls do not run beside each other
            log.error("the communicators %s stay suspended until another pause and a resume", self.suspended)
            return
        try:
            self.come_back()
        except Exception as error:
            log.error("the communicators %s stay suspended: %s", self.suspended, error)

    def _end_earlier_call(self) -> None:
        """Waits for a call that took too long. Its error is not one of this transition."""
        running = self._running
        if running is not None:
            if not running.call.wait(self.timeout):
                raise TimeoutError(
                    f"a call of an earlier pause or resume still runs after {running.call.age_s:.0f} s: "
                    f"{running.communicator.name} is to be {running.verb}; expected its end, since NCCL's calls "
                    "cannot be interrupted"
                )
            try:
                self._note(running)
            except Exception as error:
                log.warning("%s was not %s: %s", running.communicator.name, running.verb, error)
        self._suspended = [each for each in self._suspended if each.exists()]

    def _move(self, each: _Communicator, verb: str) -> None:
        if not each.exists():
            self._suspended = [other for other in self._suspended if other is not each]
            return
        call = Call(each.suspend if verb == "suspended" else each.resume, each.device)
        self._running = _Running(each, call, verb)
        if not call.wait(self.timeout):
            raise TimeoutError(f"{each.name} could not be {verb} within {self.timeout:g} s; the call goes on")
        self._note(self._running)

    def _note(self, ended: _Running) -> None:
        """Takes note of a call that has ended. Raises its error."""
        self._running = None
        ended.call.result()
        each = ended.communicator
        if ended.verb == "suspended":
            self._suspended.append(each)
            self._seconds[each.name] = [ended.call.seconds]
        else:
            self._suspended.remove(each)
            self._seconds[each.name].append(ended.call.seconds)

    def _found(self) -> list[_Communicator]:
        if self._communicators is not None:
            return [self._of_caller(name, handle) for name, handle in self._communicators().items()]
        found = []
        seen = {0}  # of a group that has not been used
        for name, group, backend in _torch_groups():
            handle = _handle(backend)
            if handle in seen:
                continue
            if handle is not None:
                seen.add(handle)
            if _torch_suspends(backend):
                found.append(self._of_torch(name, group, backend, handle))
            elif handle is not None:
                exists = lambda group=group, backend=backend, handle=handle: (  # noqa: E731
                    _is_there(group) and _handle(backend) == handle
                )
                found.append(self._by_handle(name, handle, exists))
            else:
                raise Error(f"torch does not return the communicator of process group {name!r}, expected _comm_ptr()")
        return found

    def _of_torch(self, name: str, group: Any, backend: Any, handle: int | None) -> _Communicator:
        return _Communicator(
            name,
            self._device(handle),
            backend.suspend,
            backend.resume,
            lambda: _held_bytes(backend.memory_stats()),
            lambda: _is_there(group),
        )

    def _of_caller(self, name: str, handle: int) -> _Communicator:
        listed = self._communicators
        assert listed is not None
        return self._by_handle(name, handle, lambda: listed().get(name) == handle)

    def _by_handle(self, name: str, handle: int, exists: Callable[[], bool]) -> _Communicator:
        library = self._library
        return _Communicator(
            name,
            self._device(handle),
            lambda: library.suspend(handle),
            lambda: library.resume(handle),
            lambda: library.held_bytes(handle),
            exists,
        )

    def _device(self, handle: int | None) -> int | None:
        """The device of a communicator. The current one, if NCCL does not return it; None before torch uses CUDA."""
        current = current_device()
        if current is None or handle is None:
            return current
        of_communicator = self._library.device(handle)
        return current if of_communicator is None else of_communicator


def _torch_groups() -> list[tuple[str, Any, Any]]:
    """torch's process groups with NCCL, in the order in which they were made: name, group, backend."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    found = []
    for group, name in c10d._world.pg_names.items():
        if "nccl" in str(c10d._world.pg_backend_config[group]).lower():
            found.append((str(name), group, group._get_backend(torch.device("cuda"))))
    return found


def _is_there(group: Any) -> bool:
    """Whether a group of torch has not been destroyed."""
    import torch.distributed.distributed_c10d as c10d

    return group in c10d._world.pg_names


def _handle(backend: Any) -> int | None:
    """The communicator of a backend of torch. 0: it has none yet; None: torch does not return it."""
    return backend._comm_ptr() if hasattr(backend, "_comm_ptr") else None


def _torch_suspends(backend: Any) -> bool:
    """Whether torch suspends by itself: it was built with an NCCL that can."""
    import torch

    return hasattr(backend, "suspend") and tuple(torch.cuda.nccl.version()[:3]) >= (2, 29, 7)


def _held_bytes(stats: Mapping[str, int]) -> int:
    return stats.get("persist", 0) + (0 if stats.get("suspended") else stats.get("suspend", 0))


def _version(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
