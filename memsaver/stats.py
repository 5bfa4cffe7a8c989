"""What is mapped, paused and backed up, and what the driver says is free."""

from __future__ import annotations

from typing import Any

from memsaver import _core, config
from memsaver.errors import BrokerError, process_name


def stats() -> dict[str, Any]:
    """Figures of this process, in bytes, ready for JSON::

        {"devices": {"cuda:0": {
            "uuid": str, "total_bytes": int, "free_bytes": int,          # by the driver, for the whole device
            "retained_bytes": int,                                       # idle chunks that this process keeps
            "host_held_bytes": int, "host_used_bytes": int,              # pinned host memory: held, of that in use
            "disk_held_bytes": int, "disk_used_bytes": int,              # files for contents: held, of that in use
            "processes": [{"pid": int, "name": str, "bytes": int}],      # the others on the device, where NVML tells
            "regions": [{"tag", "backup", "state", "frozen", "allocated_bytes", "mapped_bytes", "backup_bytes"}]}},
         "unreleased_bytes": int,    # chunks whose release the driver refused; tried again with each later release
         "options": {option: its value}}

    Only devices in use appear.
    """
    devices = {}
    for name in _core.device_names():
        row = _core.device_stats(name)
        row["processes"] = [
            {"pid": pid, "name": process_name(pid), "bytes": nbytes} for pid, nbytes in row["processes"]
        ]
        row["pool"] = _pool(name)
        del row["device"]
        devices[name] = row
    return {"devices": devices, "unreleased_bytes": _core.unreleased_bytes(), "options": config.options()}


def _pool(device: str) -> dict[str, Any] | None:
    if not _core.in_pool(device):
        return None
    try:
        available, holders = _core.pool_figures(device)
    except BrokerError:
        return {"available_bytes": None, "holders": None}
    rows = [{"pid": pid, "name": process_name(pid), "bytes": nbytes} for pid, nbytes in holders]
    return {"available_bytes": available, "holders": rows}
