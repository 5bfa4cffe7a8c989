"""Figures of this process and its devices: memory that is mapped, backed up, and free."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from typing import Any

from memsaver import _core, _guests, config, ledger
from memsaver._results import TransitionRecord as TransitionRecord
from memsaver._results import TransitionStage as TransitionStage
from memsaver.errors import BrokerError, gib
from memsaver.ledger import Ledger
from memsaver.ledger import LedgerRow as LedgerRow
from memsaver.process_names import process_name


@dataclass(frozen=True)
class RegionStats:
    """A region. The fields are those of ``memsaver.Region``.

    Attributes:
        tag: Its tag.
        backup: Its policy: ``"none"``, ``"host"`` or ``"disk"``.
        state: ``"active"``, ``"pausing"``, ``"paused"``, ``"resuming"`` or ``"lost"``.
        frozen: Whether its contents do not change after the first pause.
        allocated_bytes: Bytes of the segments in use.
        mapped_bytes: Bytes of device memory that it holds now.
        offered_bytes: Bytes of device memory that a lazy pause has left to whoever needs it.
        backup_bytes: Bytes of contents in host memory or on disk now.
        paused_s: Seconds since its pause. 0 if it is not paused.
    """

    tag: str
    backup: str
    state: str
    frozen: bool
    allocated_bytes: int
    mapped_bytes: int
    offered_bytes: int
    backup_bytes: int
    paused_s: float


@dataclass(frozen=True)
class HolderStats:
    """Another process that holds memory of a shared pool for which this process waits.

    Attributes:
        pid: The process.
        name: Its name, or ``"?"`` if the system does not return it.
        nbytes: Bytes that it holds.
        unused_bytes: The part that no tensor uses and that it could not return. None if it has not told.
        why: The parts of ``unused_bytes``, and the reasons. Empty if ``unused_bytes`` is None or 0.
    """

    pid: int
    name: str
    nbytes: int
    unused_bytes: int | None
    why: str


@dataclass(frozen=True)
class PoolStats:
    """The shared pool of a device.

    Attributes:
        available_bytes: Bytes that this process could still get. None while the broker cannot be reached.
        waiting_bytes: Bytes for which calls of this process wait at the broker now.
        holds_up: The other processes that hold the memory, as far as the broker has told. Empty if nothing waits.
    """

    available_bytes: int | None
    waiting_bytes: int
    holds_up: list[HolderStats]


@dataclass(frozen=True)
class DeviceStats:
    """A device in use. Figures are in bytes.

    Attributes:
        uuid: The driver's name of the device. None if a call of the driver fails.
        total_bytes: Memory of the whole device. None if a call of the driver fails.
        free_bytes: Free memory of the whole device. None if a call of the driver fails.
        retained_bytes: Idle chunks that this process keeps.
        host_held_bytes: Pinned host memory that this process holds.
        host_used_bytes: The part of it that holds contents.
        host_common_bytes: Pinned host memory for regions with ``same_as``, which other processes have as well.
        disk_held_bytes: Size of the files for contents.
        disk_used_bytes: The part of it that holds contents.
        regions: The regions of this process on the device.
        pool: None if the device's memory does not come from a shared pool.
        ledger: The ledger of the device: every byte in use, by process and kind.
    """

    uuid: str | None
    total_bytes: int | None
    free_bytes: int | None
    retained_bytes: int
    host_held_bytes: int
    host_used_bytes: int
    host_common_bytes: int
    disk_held_bytes: int
    disk_used_bytes: int
    regions: list[RegionStats]
    pool: PoolStats | None
    ledger: Ledger


@dataclass(frozen=True)
class GuestStats:
    """A guest: see ``memsaver.Guest``.

    Attributes:
        name: Its name.
        tags: Its tags.
        order: Its place among the guests.
        state: ``"here"``, ``"leaving"``, ``"away"`` or ``"coming back"``.
        nbytes: Bytes of device memory that it holds, as far as it can tell. None if it raises an error.
    """

    name: str
    tags: tuple[str, ...]
    order: int
    state: str
    nbytes: int | None


@dataclass(frozen=True)
class Stats:
    """The result of ``memsaver.stats()``. ``print()`` shows a table.

    Attributes:
        devices: By name, the devices in use.
        unreleased_bytes: Chunks whose release failed in the driver. They may be lost until the process ends.
        options: The options that were set, and their values.
        guests: The guests of this process, in the order in which they leave.
    """

    devices: dict[str, DeviceStats]
    unreleased_bytes: int
    options: dict[str, Any]
    guests: list[GuestStats]

    def __str__(self) -> str:
        lines = []
        for name, each in self.devices.items():
            free, total = (gib(nbytes) if nbytes is not None else "?" for nbytes in (each.free_bytes, each.total_bytes))
            lines.append(f"{name}: {free} free of {total}")
            if each.pool is not None and each.pool.waiting_bytes:
                lines.append(f"  waits for {gib(each.pool.waiting_bytes)}")
            lines.append(
                f"  {'region':<24} {'state':<9} {'backup':<7}"
                f"{'allocated':>12} {'mapped':>12} {'offered':>12} {'backed up':>12}"
            )
            for row in each.regions:
                figures = row.allocated_bytes, row.mapped_bytes, row.offered_bytes, row.backup_bytes
                sizes = [f"{gib(nbytes):>12}" for nbytes in figures]
                lines.append(f"  {row.tag[:24]:<24} {row.state:<9} {row.backup:<7}{' '.join(sizes)}")
            lines += [f"  {line}" for line in ledger.lines(each.ledger)]
        lines += [f"guest {each.name!r} is {each.state}" for each in self.guests]
        return "\n".join(lines) or "no device is in use"

    def asdict(self) -> dict[str, Any]:
        """Converts the figures into nested dictionaries and lists, such as ``json.dumps()`` takes.

        Returns:
            A dictionary with the keys ``"devices"``, ``"unreleased_bytes"``, ``"options"`` and ``"guests"``.
        """
        return dataclasses.asdict(self)


def stats() -> Stats:
    """Reads the figures of this process and of its devices.

    Returns:
        Dataclasses of ``memsaver.figures``, with the devices in use. ``stats().asdict()`` makes dictionaries of them.

    Examples:
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> cache = kv.empty((1 << 20,), torch.uint8)
        >>> device = memsaver.stats().devices["cpu"]
        >>> {row.tag: row.allocated_bytes for row in device.regions}["kv_cache"]
        1048576
        >>> sum(row.bytes for row in device.ledger.rows) == device.ledger.used_bytes
        True
    """
    devices = {}
    for name in _core.device_names():
        row = _core.device_stats(name)
        row["regions"] = [RegionStats(**each) for each in row["regions"]]
        devices[name] = DeviceStats(**row, pool=_pool(name), ledger=ledger.read(name))
    guests = [GuestStats(**each) for each in _guests.rows()]
    return Stats(devices, _core.unreleased_bytes(), config.options(), guests)


def _pool(device: str) -> PoolStats | None:
    if not _core.in_pool(device):
        return None
    waits, holders = _core.pool_waits(device)
    holds_up = [
        HolderStats(pid, process_name(pid), nbytes, unused, why if unused else "")
        for pid, nbytes, unused, why in holders
        if pid != os.getpid()
    ]
    try:
        available: int | None = _core.pool_available(device)
    except BrokerError:
        available = None
    return PoolStats(available, sum(nbytes for nbytes, _ in waits), holds_up)
