"""The values of options: their texts parsed, each with an error that names the option and its possible values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, Final

from memsaver import _pool_client
from memsaver._arguments import seconds
from memsaver.broker import discovery
from memsaver.errors import ConfigError

_UNITS = {"": 1, "b": 1} | {
    letter + suffix: 1 << 10 * power
    for power, letter in enumerate("kmgt", start=1)
    for suffix in ("", "b", "i", "ib")
}  # fmt: skip
_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_SIZE = "bytes as an integer of 0 or more, or a size such as '64GiB', '1.5G' or '512MB' (units are powers of 1024)"
_PAGE = 2 << 20
_LARGEST = 1 << 60
_LONGEST_S = 1e6


def _wrong(option: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{option} is {value!r}, expected {expected}", option=option, value=value)


def parse_size(value: int | str, option: str) -> int:
    """Bytes from an integer or a string such as ``"64GiB"``, ``"1.5 G"`` or ``"512MB"``.

    Units are powers of 1024, in upper or lower case: ``64G``, ``64GB``, ``64Gi`` and ``64GiB`` all mean 64 * 1024**3
    bytes. K, M, G and T exist; a number without a unit, or with ``B``, is bytes. A fraction of a byte is cut off.

    Args:
        value: the size.
        option: the name of the option or argument, for the error.

    Raises:
        ConfigError: for anything else, and for sizes below 0 or above 1 EiB.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-zA-Z]*)\s*", value)
        if match and match[2].lower() in _UNITS:
            nbytes = int(Fraction(match[1]) * _UNITS[match[2].lower()])
            if nbytes <= _LARGEST:
                return nbytes
    raise _wrong(option, value, _SIZE)


def _pages(value: Any, option: str) -> int:
    """A size in whole pages of the device."""
    nbytes = parse_size(value, option)
    if nbytes < _PAGE:
        raise _wrong(option, value, "at least 2 MiB")
    return nbytes // _PAGE * _PAGE


def retain(value: Any) -> int:
    return parse_size(value, "retain")


def host_device(value: Any) -> int:
    return _pages(value, "host_device")


def host_limit(value: Any) -> int | None:
    if value in (None, "auto"):
        return None
    try:
        return parse_size(value, "host_limit")
    except ConfigError:
        raise _wrong("host_limit", value, f"'auto', {_SIZE}") from None


def switch(option: str) -> Callable[[Any], bool]:
    def parse(value: Any) -> bool:
        if isinstance(value, str) and value.lower() in _SWITCH:
            return _SWITCH[value.lower()]
        if isinstance(value, bool):
            return value
        raise _wrong(option, value, "True or False (in the environment also 1, on, 0 or off)")

    return parse


def pool(value: Any) -> str:
    if value in _pool_client.POOLS:
        return str(value)
    raise _wrong("pool", value, f"one of {', '.join(map(repr, _pool_client.POOLS))}")


def pool_capacity(value: Any) -> int | None:
    return None if value is None else _pages(value, "pool_capacity")


def disk_dir(value: Any) -> str:
    try:
        path = os.fsdecode(value) and os.path.abspath(os.fsdecode(value))
    except TypeError:
        path = ""
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        missing = "" if not path or os.path.exists(path) else "; it does not exist"
        raise _wrong("disk_dir", value, f"a directory that can be written to{missing}")
    return path


def report_dir(value: Any) -> str:
    try:
        path = os.fsdecode(value) and os.path.abspath(os.fsdecode(value))
    except TypeError:
        path = ""
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise _wrong("report_dir", value, "the path of a directory, which need not exist yet")
    return path


def _seconds(value: Any, option: str) -> float:
    try:
        return float(value) if isinstance(value, str) else seconds(value, option)
    except (TypeError, ValueError):
        return math.nan


def receive_timeout(value: Any) -> float:
    found = _seconds(value, "receive_timeout")
    if not 0 < found <= _LONGEST_S:
        raise _wrong("receive_timeout", value, f"seconds above 0, at most {_LONGEST_S:g}")
    return found


def memory_timeout(value: Any) -> float:
    found = _seconds(value, "memory_timeout")
    if not 0 <= found <= _LONGEST_S:
        raise _wrong("memory_timeout", value, f"seconds of 0 or more, at most {_LONGEST_S:g}")
    return found


def text(value: str) -> str | None:
    return value or None  # memsaver.broker checks it when it is used


DROP_INS: Final = ("vllm", "tms")
_DROP_IN = f"names of {', '.join(map(repr, DROP_INS))} separated by commas, each with ':warn' after it or not"


def parse_drop_in(value: str) -> dict[str, str]:
    """The drop-ins that ``MEMSAVER_DROP_IN`` names, each with its mode: ``"raise"`` or ``"warn"``.

    Raises:
        ConfigError: A name or a mode does not exist.
    """
    modes = {}
    for part in filter(None, map(str.strip, value.split(","))):
        name, colon, mode = part.partition(":")
        if name not in DROP_INS or (colon and mode != "warn"):
            raise _wrong("drop_in", value, _DROP_IN)
        modes[name] = mode or "raise"
    return modes


def job_name(_: str) -> str | None:
    return discovery.job()


def drop_in(value: str) -> str | None:
    parse_drop_in(value)
    return value or None
