"""A torch ProcessGroup whose connections can be closed and opened again behind the same object."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup, Work

from memsaver.errors import Error

# Names that this class answers itself, or that describe the object and not its connections.
_OWN = {
    "abort", "bound_device_id", "boxed", "group_desc", "group_name", "merge_remote_group", "name", "rank", "shutdown",
    "size", "split_group", "unbox", "_set_group_desc", "_set_group_name",
}  # fmt: skip


class ReopeningGroup(ProcessGroup):
    """A group over another one, its connections. torch, meshes and tensors hold this object.

    torch's Python calls and its functional collectives reach the connections through the methods of this class.
    """

    def __init__(self, connections: ProcessGroup, name: str, description: str) -> None:
        super().__init__(connections.rank(), connections.size())  # type: ignore[call-arg]  # torch's stub lacks it
        self._connections: ProcessGroup | None = connections
        self._name, self._description = name, description
        self._backend_name = str(connections.name())
        # Objects with references, by id. pending() reads them by valuerefs(), which no other thread can interrupt:
        # collectives of other threads add objects.
        self._works: weakref.WeakValueDictionary[int, Work] = weakref.WeakValueDictionary()

    @property
    def connections(self) -> ProcessGroup:
        """The open connections. Raises memsaver.Error while they are closed."""
        if self._connections is None:
            raise Error(
                f"process group {self._name!r} is closed, expected a resume of the tags of its guest before this call"
            )
        return self._connections

    @connections.setter
    def connections(self, connections: ProcessGroup | None) -> None:
        self._connections = connections

    @property
    def is_open(self) -> bool:
        return self._connections is not None

    def pending(self) -> bool:
        """Whether a collective has not ended whose Work object exists."""
        works = [found() for found in self._works.valuerefs()]
        return any(work is not None and not work.is_completed() for work in works)

    # Properties that torch also reads while the connections are closed.

    @property
    def group_name(self) -> Any:  # another type in each version of torch
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    @property  # type: ignore[misc]  # torch's can be written
    def bound_device_id(self) -> None:
        """Hidden from torch, which would split communicators of other groups from this one's: they could not be
        opened again without it.
        """
        return

    def getGroupName(self) -> str:  # noqa: N802  # C++ calls this name
        return self._name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._description

    def getBackendName(self) -> str:  # noqa: N802
        return self._backend_name

    def name(self) -> str:
        return self._backend_name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def shutdown(self) -> None:
        if self._connections is not None:
            self._connections.shutdown()

    def abort(self) -> None:
        if self._connections is not None:
            self._connections.abort()


def _forwarding(name: str) -> Callable[..., Any]:
    def forward(self: ReopeningGroup, *args: Any, **options: Any) -> Any:
        result = getattr(self.connections, name)(*args, **options)
        if isinstance(result, Work):
            self._works[id(result)] = result
        return result

    forward.__name__ = name
    return forward


def _forwarded_property(name: str) -> property:
    def read(self: ReopeningGroup) -> Any:
        return getattr(self.connections, name)

    def write(self: ReopeningGroup, value: Any) -> None:
        setattr(self.connections, name, value)

    return property(read, write)


# Everything else that a group of this version of torch can do is done by the connections.
for _name in dir(ProcessGroup):
    _value = getattr(ProcessGroup, _name)
    if _name in _OWN or _name.startswith(("__", "_pybind11")) or isinstance(_value, type):
        continue
    if callable(_value):
        setattr(ReopeningGroup, _name, _forwarding(_name))
    elif isinstance(_value, property):
        setattr(ReopeningGroup, _name, _forwarded_property(_name))
