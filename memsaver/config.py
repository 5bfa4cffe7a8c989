"""Options of the process: from ``configure()``, or from ``MEMSAVER_<OPTION>`` in the environment, read here alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from memsaver import _core
from memsaver.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    "k": 1 << 10, "kib": 1 << 10, "kb": 10**3,
    "m": 1 << 20, "mib": 1 << 20, "mb": 10**6,
    "g": 1 << 30, "gib": 1 << 30, "gb": 10**9,
    "t": 1 << 40, "tib": 1 << 40, "tb": 10**12,
}  # fmt: skip
_PAGE = 2 << 20
_LARGEST = 1 << 60


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
    raise ConfigError(
        f"{option} is {value!r}, expected a number of bytes of 0 or more, or a string such as '64GiB'",
        option=option,
        value=value,
    )


def _retain(value: int | str) -> int:
    return parse_size(value, "retain")


def _host_device(value: int | str) -> int:
    nbytes = parse_size(value, "host_device")
    if nbytes < _PAGE:
        raise ConfigError(f"host_device is {value!r}, expected at least 2 MiB", option="host_device", value=value)
    return nbytes // _PAGE * _PAGE


# option -> how its value is read, and where it goes
_OPTIONS: dict[str, tuple[Callable[[Any], int], Callable[[int], None]]] = {
    "retain": (_retain, _core.set_retain),
    "host_device": (_host_device, _core.set_host_device),
}
_values: dict[str, int] = {}


def configure(**options: int | str) -> None:
    """Sets options of this process; they take effect at once.

    ``retain``: bytes of idle chunks that the process keeps for its own regions instead of giving them back to the
    driver (default 0). ``host_device``: size of the host driver's device (default half of the machine's memory), before
    its first use; processes that name the same size share one device.

    Sizes are integers in bytes or strings such as ``"64GiB"``. Raises ConfigError, and then nothing has changed.
    """
    parsed = {}
    for option, value in options.items():
        if option not in _OPTIONS:
            raise ConfigError(f"there is no option {option!r}; there are {', '.join(_OPTIONS)}", option=option)
        parsed[option] = _OPTIONS[option][0](value)
    for option in sorted(parsed):  # host_device first: it alone can be refused
        _OPTIONS[option][1](parsed[option])
        _values[option] = parsed[option]


def from_environment() -> None:
    """Applies ``MEMSAVER_<OPTION>`` for every option that the environment names."""
    found = {
        option: os.environ[f"MEMSAVER_{option.upper()}"]
        for option in _OPTIONS
        if f"MEMSAVER_{option.upper()}" in os.environ
    }
    configure(**found)


def options() -> dict[str, int]:
    """The options that were set, in bytes."""
    return dict(_values)
