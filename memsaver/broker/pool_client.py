"""The membership of this process in the shared pools of its devices, and the start of their brokers.

``configure(pool=...)`` sets the membership. A device joins when its first region is made, or at once if it has regions.
"""

from __future__ import annotations

import threading

from memsaver import _core
from memsaver.broker import queries
from memsaver.errors import BrokerError, ConfigError

POOLS: tuple[str, ...] = ("process", "shared")

_lock = threading.RLock()
_shared = False
_capacity: int | None = None


def set_pool(pool: str) -> None:
    """Sets the source of chunks: ``"shared"``, or ``"process"`` for the driver.

    Raises BrokerError and ConfigError, and then nothing has changed.
    """
    global _shared
    whole = [repr(each.tag) for each in _core.regions() if each.one_handle and not each.closed]
    if pool == "shared" and whole:
        text = f"regions with one_handle have memory of the driver, and pool is 'shared': close {', '.join(whole)}"
        raise ConfigError(text, option="pool", value=pool)
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


def join(device: str) -> None:
    """Makes a device take its chunks from its shared pool, if ``configure(pool="shared")`` was called.

    Raises BrokerError and ConfigError.
    """
    if _shared and not _core.in_pool(device):
        connect(device)
        _core.use_pool(device, True)


def connect(device: str) -> None:
    """Connects to the broker of a device, and starts one if none runs.

    Raises BrokerError, and ConfigError if the device is under MPS.
    """
    from memsaver.broker import daemon, discovery  # which take long to import

    with _lock:
        if _core.under_mps(device):
            raise daemon.mps_error(device)
        queries.start()
        if not _core.connected(device):
            uuid = _core.device_uuid(device)
            path = daemon.ensure(uuid, device, _capacity)
            try:
                _core.connect(device, str(path))
            except BrokerError:
                if discovery.accepts(path):
                    raise
                # The broker was shutting down.
                _core.connect(device, str(daemon.ensure(uuid, device, _capacity)))
