"""The facts that several checks of ``memsaver doctor`` read: once each, when the first check needs them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from memsaver import _core, config, ledger
from memsaver.broker import caller, discovery
from memsaver.errors import BrokerError, ConfigError, DriverError
from memsaver.process_names import printable, process_name

_COMMAND = re.compile(rb"(^|[\0/])memsaver\0(broker|top|doctor|trim|config|drop-in|serve-metrics)\0")
SHELL = "this shell"
_MOST_NAMES = 4  # in a line


@dataclass(frozen=True)
class Process:
    """A process of this user that has loaded memsaver. ``variables``: those with which it started."""

    pid: int
    name: str
    variables: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"


@dataclass(frozen=True)
class Broker:
    """A socket in the directory of this job or another one. ``status``: of its pool; None: see ``why``."""

    path: Path
    status: dict[str, Any] | None
    why: str = ""
    is_locked: bool = True
    of_this_job: bool = True


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a device by the driver and by reports. ``pool``: the status of its shared pool."""

    name: str
    uuid: str
    total_bytes: int
    account: ledger.Ledger
    pool: Mapping[str, Any] | None = None


@dataclass
class Machine:
    """This machine. ``root``: the folder above /proc, /sys and /dev. ``variables``: of the shell of the command."""

    root: str = ""
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def text(self, path: str) -> str | None:
        """The text of a file of the system. None: it cannot be read."""
        try:
            return Path(self.root + path).read_text(errors="replace")
        except OSError:
            return None

    def pids(self) -> Iterator[int]:
        """The processes of this user."""
        for name in os.listdir(f"{self.root}/proc"):
            with suppress(OSError):  # it has exited
                if name.isdigit() and os.stat(f"{self.root}/proc/{name}").st_uid == os.getuid():
                    yield int(name)

    def variables_of(self, pid: int) -> dict[str, str]:
        """The variables with which a process started. Raises OSError."""
        entries = Path(f"{self.root}/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(each.split("=", 1) for each in entries if "=" in each)

    @cached_property
    def processes(self) -> list[Process]:
        """The processes of this user that have loaded memsaver, but for its commands."""
        found = []
        for pid in self.pids():
            with suppress(OSError):  # it has exited, or is one that this user may not examine
                with open(f"{self.root}/proc/{pid}/maps", errors="replace") as maps:
                    is_one = any("/memsaver/_core." in line for line in maps)
                command = Path(f"{self.root}/proc/{pid}/cmdline").read_bytes() + b"\0"
                if pid != os.getpid() and is_one and not _COMMAND.search(command):
                    variables = self.variables_of(pid)
                    name = printable(variables.get("MEMSAVER_NAME") or process_name(pid))
                    found.append(Process(pid, name, variables))
        return found

    def by_value(self, *names: str) -> Iterator[tuple[tuple[str, ...], str]]:
        """Values of these variables in the shell and in processes that run memsaver, each with the names of those.

        Empty: not set.
        """
        found: dict[tuple[str, ...], list[str]] = {}
        for who, variables in [(SHELL, self.variables), *((str(each), each.variables) for each in self.processes)]:
            found.setdefault(tuple(variables.get(name, "") for name in names), []).append(who)
        return ((values, joined(names)) for values, names in found.items())

    @cached_property
    def brokers(self) -> list[Broker]:
        """The sockets of this user. Raises ConfigError if their directory cannot be used."""
        own = discovery.directory()
        found = []
        for path in [*sorted(own.glob("*.sock")), *discovery.elsewhere()]:
            status, why = None, ""
            try:
                status = caller.status(path)
            except BrokerError as error:
                why = str(error)
            found.append(Broker(path, status, why, discovery.is_locked(path), path.parent == own))
        return found

    @property
    def pools(self) -> list[dict[str, Any]]:
        """The status of each pool: see memsaver/broker/status.py."""
        with suppress(ConfigError):  # the directory of the sockets has a finding of its own
            return [each.status for each in self.brokers if each.status is not None]
        return []

    @cached_property
    def devices(self) -> list[DeviceMemory]:
        """The visible GPUs, the host devices in use, and the devices of pools."""
        found = {}
        for name, memory in self._memories():
            account = ledger.of_device(memory.used_bytes(), memory.holdings(), memory.lists_all())
            found[memory.uuid()] = DeviceMemory(name, memory.uuid(), memory.total_bytes(), account)
        for pool in self.pools:
            seen, total = found.get(pool["uuid"]), pool["capacity_bytes"]
            if pool["device"] == "cpu":
                total = int(pool["uuid"].rpartition("-")[2], 16)  # the size of a host device
            elif seen is not None:
                total = seen.total_bytes
            found[pool["uuid"]] = DeviceMemory(pool["device"], pool["uuid"], total, ledger.of_pool(pool), pool)
        return list(found.values())

    def _memories(self) -> Iterator[tuple[str, Any]]:
        for index in range(_core.cuda_device_count()):
            with suppress(DriverError):  # it lacks what the list of its holders needs
                yield f"cuda:{index}", _core.open_cuda_memory(index)
        # Host devices have tables (csrc/host/ledger.cpp). The variable of the shell may name another one.
        for folder in (f"{self.root}/dev/shm", self.variables.get("TMPDIR", "/tmp")):
            for path in sorted(Path(folder).glob(f"memsaver.2.{os.getuid()}.*")):
                with suppress(ConfigError):  # this process has opened one of another size
                    _core.set_host_device(int(path.name.rpartition(".")[2]))
                    yield "cpu", _core.open_host_memory()
        with suppress(ConfigError):
            _core.set_host_device(config.options().get("host_device") or 0)


def joined(names: list[str]) -> str:
    """The first names, and the number of the others."""
    rest = len(names) - _MOST_NAMES
    return ", ".join([*names[:_MOST_NAMES], *([f"{rest} more"] if rest > 0 else [])])
