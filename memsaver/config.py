"""Options of the process: from ``configure()``, or from ``MEMSAVER_<OPTION>`` in the environment, read here alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from memsaver import _core, membership
from memsaver.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_PAGE = 2 << 20
_LARGEST = 1 << 60


def _wrong(option: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{option} is {value!r}, expected {expected}", option=option, value=value)


def parse_size(value: int | str, option: str) -> int:
    """Bytes from an integer or a string such as ``"64GiB"``, ``"1.5 GB"`` or ``"512M"``.

    Raises ConfigError for anything else, and for sizes below 0 or above 1 EiB.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            nbytes = float(match[1]) * _UNITS[match[2].lower()]
            if nbytes <= _LARGEST:
                return int(nbytes)
    raise _wrong(option, value, "a number of bytes of 0 or more, or a string such as '64GiB'")


def _pages(value: Any, option: str) -> int:
    """A size in whole pages of the device."""
    nbytes = parse_size(value, option)
    if nbytes < _PAGE:
        raise _wrong(option, value, "at least 2 MiB")
    return nbytes // _PAGE * _PAGE


def _retain(value: Any) -> int:
    return parse_size(value, "retain")


def _host_device(value: Any) -> int:
    return _pages(value, "host_device")


def _host_limit(value: Any) -> int | None:
    return None if value in (None, "auto") else parse_size(value, "host_limit")


def _switch(option: str) -> Callable[[Any], bool]:
    def read(value: Any) -> bool:
        if isinstance(value, str) and value.lower() in _SWITCH:
            return _SWITCH[value.lower()]
        if isinstance(value, bool):
            return value
        raise _wrong(option, value, "True or False")

    return read


def _pool(value: Any) -> str:
    if value in membership.POOLS:
        return str(value)
    raise _wrong("pool", value, f"one of {', '.join(map(repr, membership.POOLS))}")


def _pool_capacity(value: Any) -> int | None:
    return None if value is None else _pages(value, "pool_capacity")


def _disk_dir(value: Any) -> str:
    try:
        path = os.fsdecode(value) and os.path.abspath(os.fsdecode(value))
    except TypeError:
        path = ""
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        raise _wrong("disk_dir", value, "a directory that can be written to")
    return path


# option -> how its value is read, and where it goes
_OPTIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], None]]] = {
    "host_device": (_host_device, _core.set_host_device),  # first: it can be refused
    "pool_capacity": (_pool_capacity, membership.set_capacity),
    "scrub": (_switch("scrub"), membership.set_scrub),
    "pool": (_pool, membership.set_pool),  # where a broker cannot be reached, what follows is not set either
    "retain": (_retain, _core.set_retain),
    "host_limit": (_host_limit, _core.set_host_limit),
    "backup_ahead": (_switch("backup_ahead"), _core.set_backup_ahead),
    "disk_dir": (_disk_dir, _core.set_disk_dir),
}
_values: dict[str, Any] = {}


def configure(**options: Any) -> None:
    """Sets options of this process; they take effect at once.

    - ``retain``: bytes of idle chunks that the process keeps for its own regions instead of giving them back to the
      driver (default 0).
    - ``host_limit``: bytes of pinned host memory that the process may hold for backups. By default, or with ``"auto"``,
      what the machine and its cgroups have available at the moment it is asked for, less a reserve of 5 % (at most
      2 GiB), so that the processes of a node stay within its memory together.
    - ``backup_ahead``: whether pinned host memory grows in the background as regions with ``backup="host"`` grow, so
      that their first pause finds it ready (default True).
    - ``disk_dir``: the directory for regions with ``backup="disk"``. There is no default, since the system's temporary
      directory is often memory.
    - ``pool``: where device memory comes from: ``"process"`` (the driver; the default), or ``"shared"``: a pool that
      all processes on the device borrow from, kept by its broker, which is started where there is none. Set it before
      regions are made: memory that they have stays where it came from.
    - ``pool_capacity``: bytes, for a broker that has to be started (default: 90 % of a GPU).
    - ``scrub``: whether chunks of a shared pool are zeroed before another process gets them from this one, or this one
      from another (default False).
    - ``host_device``: size of the host driver's device (default half of the machine's memory), before its first use;
      processes that name the same size share one device.

    Sizes are integers in bytes or strings such as ``"64GiB"``. Raises ConfigError, and then nothing has changed;
    BrokerError where a shared pool cannot be reached.
    """
    parsed = {}
    for option, value in options.items():
        if option not in _OPTIONS:
            raise ConfigError(f"there is no option {option!r}; there are {', '.join(_OPTIONS)}", option=option)
        parsed[option] = _OPTIONS[option][0](value)
    for option, (_, apply) in _OPTIONS.items():
        if option in parsed:
            apply(parsed[option])
            _values[option] = parsed[option]


def from_environment() -> None:
    """Applies ``MEMSAVER_<OPTION>`` for every option that the environment names. A ConfigError names the variable."""
    variables = {option: f"MEMSAVER_{option.upper()}" for option in _OPTIONS}
    try:
        configure(**{option: os.environ[name] for option, name in variables.items() if name in os.environ})
    except ConfigError as error:
        if error.option in variables:
            error.args = (f"{error}; it comes from {variables[error.option]} in the environment",)
        raise


def options() -> dict[str, Any]:
    """The options that were set; sizes in bytes."""
    return dict(_values)
