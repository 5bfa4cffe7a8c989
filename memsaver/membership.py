"""Whether this process borrows its memory from the pool that all processes on a device share, and through which broker.

Set by ``configure(pool=...)``; a device joins when its first region is made, or at once where it has regions already.
"""

from __future__ import annotations

import threading

from memsaver import _core, sockets
from memsaver.errors import BrokerError

POOLS = ("process", "shared")

_lock = threading.Lock()
_shared = False
_capacity: int | None = None
_scrub = False


def set_pool(pool: str) -> None:
    """``"shared"``, or ``"process"``: chunks come from the driver. Raises BrokerError, and then nothing has changed."""
    global _shared
    devices = _core.device_names()
    if pool == "shared":
        for device in devices:
            connect(device)
    for device in devices:
        _core.use_pool(device, pool == "shared")
    _shared = pool == "shared"


def set_capacity(nbytes: int | None) -> None:
    global _capacity
    _capacity = nbytes


def set_scrub(wanted: bool) -> None:
    global _scrub
    _scrub = wanted
    for device in _core.device_names():
        _core.set_scrub(device, wanted)


def join(device: str) -> None:
    """Has a device's chunks come from its shared pool, where that was chosen. Raises BrokerError."""
    if _shared and not _core.in_pool(device):
        connect(device)
        _core.use_pool(device, True)


def connect(device: str) -> None:
    """Connects to the broker of a device, and starts one where there is none. Raises BrokerError."""
    with _lock:
        _core.set_scrub(device, _scrub)
        if not _core.connected(device):
            uuid = _core.device_uuid(device)
            path = sockets.ensure(uuid, device, _capacity)
            try:
                _core.connect(device, str(path))
            except BrokerError:
                if sockets.accepts(path):
                    raise
                # It was about to end.
                _core.connect(device, str(sockets.ensure(uuid, device, _capacity)))
