"""What memsaver raises. Every error pickles, so that it crosses process and Ray boundaries whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psutil

GIB = 1 << 30


class Error(RuntimeError):
    """Base of all errors of memsaver. Keyword arguments become attributes.

    Attribute ``discarded``: tags whose contents a transition gave up, by their policy "none", before it failed.
    """

    discarded: tuple[str, ...] = ()

    def __init__(self, text: str = "", /, **fields: Any) -> None:
        super().__init__(text)
        self.__dict__.update(fields)

    def name_discarded(self, tags: Sequence[str]) -> None:
        """Says which regions went out without a backup before the failure: the one thing that a retry cannot undo."""
        if tags:
            self.discarded = tuple(tags)
            self.args = (f"{self}; paused before that, without a backup: {', '.join(map(repr, tags))}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), str(self), self.__dict__)


class OutOfMemoryError(Error):
    """The device has not enough memory. Nothing has changed, and the same call can be made again.

    Attributes: ``device`` (str), ``needed_bytes``, ``free_bytes`` (by the driver's figure, with what this process could
    give), ``waited_s`` (seconds, for others to give some back; 0: the call was not to wait), ``regions`` (dicts as in
    :func:`memsaver.stats`, what this process holds on the device), ``processes`` (tuples of pid, name and bytes: the
    other processes on the device, as far as the system tells).
    """

    device: str
    needed_bytes: int
    free_bytes: int
    waited_s: float
    regions: list[dict[str, Any]]
    processes: list[tuple[int, str, int]]


class RegionPausedError(Error):
    """A region was used that has no memory now. Attributes: ``tag``, ``state``."""

    tag: str
    state: str


class DriverError(Error):
    """The driver refused a call. Attributes: ``call``, ``code`` (CUDA's, or an errno), ``message``."""

    call: str
    code: int
    message: str


class BackupError(Error):
    """Contents cannot be kept, or not be read: host memory or disk is short, a file call fails, there is no backup.

    Where a pause runs short, nothing has changed. Attributes: ``needed_bytes`` (asked for beyond what is held),
    ``held_bytes`` (by this process for backups), ``available_bytes`` (that could be had; 0 where
    a call failed for another reason).
    """

    needed_bytes: int
    held_bytes: int
    available_bytes: int


class ConfigError(Error, ValueError):
    """An option that does not exist, cannot have this value, cannot change any more, or is needed.

    Attributes: ``option``, ``value`` (None where none was given).
    """

    option: str | None = None
    value: Any = None


class BrokerError(Error):
    """The broker of a shared pool cannot be reached, or refuses. Attribute: ``path`` (of its socket)."""

    path: str


class AttachedError(Error):
    """A region was to be paused while other processes stayed attached to it. Nothing has changed.

    Attributes: ``tag``, ``holders`` (tuples of pid and name).
    """

    tag: str
    holders: list[tuple[int, str]]


def _rebuild(kind: type[Error], message: str, fields: dict[str, Any]) -> Error:
    error = kind(message)
    error.__dict__.update(fields)
    return error


def gib(nbytes: int) -> str:
    """Bytes for people to read: ``"1.50 GiB"``, or MiB below one GiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.1f} MiB"


def process_name(pid: int) -> str:
    """The name of a process, or ``"?"`` where the system does not tell."""
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return "?"


def make(kind: str, message: str, fields: dict[str, Any]) -> Exception:
    """Builds the exception that the core asks for (see ``translate`` in csrc/error_bindings.cpp)."""
    if kind == "ValueError":
        return ValueError(message)
    if kind == "DriverError":
        fields["message"] = fields.pop("detail")
    if kind == "OutOfMemoryError":
        fields["processes"] = [(pid, process_name(pid), nbytes) for pid, nbytes in fields["processes"]]
        message = _out_of_memory(**fields)
    if kind == "AttachedError":
        fields["holders"] = [(pid, process_name(pid)) for pid in fields["holders"]]
        message += f": {', '.join(f'{name} (pid {pid})' for pid, name in fields['holders'])}"
    return _KINDS[kind](message, **fields)


def _out_of_memory(
    device: str,
    needed_bytes: int,
    free_bytes: int,
    waited_s: float,
    regions: list[dict[str, Any]],
    processes: list[tuple[int, str, int]],
) -> str:
    held = [f"{row['tag']} ({row['state']}) {gib(row['mapped_bytes'])}" for row in regions if row["mapped_bytes"]]
    waited = f" after waiting {waited_s:.2f} s" if waited_s else ""
    others = [f"{name} (pid {pid}) {gib(nbytes) if nbytes else 'an unknown amount'}" for pid, name, nbytes in processes]
    return (
        f"out of memory on {device}: {gib(needed_bytes)} ({needed_bytes} bytes) needed, "
        f"{gib(free_bytes)} ({free_bytes} bytes) free{waited}; "
        f"held by regions of this process: {', '.join(held) or 'nothing'}; "
        f"other processes on the device: {', '.join(others) or 'none seen'}"
    )


_KINDS: dict[str, type[Error]] = {
    kind.__name__: kind
    for kind in (
        Error,
        OutOfMemoryError,
        RegionPausedError,
        DriverError,
        BackupError,
        ConfigError,
        BrokerError,
        AttachedError,
    )
}
