"""The errors of memsaver. Every error pickles with its attributes, so that Ray and other processes can pass it on."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from memsaver.process_names import process_name

GIB = 1 << 30
_UNCHANGED = "; nothing has changed"
CHECKED = "memsaver doctor checks this"  # the last line of texts whose cause a check looks for
# Parts of the core's texts that get this line.
_CHECKED = {"BackupError": ("nine tenths of the machine", "RLIMIT_MEMLOCK"), "BrokerError": ("of the protocol and",)}

log = logging.getLogger("memsaver")


class Error(RuntimeError):
    """Base of all errors of memsaver.

    Args:
        text: The message.
        fields: Become attributes.

    Attributes:
        discarded: Tags whose contents a transition discarded, by their policy ``"none"``, before it failed.
        resumed: Tags that a transition resumed before it failed: they are active.
        phase: The phase of a group, or of late regions, that failed. None for other errors.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> kv.close()
        >>> try:
        ...     memsaver.pause(kv)
        ... except memsaver.Error as error:
        ...     print(error)
        region 'kv_cache' was closed
    """

    discarded: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    phase: str | None = None

    def __init__(self, text: str = "", /, **fields: Any) -> None:
        super().__init__(text)
        self.__dict__.update(fields)

    def _name_paused(self, paused: Sequence[str], discarded: Sequence[str]) -> None:
        """Adds the regions that were paused before the failure to the text, and marks those without a backup."""
        if paused:
            rows = [f"{tag!r} (without a backup)" if tag in discarded else repr(tag) for tag in paused]
            text, *lines = str(self).split("\n")
            text = f"{text.removesuffix(_UNCHANGED)}; paused before that: {', '.join(rows)}"
            self.args = ("\n".join([text, *lines]),)
        if discarded:
            self.discarded = tuple(discarded)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self),), self.__dict__


class OutOfMemoryError(Error):
    """The device has not enough memory. Nothing has changed, and the same call can be made again.

    There is one exception: if a switch runs short of memory after its commit, the regions to pause are paused, and the
    message names them. The message has the figures, and a line for each process with memory on the device.

    Attributes:
        stage: ``"memory"``.
        device: The name of the device.
        needed_bytes: Memory that the call needed.
        free_bytes: Free memory by the driver's figure, with the memory that this process could release.
        waited_s: Seconds that the call waited for others to release memory.
        unused: Memory of a shared pool that processes cache and could not return in time, and chunks that this process
            offers and cannot copy: tuples of pid, name, bytes, and a text with the parts and the reasons.
        ledger: The memory in use on the device by process and kind, this process's own outside of regions included:
            one dictionary each, with the fields of ``LedgerRow`` (see ``memsaver.stats()``). Empty if it cannot be
            read.
    """

    stage = "memory"
    device: str
    needed_bytes: int
    free_bytes: int
    waited_s: float
    unused: list[tuple[int, str, int, str]]
    ledger: list[dict[str, Any]]


class RegionPausedError(Error):
    """The region has no memory now.

    Attributes:
        tag: The tag of the region.
        state: The state of the region: ``"pausing"``, ``"paused"``, ``"resuming"`` or ``"lost"``.
    """

    tag: str
    state: str


class DriverError(Error):
    """The driver refused a call.

    Attributes:
        call: The name of the call.
        code: The code of CUDA, an errno, or -1 if there is no CUDA driver.
        message: The driver's text.
    """

    call: str
    code: int
    message: str


class BackupError(Error):
    """Contents cannot be kept or read: host memory or disk space is short, a file call failed, or there is no backup.

    If a pause runs short, nothing has changed.

    Attributes:
        needed_bytes: Memory or disk space that the call needed beyond that which is held.
        held_bytes: Memory or disk space that this process holds for backups.
        available_bytes: Memory or disk space that was available. 0 if a call failed for another reason.
        regions: Tags of the regions whose contents the pause was to keep. Empty for other calls.
    """

    needed_bytes: int
    held_bytes: int
    available_bytes: int
    regions: tuple[str, ...] = ()
    _of_pinned_memory: bool = False

    def _name_regions(self, kept: Mapping[str, str]) -> None:
        """Adds the regions whose contents the transition was to keep, with the remedies for their policies."""
        self.regions = tuple(kept)
        remedies = [_REMEDIES[policy] for policy in ("host", "disk") if policy in kept.values()]
        if remedies == [_REMEDIES["disk"]] and self._of_pinned_memory:  # through which contents pass to a file
            remedies = ["free host memory, raise configure(host_limit=...), or pause with backup='none'"]
        text, *lines = str(self).split("\n")
        figures = f"{gib(self.needed_bytes)} needed, {gib(self.held_bytes)} held, {gib(self.available_bytes)} available"
        names = ", ".join(map(repr, kept))
        text = f"no backup for {names}: {text} ({figures}); {'; '.join(remedies)}{_UNCHANGED}"
        self.args = ("\n".join([text, *lines]),)


_REMEDIES = {
    "host": "free host memory, raise configure(host_limit=...), or pause with backup='disk' or 'none'",
    "disk": "free disk space, choose another configure(disk_dir=...), or pause with backup='none'",
}


class ConfigError(Error, ValueError):
    """An option does not exist, cannot have this value, cannot change any more, or has to be set.

    Attributes:
        option: The name of the option.
        value: The value that was given. None if there is none. A pickled error has the ``repr()`` of a value that does
            not pickle.
    """

    option: str | None = None
    value: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        import pickle  # which takes long to import

        made, arguments, fields = super().__reduce__()
        try:
            pickle.dumps(self.value)
        except Exception:  # of any class: the value is the caller's
            fields = {**fields, "value": repr(self.value)}
        return made, arguments, fields


class BrokerError(Error):
    """The broker of a shared pool cannot be reached, or refuses a request.

    Attributes:
        path: The path of the broker's socket.
    """

    path: str


class WaitTimeoutError(Error, TimeoutError):
    """The bound ``timeout`` of a call ended one of its waits. Nothing has changed, and the call can be made again.

    Attributes:
        stage: The wait that was ended. ``"queue"``: for earlier transitions on the same regions. ``"launches"``: for
            guarded replays under way. ``"device"``: for work queued on the device. ``"backup"``: for host memory that
            is being allocated, or for copies of chunks that an earlier, lazy pause has offered: those that have ended
            remain. ``"guests"``: for guests of another transition. ``"answer"``: for a member of a group.
            ``"late"``: for regions that come late in a phase.
        waited_s: Seconds since the call began.
    """

    stage: str
    waited_s: float


class GuestError(Error):
    """A guest could not leave or come back: see ``memsaver.Guest``. The cause is the guest's own error.

    If it could not leave, nothing has changed. If it could not come back, the regions are active, the guest is away,
    and another resume continues.

    Attributes:
        guest: The name of the guest.
        stage: ``"prepare"``, ``"leave"`` or ``"come back"``.
    """

    guest: str
    stage: str


class AttachedError(Error):
    """Other processes stayed attached to a region that was to be paused. Nothing has changed.

    Attributes:
        stage: ``"readers"``.
        tag: The tag of the region.
        holders: The attached processes: tuples of pid and name.
    """

    stage = "readers"
    tag: str
    holders: list[tuple[int, str]]


class ReceiveError(Error):
    """A tensor that another process sent through torch.multiprocessing cannot be received. Nothing has changed.

    Attributes:
        reason: ``"exited"``: the sender has exited, or cannot be reached. ``"timeout"``: it did not answer within
            10 s. ``"stale"``: its region was paused and resumed after the send.
            ``"unknown"``: its memory was freed, or the token is wrong. ``"device"``: this process does not see the
            device. ``"user"``, ``"pid_namespace"``, ``"version"``: sender and receiver belong to several users, pid
            namespaces or versions of the protocol. ``"malformed"``: the sender could not read a message.
            ``"exhausted"``: the sender could not watch this process, or this process has no free descriptor.
        pid: The process that sent the tensor. None in the sender itself.
    """

    reason: str
    pid: int | None = None


class RebuildError(Error):
    """``Derived.rebuild`` has raised an error, its cause. The regions of the resume are paused with their contents.

    Attributes:
        tag: The tag of the region.
    """

    tag: str


class VerifyError(Error):
    """Contents have changed between a pause and a resume. Only ``configure(verify=True)`` looks for this.

    The region is active, and its contents cannot be used.

    Attributes:
        tag: The tag of the region.
        segment: The address of the segment with the first difference.
        offset: The offset of the difference within the segment, in bytes, rounded down to 8 KiB.
        parts: The allocations with differences: tuples of address and bytes. Neighbours may be joined.

    Examples:
        >>> memsaver.configure(verify=True)
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> with weights:
        ...     tensor = torch.ones(4)
        >>> _ = weights.pause()
        >>> try:
        ...     done = weights.resume()
        ... except memsaver.VerifyError as error:
        ...     print(error.tag, error.offset)
        >>> memsaver.configure(verify=False)
    """

    tag: str
    segment: int
    offset: int
    parts: list[tuple[int, int]]


class SameError(Error):
    """Processes whose regions have one ``same_as`` have different contents. Nothing has changed.

    Contents are compared in blocks of 8 MiB: the kept allocations of a region, end to end, by address.

    Attributes:
        block: The number of the first block that differs.
        processes: The processes that differ from most of the others: tuples of pid, name, and torch's rank or None.
            All of them if no contents are those of most.
    """

    block: int
    processes: list[tuple[int, str, int | None]]


class StaleError(Error):
    """Tensors were not written since a resume without contents: see ``memsaver.check_written()``.

    Attributes:
        tensors: Their names, their bytes, and the bytes of them that were not written.
    """

    tensors: list[tuple[str, int, int]]


def gib(nbytes: int) -> str:
    """Bytes with a unit: ``"1.50 GiB"``, or MiB below one GiB."""
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / (1 << 20):.1f} MiB"


def is_utf8(path: str) -> bool:
    """Whether the core, whose texts are UTF-8, can open a path. Python reads other bytes of paths as surrogates."""
    return path.encode(errors="replace").decode() == path


def checked(text: str) -> str:
    """The text of an error whose cause a check of ``memsaver doctor`` looks for."""
    return f"{text}\n{CHECKED}"


def make(kind: str, message: str, fields: dict[str, Any]) -> Exception:
    """Builds an exception for the core (see ``translate`` in csrc/bindings/module.cpp)."""
    if kind == "ValueError":
        return ValueError(message)
    if kind == "DriverError":
        fields["message"] = fields.pop("detail")
        if fields["call"] == "dlopen":
            remedy = "use device='cpu', the host driver, or install NVIDIA's driver"
            message = f"there is no CUDA driver ({message}): {remedy}"
    if kind == "OutOfMemoryError":
        fields["unused"] = [(pid, process_name(pid), nbytes, why) for pid, nbytes, why in fields["unused"]]
        fields["ledger"], lines = _ledger(fields["device"])
        message = "\n  ".join([_out_of_memory(fields), *lines])
    if kind == "AttachedError":
        fields["holders"] = [(pid, process_name(pid)) for pid in fields["holders"]]
        names = ", ".join(f"{name} (pid {pid})" for pid, name in fields["holders"])
        message += f": {names} (stage 'readers'){_UNCHANGED}"
    if kind == "SameError":
        found = [(pid, process_name(pid), rank if rank >= 0 else None) for pid, rank in fields["processes"]]
        who = ", ".join(f"{name} (pid {pid}{'' if rank is None else f', rank {rank}'})" for pid, name, rank in found)
        rest = "differ from the others" if fields.pop("_others_agree") else "differ, and no contents are those of most"
        fields["processes"], message = found, f"{message}: {who} {rest}{_UNCHANGED}"
    if kind == "WaitTimeoutError":
        message += f" (stage {fields['stage']!r}, after {fields['waited_s']:.2f} s){_UNCHANGED}"
    if any(part in message for part in _CHECKED.get(kind, ())):
        message = checked(message)
    return _KINDS[kind](message, **fields)


def _out_of_memory(fields: dict[str, Any]) -> str:
    needed, free, waited_s = (fields[name] for name in ("needed_bytes", "free_bytes", "waited_s"))
    waited = f" after waiting {waited_s:.2f} s" if waited_s else ""
    kept = [f"{name} (pid {pid}) {why}" for pid, name, _, why in fields["unused"]]
    idle = f"; unused and not returned: {'; '.join(kept)}" if kept else ""
    return (
        f"out of memory on {fields['device']} (stage 'memory'): {gib(needed)} ({needed} bytes) needed, "
        f"{gib(free)} ({free} bytes) free{waited}{idle}{_UNCHANGED}"
    )


def _ledger(device: str) -> tuple[list[dict[str, Any]], list[str]]:
    try:
        rows, lines = import_module("memsaver.ledger").for_error(device)
        others = any(row["pid"] not in (None, os.getpid()) for row in rows)
        return rows, [*lines, CHECKED] if others else lines
    except Exception as error:  # it must not hide the error that it belongs to
        log.debug("no ledger of %s: %r", device, error)
        return [], []


def add_ledger(error: BaseException, device: str) -> None:
    """Adds the ledger of a device to torch's error, as a note. Nested regions add it once."""
    if not getattr(error, "_has_ledger", False):
        error._has_ledger = True  # type: ignore[attr-defined]
        for line in _ledger(device)[1]:
            error.add_note(line)


_ALL: list[type[Error]] = [Error, *Error.__subclasses__()]
_KINDS = {kind.__name__: kind for kind in _ALL}
