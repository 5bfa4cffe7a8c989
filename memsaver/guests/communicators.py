"""The guest of NCCL's communicators: their memory is released while they live, by NCCL 2.29.7 and newer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from memsaver._arguments import seconds
from memsaver._guests import Guest
from memsaver.errors import Error
from memsaver.guests import nccl
from memsaver.guests.waits import within


@dataclass(frozen=True)
class _Communicator:
    """What suspends one communicator, or all of a group of torch."""

    name: str
    suspend: Callable[[], None]
    resume: Callable[[], None]
    held_bytes: Callable[[], int]


class Communicators(Guest):
    """Suspends NCCL communicators before a pause and resumes them after it. Their addresses stay the same.

    It needs NCCL 2.29.7 or newer; ``memsaver.guests.for_nccl()`` chooses between this guest and ``ProcessGroups``. By
    default it moves the communicators of all of torch's process groups that have been used. torch 2.12 and newer
    suspend all communicators of a group. With an older torch those that ``send()`` and ``recv()`` made for pairs of
    ranks stay.

    Suspending and resuming is collective: all ranks of a communicator pause and resume the guest's tags. No
    operation may be outstanding. NCCL refuses communicators that share resources with one that they were split from.

    Args:
        tags: As for ``memsaver.Guest``.
        name: As for ``memsaver.Guest``.
        order: As for ``memsaver.Guest``.
        communicators: Returns the communicators by name, as the addresses of their ``ncclComm_t``. It is called in each
            pause, on all ranks in the same order. None: those of torch's process groups.
        library: The path of NCCL. None: the one that this process has loaded.
        timeout: Seconds that one communicator may take.

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
        timeout: float = 60.0,
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
        return sum(each.held_bytes() for each in self._suspended or self._found())

    def leave(self) -> None:
        """Suspends the communicators.

        Raises:
            memsaver.Error: NCCL refused. The communicators that were suspended before are resumed.
            TimeoutError: A communicator took longer than ``timeout`` seconds.
        """
        try:
            for each in self._found():
                if each.name in self.suspended:  # a resume after a failure has failed as well
                    continue
                since = time.monotonic()
                within(each.suspend, self.timeout, f"{each.name} could not be suspended")
                self._suspended.append(each)
                self._seconds[each.name] = [time.monotonic() - since]
        except BaseException:
            self.come_back()
            raise

    def come_back(self) -> None:
        """Resumes the communicators, beginning with the last one. A repeated call continues.

        Raises:
            memsaver.Error: NCCL failed.
            TimeoutError: A communicator took longer than ``timeout`` seconds, as if one of its ranks has ended.
        """
        while self._suspended:
            each = self._suspended[-1]
            since = time.monotonic()
            within(each.resume, self.timeout, f"{each.name} could not be resumed")
            self._suspended.pop()
            self._seconds[each.name].append(time.monotonic() - since)

    def _found(self) -> list[_Communicator]:
        if self._communicators is not None:
            return [self._by_handle(name, handle) for name, handle in self._communicators().items()]
        found = []
        seen = {0}  # of a group that has not been used
        for name, backend in _torch_backends().items():
            handle = backend._comm_ptr() if hasattr(backend, "_comm_ptr") else None
            if handle in seen:
                continue
            if handle is not None:
                seen.add(handle)
            if _torch_suspends(backend):
                held = lambda backend=backend: _held_bytes(backend.memory_stats())  # noqa: E731
                found.append(_Communicator(name, backend.suspend, backend.resume, held))
            elif handle is not None:
                found.append(self._by_handle(name, handle))
            else:
                raise Error(f"torch does not return the communicator of process group {name!r}, expected _comm_ptr()")
        return found

    def _by_handle(self, name: str, handle: int) -> _Communicator:
        library = self._library
        return _Communicator(
            name,
            lambda: library.suspend(handle),
            lambda: library.resume(handle),
            lambda: library.held_bytes(handle),
        )


def _torch_backends() -> dict[str, Any]:
    """The NCCL backends of torch's process groups by the group's name, in the order in which they were made."""
    import torch
    import torch.distributed.distributed_c10d as c10d

    found = {}
    for group, name in c10d._world.pg_names.items():
        if "nccl" in str(c10d._world.pg_backend_config[group]).lower():
            found[str(name)] = group._get_backend(torch.device("cuda"))
    return found


def _torch_suspends(backend: Any) -> bool:
    """Whether torch suspends by itself: it was built with an NCCL that can."""
    import torch

    return hasattr(backend, "suspend") and tuple(torch.cuda.nccl.version()[:3]) >= (2, 29, 7)


def _held_bytes(stats: Mapping[str, int]) -> int:
    return stats.get("persist", 0) + (0 if stats.get("suspended") else stats.get("suspend", 0))


def _version(code: int) -> str:
    return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
