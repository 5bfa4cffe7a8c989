"""The options of the process: their values parsed, one table, and the ways to set them."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from memsaver import _adapter, _core, _moves
from memsaver._adapter import PATCHES
from memsaver.broker import pool_client
from memsaver.errors import ConfigError, Error, gib
from memsaver.policies import seconds

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
            from fractions import Fraction

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


def _parse_retain(value: Any) -> int:
    return parse_size(value, "retain")


def _parse_host_device(value: Any) -> int:
    return _pages(value, "host_device")


def _parse_host_limit(value: Any) -> int | None:
    if value in (None, "auto"):
        return None
    try:
        return parse_size(value, "host_limit")
    except ConfigError:
        raise _wrong("host_limit", value, f"'auto', {_SIZE}") from None


def _parse_switch(option: str) -> Callable[[Any], bool]:
    def parse(value: Any) -> bool:
        if isinstance(value, str) and value.lower() in _SWITCH:
            return _SWITCH[value.lower()]
        if isinstance(value, bool):
            return value
        raise _wrong(option, value, "True or False (in the environment also 1, on, 0 or off)")

    return parse


def _parse_pool(value: Any) -> str:
    if value in pool_client.POOLS:
        return str(value)
    raise _wrong("pool", value, f"one of {', '.join(map(repr, pool_client.POOLS))}")


def _parse_pool_capacity(value: Any) -> int | None:
    return None if value is None else _pages(value, "pool_capacity")


def _parse_disk_dir(value: Any) -> str:
    try:
        path = os.fsdecode(value) and os.path.abspath(os.fsdecode(value))
    except TypeError:
        path = ""
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        missing = "" if not path or os.path.exists(path) else "; it does not exist"
        raise _wrong("disk_dir", value, f"a directory that can be written to{missing}")
    return path


def _parse_report_dir(value: Any) -> str:
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


def _parse_memory_timeout(value: Any) -> float:
    found = _seconds(value, "memory_timeout")
    if not 0 <= found <= _LONGEST_S:
        raise _wrong("memory_timeout", value, f"seconds of 0 or more, at most {_LONGEST_S:g}")
    return found


def _parse_text(value: str) -> str | None:
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


def _parse_job_name(_: str) -> str | None:
    from memsaver.broker import discovery

    return discovery.job()


def _parse_drop_in(value: str) -> str | None:
    parse_drop_in(value)
    return value or None


def _parse_patches(value: Any) -> list[str]:
    """Names of changes of torch, each once; the environment separates them by commas."""
    names = value.split(",") if isinstance(value, str) and value else value
    if not isinstance(names, (str, list, tuple)) or not set(names) <= set(PATCHES):
        raise _wrong("patches", value, f"one or several of {', '.join(map(repr, PATCHES))}")
    return sorted(set(names))


_PREFIX = "MEMSAVER_"
_TEST_PREFIX = "MEMSAVER_TEST_"  # variables of tests and benchmarks, which the library does not read


@dataclass(frozen=True)
class Option:
    """One row of the table of options.

    ``type`` and ``default`` are text for readers. ``parse`` returns the value or raises ConfigError. ``apply`` puts the
    value into effect; None marks an option that only its variable sets.
    """

    name: str
    type: str
    default: str
    meaning: str
    parse: Callable[[Any], Any]
    apply: Callable[[Any], None] | None

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.upper()


@dataclass(frozen=True)
class Setting:
    """The value of an option, and its source: ``"default"``, the name of the variable, or ``"configure()"``."""

    option: Option
    value: Any
    source: str

    def __str__(self) -> str:
        """The value for readers: sizes with their unit, defaults that depend on the machine in words."""
        if self.value is None:
            return self.option.default
        if isinstance(self.value, bool):
            return str(self.value)
        if isinstance(self.value, int):
            return f"{gib(self.value)} ({self.value} bytes)" if self.value else "0"
        if isinstance(self.value, float):
            return f"{self.value:g} s" if self.value else "0"
        if isinstance(self.value, list):
            return ",".join(self.value) or "none"
        return str(self.value)


def report_dir() -> str | None:
    """The directory of reports that was set. None: the default."""
    found: str | None = _values.get("report_dir")
    return found


def _keep(value: Any) -> None:
    """For an option that its users read by a function of this module."""


# In the order in which values are put into effect. docs/configuration.md shows the same table.
OPTIONS: Final = (
    Option(
        "host_device", "size", "half of the machine's memory",
        "Size of the host driver's device, at least 2 MiB. It can be set until the device is first used. Processes with"
        " the same size share one device.",
        _parse_host_device, lambda nbytes: _core.set_host_device(nbytes or 0),
    ),  # first, since the core can refuse it
    Option(
        "pool_capacity", "size, None", "90 % of a GPU, or all of the host device",
        "Capacity of a shared pool whose broker this process starts, at least 2 MiB.",
        _parse_pool_capacity, pool_client.set_capacity,
    ),
    Option(
        "pool", "'process', 'shared'", "process",
        "Source of device memory: the driver, or a pool that all processes on the device share. A broker is started"
        " where there is none. Set it before regions are made: memory that they have stays where it came from.",
        _parse_pool, pool_client.set_pool,
    ),  # before the rest, since it raises where no broker can be reached
    Option(
        "retain", "size", "0",
        "Idle chunks that the process keeps for its own regions instead of releasing them to the driver.",
        _parse_retain, _core.set_retain,
    ),
    Option(
        "host_limit", "size, 'auto', None", "auto",
        "Limit of the pinned host memory that the process holds for backups. 'auto' and None: the process stops pinning"
        " when the machine, or the limit of one of its cgroups, is 90 % full.",
        _parse_host_limit, _core.set_host_limit,
    ),
    Option(
        "verify", "bool", "False",
        "Compute checksums of kept contents on the device before a pause, and compare them after the resume. It reads"
        " all contents twice and is for tests. A difference raises VerifyError.",
        _parse_switch("verify"), _moves.set_verify,
    ),
    Option(
        "disk_dir", "path", "not set",
        "Directory for regions with backup=\"disk\". It has no default, since the system's temporary directory is often"
        " in memory.",
        _parse_disk_dir, lambda path: _core.set_disk_dir(path or ""),
    ),
    Option(
        "memory_timeout", "seconds", "0",
        "Bound of the wait for memory that others hold, of allocations in regions and of calls without a memory_timeout"
        " of their own. An allocation by torch waits with the lock of torch's allocator.",
        _parse_memory_timeout, _core.set_memory_timeout,
    ),
    Option(
        "report_dir", "path", "memsaver-reports-<uid> in the temporary directory",
        "Directory of the reports of turns that exceed their deadline. It is made by the first turn with a timeout. The"
        " 50 newest reports are kept.",
        _parse_report_dir, _keep,
    ),
    Option(
        "patches", "'captures', 'multiprocessing', both", "none",
        "Functions of torch that memsaver replaces from then on: docs/what-it-touches.md has their list. In the"
        " environment commas separate the names.",
        _parse_patches, _adapter.patch,
    ),
    Option(
        "pool_dir", "absolute path", "/tmp/memsaver-<uid>",
        "Directory of the sockets of shared pools. Only the variable sets it, and it is read whenever a broker is"
        " looked for.",
        _parse_text, None,
    ),
    Option(
        "job", "text", "not set",
        "Name of a job, 1 to 32 letters, digits and `_.-`. The processes of a job have brokers of their own. Only the"
        " variable sets it, and it is read whenever a broker is looked for.",
        _parse_job_name, None,
    ),
    Option(
        "drop_in", "'vllm', 'tms', 'vllm:warn', 'vllm,tms'", "not set",
        "Libraries whose memory saver memsaver replaces. Only the variable sets it, in each process, before the library"
        " is imported. With ':warn' a library that cannot be replaced stays as it is, with a warning.",
        _parse_drop_in, None,
    ),
    Option(
        "name", "text", "not set",
        "Name of the process in `memsaver top`, `stats()` and errors. Only the variable sets it, when the process"
        " starts. Without it: the title of a Ray actor, the script or module that Python runs, or the program.",
        _parse_text, None,
    ),
)  # fmt: skip
_BY_NAME = {option.name: option for option in OPTIONS}
_DEFAULTS = {
    "pool": "process", "retain": 0,
    "memory_timeout": 0.0, "patches": [], "verify": False,
}  # fmt: skip
_values: dict[str, Any] = {}
_sources: dict[str, str] = {}


def configure(**options: Any) -> None:
    """Sets options of this process. They take effect at once.

    [Options](configuration.md) has the table of options, and ``memsaver config`` prints it with their values. Sizes are
    integers in bytes or strings such as ``"64GiB"``. Units are powers of 1024: ``64G``, ``64GB``, ``64Gi`` and
    ``64GiB`` mean the same.

    Args:
        options: Values by the names of options. An option that is left out keeps its value, from
            ``MEMSAVER_<OPTION>`` in the environment or the default.

    Raises:
        ConfigError: There is no such option, or a value is wrong. It names the option, the value and the expectation.
            Nothing has changed.
        BrokerError: A shared pool cannot be reached.

    Examples:
        >>> memsaver.configure(retain="2GiB", host_limit="64GiB")
        >>> memsaver.stats().options["retain"]
        2147483648
    """
    for name, value in options.items():
        option = _BY_NAME.get(name)
        if option is None:
            names = [each.name for each in OPTIONS if each.apply is not None]
            near = _nearest(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(names))}"
            raise ConfigError(f"there is no option {name!r}; {hint}", option=name, value=value)
        if option.apply is None:
            raise ConfigError(f"{name} is set by {option.variable} alone", option=name, value=value)
    _set(options, lambda option: "configure()")


def _set(given: dict[str, Any], source: Callable[[Option], str]) -> None:
    """Parses all values before it applies the first. If one cannot be applied, the former values apply again."""
    parsed = {name: _BY_NAME[name].parse(value) for name, value in given.items()}
    chosen = [(option, option.apply) for option in OPTIONS if option.name in parsed and option.apply is not None]
    begun: list[tuple[Option, Callable[[Any], None]]] = []
    try:
        for option, apply in chosen:
            begun.append((option, apply))
            apply(parsed[option.name])
    except BaseException:
        for option, apply in reversed(begun):
            with suppress(Error):  # a device of the host driver may have come into use
                apply(_values.get(option.name, _DEFAULTS.get(option.name)))
        raise
    for option, _ in chosen:
        _values[option.name], _sources[option.name] = parsed[option.name], source(option)


def from_environment() -> None:
    """Applies the variables ``MEMSAVER_<OPTION>``.

    Variables that begin with ``MEMSAVER_TEST_`` belong to tests and benchmarks and are ignored.

    Warns:
        RuntimeWarning: A variable names no option. It is ignored.

    Raises:
        ConfigError: A value is wrong. Nothing has changed.
    """
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith(_PREFIX) and not name.startswith(_TEST_PREFIX) and name not in _variables()
    )
    if unknown:
        text = "; ".join(f"there is no variable {name}; {_suggestion(name)}" for name in unknown)
        warnings.warn(text, RuntimeWarning, stacklevel=4)  # the import of memsaver
    given = {option.name: os.environ[option.variable] for option in OPTIONS if option.variable in os.environ}
    try:
        _set(given, lambda option: option.variable)
    except ConfigError as error:
        if error.option in given:
            error.args = (f"{error}; it comes from {_BY_NAME[error.option].variable} in the environment",)
        raise


def _nearest(word: str, names: list[str], n: int = 1) -> list[str]:
    import difflib

    return difflib.get_close_matches(word, names, n=n)


def _variables() -> Iterable[str]:
    return [option.variable for option in OPTIONS]


def _suggestion(name: str) -> str:
    # Without the prefix, which makes all names similar.
    near = _nearest(name.removeprefix(_PREFIX), [each.name.upper() for each in OPTIONS], n=1)
    return f"did you mean {_PREFIX}{near[0]}?" if near else f"there are {', '.join(_variables())}"


def from_environment_of_import() -> None:
    """``from_environment()`` at the import of the package.

    Raises:
        ConfigError: as ``from_environment()`` does.
        SystemExit: instead, with the error in one line, if the program is the command ``memsaver``. Its code is part
            of the package, so it could not catch the error.
    """
    try:
        from_environment()
    except ConfigError as error:
        if _is_command():
            if sys.argv[1:2] in _WITHOUT_OPTIONS:
                return
            raise SystemExit(f"memsaver: {error}") from None
        raise


_WITHOUT_OPTIONS = (["-h"], ["--help"], ["--version"])  # arguments of the command that use no option


def _is_command() -> bool:
    """Whether the program is ``memsaver`` or ``python -m memsaver``."""
    arguments = getattr(sys, "argv", None)
    if not arguments:  # an embedded interpreter
        return False
    if arguments[0] == "-m":  # until the package is imported; its name is the word before the arguments
        return sys.orig_argv[-len(arguments)] == "memsaver"
    return os.path.basename(arguments[0]) == "memsaver"


def options() -> dict[str, Any]:
    """The options that were set; sizes in bytes."""
    return dict(_values)


def settings() -> list[Setting]:
    """All options in alphabetical order, with their values and sources."""
    return [_setting(option) for option in sorted(OPTIONS, key=lambda option: option.name)]


def _setting(option: Option) -> Setting:
    if option.apply is None:
        value = option.parse(os.environ.get(option.variable, ""))
        return Setting(option, value, "default" if value is None else option.variable)
    if option.name in _values:
        return Setting(option, _values[option.name], _sources[option.name])
    return Setting(option, _DEFAULTS.get(option.name), "default")
