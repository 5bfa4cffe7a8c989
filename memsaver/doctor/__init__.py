"""``memsaver doctor``: looks at everything outside of a program that its errors may come from.

It needs neither a GPU nor torch. A check reads figures and files, and changes nothing.
"""

from __future__ import annotations

from typing import Final

from memsaver.doctor import devices, host, pools, settings, software
from memsaver.doctor.findings import Check, Finding, exit_status, lines, run
from memsaver.doctor.machine import Machine

CHECKS: Final[tuple[Check, ...]] = (
    devices.driver, devices.holders, software.torch, settings.allocator, settings.nccl, host.host_memory,
    host.locked_memory, host.pages, host.shared_memory, host.ray, host.container, pools.pool_directory, pools.brokers,
    pools.regions, pools.turns, software.drop_ins,
)  # fmt: skip

__all__ = ["CHECKS", "Finding", "Machine", "examine", "exit_status", "lines"]


def examine(machine: Machine | None = None) -> list[Finding]:
    """The findings of all checks, the worst first. It raises nothing."""
    return run(CHECKS, Machine() if machine is None else machine)
