"""The ledgers of devices that a command shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memsaver.ledger.accounts import Device, Holding, PoolTotal, Report, account
from memsaver.ledger.own import Own
from memsaver.ledger.rows import Ledger


def of_pool(status: Mapping[str, Any], mine: Own | None = None) -> Ledger:
    """The ledger of a shared pool's device by the broker's status: see memsaver/broker/status.py.

    ``mine``: the figures of this process, which take the place of its report and of the broker's own reading of the
    device.
    """
    reports = [_report(client) for client in status["clients"] if mine is None or client["pid"] != mine.report.pid]
    if mine is not None:
        known = [client["name"] for client in status["clients"] if client["pid"] == mine.report.pid]
        mine.report.name = next(iter(known), mine.report.name)
        reports.append(mine.report)
        device = mine.device
    else:
        listed = status.get("device_memory") or {"used_bytes": None, "holdings": [], "lists_all": False}
        device = Device(listed["used_bytes"], [tuple(each) for each in listed["holdings"]], listed["lists_all"])
    pool = PoolTotal(status["pid"], "memsaver broker", status["total_bytes"])
    return account(device, reports, pool)


def of_device(used_bytes: int | None, holdings: Sequence[Holding], lists_all: bool) -> Ledger:
    """The ledger of a device without a shared pool, by the driver's figures alone."""
    return account(Device(used_bytes, holdings, lists_all), [], None)


def _report(client: Mapping[str, Any]) -> Report:
    if client["exited"]:
        keeper = next(iter(client["kept_by"]), client)
        return Report(keeper["pid"], keeper["name"], None, None, client["held_bytes"], exited=client["pid"])
    known = client.get("ledger")
    report = Report(client["pid"], client["name"], None, None, client["held_bytes"])
    if known is not None:
        regions = [("region", row["tag"], row["state"], row["mapped_bytes"]) for row in client["regions"]]
        report.parts = [*regions, *(tuple(row) for row in known["rows"])]
        report.imported = known["imported_bytes"]
    return report
