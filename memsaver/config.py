"""The options of the process: one table, and the ways to set them: ``configure()`` and the environment."""

from __future__ import annotations

import difflib
import enum
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from memsaver import _core, _pool_client, transitions
from memsaver._arguments import seconds
from memsaver.broker import job
from memsaver.errors import ConfigError, gib

if TYPE_CHECKING:
    import torch

_PREFIX = "MEMSAVER_"
_TEST_PREFIX = "MEMSAVER_TEST_"  # variables of tests and benchmarks, which the library does not read
_UNITS = {"": 1, "b": 1} | {
    letter + suffix: 1 << 10 * power
    for power, letter in enumerate("kmgt", start=1)
    for suffix in ("", "b", "i", "ib")
}  # fmt: skip
_SWITCH = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_SIZE = "bytes as an integer of 0 or more, or a size such as '64GiB', '1.5G' or '512MB' (units are powers of 1024)"
_PEERS = "'auto' or a list of CUDA devices such as ['cuda:1']"
_PAGE = 2 << 20
_LARGEST = 1 << 60
_LONGEST_S = 1e6


class Unchanged(enum.Enum):
    """The default of each keyword of ``configure()``: the option keeps its value."""

    UNCHANGED = "unchanged"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = Unchanged.UNCHANGED


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
            return f"{self.value:g} s"
        if isinstance(self.value, list):
            return ",".join(self.value) or "none"
        return str(self.value)


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


def _retain(value: Any) -> int:
    return parse_size(value, "retain")


def _host_device(value: Any) -> int:
    return _pages(value, "host_device")


def _host_limit(value: Any) -> int | None:
    return None if value in (None, "auto") else parse_size(value, "host_limit")


def _switch(option: str) -> Callable[[Any], bool]:
    def parse(value: Any) -> bool:
        if isinstance(value, str) and value.lower() in _SWITCH:
            return _SWITCH[value.lower()]
        if isinstance(value, bool):
            return value
        raise _wrong(option, value, "True or False (in the environment also 1, on, 0 or off)")

    return parse


def _pool(value: Any) -> str:
    if value in _pool_client.POOLS:
        return str(value)
    raise _wrong("pool", value, f"one of {', '.join(map(repr, _pool_client.POOLS))}")


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


def _report_dir(value: Any) -> str:
    try:
        path = os.fsdecode(value) and os.path.abspath(os.fsdecode(value))
    except TypeError:
        path = ""
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise _wrong("report_dir", value, "the path of a directory, which need not exist yet")
    return path


def report_dir() -> str | None:
    """The directory of reports that was set. None: the default."""
    found: str | None = _values.get("report_dir")
    return found


def _receive_timeout(value: Any) -> float:
    try:
        found = float(value) if isinstance(value, str) else seconds(value, "receive_timeout")
    except (TypeError, ValueError):
        found = math.nan
    if not 0 < found <= _LONGEST_S:
        raise _wrong("receive_timeout", value, f"seconds above 0, at most {_LONGEST_S:g}")
    return found


def _keep(value: Any) -> None:
    """For an option that its users read by a function of this module."""


def receive_timeout() -> float:
    """Seconds in which the sender of a tensor must answer its receiver."""
    return float(_values.get("receive_timeout", _DEFAULTS["receive_timeout"]))


def _text(value: str) -> str | None:
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


def _job(_: str) -> str | None:
    """The public name of this process's job. The secret itself is neither shown nor part of an error."""
    found = job.current()
    return None if found is None else found.name


def _drop_in(value: str) -> str | None:
    parse_drop_in(value)
    return value or None


def _peers(value: Any) -> str | list[str]:
    """``"auto"``, or names of CUDA devices, each once; the environment separates them by commas."""
    if value == "auto":
        return "auto"
    if not isinstance(value, (str, list, tuple)):
        raise _wrong("peers", value, _PEERS)
    names = value.split(",") if isinstance(value, str) and value else value
    found = [str(each).strip() for each in names]
    if not all(re.fullmatch(r"cuda:[0-9]{1,4}", each) for each in found):
        raise _wrong("peers", value, _PEERS)
    return list(dict.fromkeys(f"cuda:{_ordinal(each)}" for each in found))


def _ordinal(device: str) -> int:
    return int(device.removeprefix("cuda:"))


def _set_peers(peers: str | list[str]) -> None:
    _core.set_peers(None if peers == "auto" else [_ordinal(each) for each in peers])


# In the order in which values are put into effect. docs/configuration.md shows the same table.
OPTIONS: Final = (
    Option(
        "host_device", "size", "half of the machine's memory",
        "Size of the host driver's device, at least 2 MiB. It can be set until the device is first used. Processes with"
        " the same size share one device.",
        _host_device, _core.set_host_device,
    ),  # first, since the core can refuse it
    Option(
        "pool_capacity", "size, None", "90 % of a GPU, or all of the host device",
        "Capacity of a shared pool whose broker this process starts, at least 2 MiB.",
        _pool_capacity, _pool_client.set_capacity,
    ),
    Option(
        "scrub", "bool", "False",
        "Zero a chunk of a shared pool whenever it moves between this process and another.",
        _switch("scrub"), _pool_client.set_scrub,
    ),
    Option(
        "close_on_fork", "bool", "False",
        "Close the descriptors of CUDA in children that are forked from now on. Without it, a shared pool lends the"
        " memory of this process again only after these children have exited.",
        _switch("close_on_fork"), _core.set_close_on_fork,
    ),
    Option(
        "pool", "'process', 'shared'", "process",
        "Source of device memory: the driver, or a pool that all processes on the device share. A broker is started"
        " where there is none. Set it before regions are made: memory that they have stays where it came from.",
        _pool, _pool_client.set_pool,
    ),  # before the rest, since it raises where no broker can be reached
    Option(
        "retain", "size", "0",
        "Idle chunks that the process keeps for its own regions instead of releasing them to the driver.",
        _retain, _core.set_retain,
    ),
    Option(
        "host_limit", "size, 'auto', None", "auto",
        "Limit of the pinned host memory that the process holds for backups. 'auto' and None: the process pins memory"
        " until nine tenths of the machine, or of the limit of one of its cgroups, are in use.",
        _host_limit, _core.set_host_limit,
    ),
    Option(
        "backup_ahead", "bool", "True",
        "Pin host memory in the background while regions with backup=\"host\" grow, so that the first pause does not"
        " wait for it.",
        _switch("backup_ahead"), _core.set_backup_ahead,
    ),
    Option(
        "verify", "bool", "False",
        "Compute checksums of kept contents on the device before a pause, and compare them after the resume. It reads"
        " all contents twice and is for tests. A difference raises VerifyError.",
        _switch("verify"), transitions.set_verify,
    ),
    Option(
        "disk_dir", "path", "not set",
        "Directory for regions with backup=\"disk\". It has no default, since the system's temporary directory is often"
        " in memory.",
        _disk_dir, _core.set_disk_dir,
    ),
    Option(
        "receive_timeout", "seconds", "10 s",
        "Bound of the wait for the sender of a tensor of a region that came through torch.multiprocessing.",
        _receive_timeout, _keep,
    ),
    Option(
        "report_dir", "path", "memsaver-reports-<uid> in the temporary directory",
        "Directory of the reports of turns that exceed their deadline. It is made by the first turn with a timeout. The"
        " 50 newest files are kept.",
        _report_dir, _keep,
    ),
    Option(
        "peers", "'auto', list of devices", "auto",
        "GPUs that can reach the memory of regions on another GPU, as copies and kernels between GPUs do. 'auto': those"
        " on which the process has an active context, read again at each call. Waits for a device cover its peers. In"
        " the environment commas separate the devices.",
        _peers, _set_peers,
    ),
    Option(
        "pool_dir", "path", "/tmp/memsaver-<uid>",
        "Directory of the sockets of shared pools. Only the variable sets it, and it is read whenever a broker is"
        " looked for.",
        _text, None,
    ),
    Option(
        "job", "text", "not set",
        "Secret of a job, 16 characters or more; `memsaver job` prints one. Its brokers serve only processes that have"
        " it. Only the variable sets it, and it is read whenever a broker is looked for. `memsaver config` shows the"
        " name that follows from it.",
        _job, None,
    ),
    Option(
        "drop_in", "'vllm', 'tms', 'vllm:warn', 'vllm,tms'", "not set",
        "Libraries whose memory saver memsaver replaces. Only the variable sets it, in each process, before the library"
        " is imported. With ':warn' a library that cannot be replaced stays as it is, with a warning.",
        _drop_in, None,
    ),
    Option(
        "name", "text", "not set",
        "Name of the process in `memsaver top`. Only the variable sets it, when the process starts. Without it: the"
        " title of a Ray actor, the script or module that Python runs, or the program.",
        _text, None,
    ),
)  # fmt: skip
_BY_NAME = {option.name: option for option in OPTIONS}
_DEFAULTS = {
    "scrub": False, "close_on_fork": False, "pool": "process", "retain": 0, "backup_ahead": True, "peers": "auto",
    "receive_timeout": 10.0, "verify": False,
}  # fmt: skip
_values: dict[str, Any] = {}
_sources: dict[str, str] = {}


def configure(
    *,
    backup_ahead: bool | Unchanged = UNCHANGED,
    close_on_fork: bool | Unchanged = UNCHANGED,
    disk_dir: str | os.PathLike[str] | Unchanged = UNCHANGED,
    host_device: int | str | Unchanged = UNCHANGED,
    host_limit: int | str | Literal["auto"] | None | Unchanged = UNCHANGED,
    peers: str | Sequence[str | torch.device] | Unchanged = UNCHANGED,
    pool: str | Unchanged = UNCHANGED,
    pool_capacity: int | str | None | Unchanged = UNCHANGED,
    receive_timeout: float | Unchanged = UNCHANGED,
    report_dir: str | os.PathLike[str] | Unchanged = UNCHANGED,
    retain: int | str | Unchanged = UNCHANGED,
    scrub: bool | Unchanged = UNCHANGED,
    verify: bool | Unchanged = UNCHANGED,
) -> None:
    """Sets options of this process. They take effect at once.

    Sizes are integers in bytes or strings such as ``"64GiB"``. Units are powers of 1024: ``64G``, ``64GB``, ``64Gi``
    and ``64GiB`` mean the same. An option that is left out keeps its value, from ``MEMSAVER_<OPTION>`` in the
    environment or the default.

    Args:
        backup_ahead: Pin host memory in the background while regions with backup="host" grow, so that the first pause
            does not wait for it. Default: True.
        close_on_fork: Close the descriptors of CUDA in children that are forked from now on. Without it, a shared pool
            lends the memory of this process again only after these children have exited. Default: False.
        disk_dir: Directory for regions with backup="disk". It has no default, since the system's temporary directory
            is often in memory. Default: not set.
        host_device: Size of the host driver's device, at least 2 MiB. It can be set until the device is first used.
            Processes with the same size share one device. Default: half of the machine's memory.
        host_limit: Limit of the pinned host memory that the process holds for backups. 'auto' and None: the process
            pins memory until nine tenths of the machine, or of the limit of one of its cgroups, are in use. Default:
            auto.
        peers: GPUs that can reach the memory of regions on another GPU, as copies and kernels between GPUs do. 'auto':
            those on which the process has an active context, read again at each call. Waits for a device cover its
            peers. In the environment commas separate the devices. Default: auto.
        pool: Source of device memory: the driver, or a pool that all processes on the device share. A broker is
            started where there is none. Set it before regions are made: memory that they have stays where it came
            from. Default: process.
        pool_capacity: Capacity of a shared pool whose broker this process starts, at least 2 MiB. Default: 90 % of a
            GPU, or all of the host device.
        receive_timeout: Bound of the wait for the sender of a tensor of a region that came through
            torch.multiprocessing. Default: 10 s.
        report_dir: Directory of the reports of turns that exceed their deadline. It is made by the first turn with a
            timeout. The 50 newest files are kept. Default: memsaver-reports-<uid> in the temporary directory.
        retain: Idle chunks that the process keeps for its own regions instead of releasing them to the driver.
            Default: 0.
        scrub: Zero a chunk of a shared pool whenever it moves between this process and another. Default: False.
        verify: Compute checksums of kept contents on the device before a pause, and compare them after the resume. It
            reads all contents twice and is for tests. A difference raises VerifyError. Default: False.

    Raises:
        ConfigError: A value is wrong. It names the option, the value and the expectation. Nothing has changed.
        BrokerError: A shared pool cannot be reached.

    Examples:
        >>> memsaver.configure(retain="2GiB", backup_ahead=False)
        >>> memsaver.stats().options["retain"]
        2147483648
    """
    given = {
        "backup_ahead": backup_ahead, "close_on_fork": close_on_fork, "disk_dir": disk_dir, "host_device": host_device,
        "host_limit": host_limit, "peers": peers, "pool": pool, "pool_capacity": pool_capacity,
        "receive_timeout": receive_timeout, "report_dir": report_dir, "retain": retain, "scrub": scrub,
        "verify": verify,
    }  # fmt: skip
    _set({name: value for name, value in given.items() if value is not UNCHANGED}, lambda option: "configure()")


def _set(given: dict[str, Any], source: Callable[[Option], str]) -> None:
    """Parses all values before it applies the first."""
    parsed = {name: _BY_NAME[name].parse(value) for name, value in given.items()}
    for option in OPTIONS:
        if option.name in parsed and option.apply is not None:
            option.apply(parsed[option.name])
            _values[option.name] = parsed[option.name]
            _sources[option.name] = source(option)


def from_environment() -> None:
    """Applies the variables ``MEMSAVER_<OPTION>``.

    Variables that begin with ``MEMSAVER_TEST_`` belong to tests and benchmarks and are ignored.

    Raises:
        ConfigError: A value is wrong, or a variable names no option. Nothing has changed.
    """
    unknown = sorted(
        name
        for name in os.environ
        if name.startswith(_PREFIX) and not name.startswith(_TEST_PREFIX) and name not in _variables()
    )
    if unknown:
        text = "; ".join(f"there is no variable {name}; {_suggestion(name)}" for name in unknown)
        raise ConfigError(text, option=unknown[0], value=os.environ[unknown[0]])
    given = {option.name: os.environ[option.variable] for option in OPTIONS if option.variable in os.environ}
    try:
        _set(given, lambda option: option.variable)
    except ConfigError as error:
        if error.option in given:
            error.args = (f"{error}; it comes from {_BY_NAME[error.option].variable} in the environment",)
        raise


def _variables() -> Iterable[str]:
    return [option.variable for option in OPTIONS]


def _suggestion(name: str) -> str:
    # Without the prefix, which makes all names similar.
    near = difflib.get_close_matches(name.removeprefix(_PREFIX), [each.name.upper() for each in OPTIONS], n=1)
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
            raise SystemExit(f"memsaver: {error}") from None
        raise


def _is_command() -> bool:
    """Whether the program is ``memsaver`` or ``python -m memsaver``."""
    arguments = getattr(sys, "argv", None)
    if not arguments:  # an embedded interpreter
        return False
    if arguments[0] == "-m":  # until the package is imported; its name is the word before the arguments
        return sys.orig_argv[-len(arguments)] == "memsaver"
    return Path(arguments[0]).name == "memsaver"


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
