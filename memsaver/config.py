"""The options of the process: one table, and the ways to set them: ``configure()`` and the environment."""

from __future__ import annotations

import difflib
import enum
import functools
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

from memsaver import _core, _moves, _parsing, _pool_client
from memsaver._parsing import DROP_INS as DROP_INS
from memsaver._parsing import parse_drop_in as parse_drop_in
from memsaver._parsing import parse_size as parse_size
from memsaver.errors import ConfigError, Error, gib

_PREFIX = "MEMSAVER_"
_TEST_PREFIX = "MEMSAVER_TEST_"  # variables of tests and benchmarks, which the library does not read


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


def receive_timeout() -> float:
    """Seconds in which the sender of a tensor must answer its receiver."""
    return float(_values.get("receive_timeout", _DEFAULTS["receive_timeout"]))


# In the order in which values are put into effect. docs/configuration.md shows the same table.
OPTIONS: Final = (
    Option(
        "host_device", "size", "half of the machine's memory",
        "Size of the host driver's device, at least 2 MiB. It can be set until the device is first used. Processes with"
        " the same size share one device.",
        _parsing.host_device, lambda nbytes: _core.set_host_device(nbytes or 0),
    ),  # first, since the core can refuse it
    Option(
        "pool_capacity", "size, None", "90 % of a GPU, or all of the host device",
        "Capacity of a shared pool whose broker this process starts, at least 2 MiB.",
        _parsing.pool_capacity, _pool_client.set_capacity,
    ),
    Option(
        "close_on_fork", "bool", "False",
        "Close the descriptors of CUDA in children that are forked from now on. Without it, a shared pool lends the"
        " memory of this process again only after these children have exited.",
        _parsing.switch("close_on_fork"), _core.set_close_on_fork,
    ),
    Option(
        "pool", "'process', 'shared'", "process",
        "Source of device memory: the driver, or a pool that all processes on the device share. A broker is started"
        " where there is none. Set it before regions are made: memory that they have stays where it came from.",
        _parsing.pool, _pool_client.set_pool,
    ),  # before the rest, since it raises where no broker can be reached
    Option(
        "retain", "size", "0",
        "Idle chunks that the process keeps for its own regions instead of releasing them to the driver.",
        _parsing.retain, _core.set_retain,
    ),
    Option(
        "host_limit", "size, 'auto', None", "auto",
        "Limit of the pinned host memory that the process holds for backups. 'auto' and None: the process stops pinning"
        " when the machine, or the limit of one of its cgroups, is 90 % full.",
        _parsing.host_limit, _core.set_host_limit,
    ),
    Option(
        "backup_ahead", "bool", "True",
        "Pin host memory in the background while regions with backup=\"host\" grow, so that the first pause does not"
        " wait for it.",
        _parsing.switch("backup_ahead"), _core.set_backup_ahead,
    ),
    Option(
        "verify", "bool", "False",
        "Compute checksums of kept contents on the device before a pause, and compare them after the resume. It reads"
        " all contents twice and is for tests. A difference raises VerifyError.",
        _parsing.switch("verify"), _moves.set_verify,
    ),
    Option(
        "disk_dir", "path", "not set",
        "Directory for regions with backup=\"disk\". It has no default, since the system's temporary directory is often"
        " in memory.",
        _parsing.disk_dir, lambda path: _core.set_disk_dir(path or ""),
    ),
    Option(
        "memory_timeout", "seconds", "0",
        "Bound of the wait for memory that others hold, of allocations in regions and of calls without a memory_timeout"
        " of their own. An allocation by torch waits with the lock of torch's allocator.",
        _parsing.memory_timeout, _core.set_memory_timeout,
    ),
    Option(
        "receive_timeout", "seconds", "10 s",
        "Bound of the wait for the sender of a tensor of a region that came through torch.multiprocessing.",
        _parsing.receive_timeout, _keep,
    ),
    Option(
        "report_dir", "path", "memsaver-reports-<uid> in the temporary directory",
        "Directory of the reports of turns that exceed their deadline. It is made by the first turn with a timeout. The"
        " 50 newest reports are kept.",
        _parsing.report_dir, _keep,
    ),
    Option(
        "pool_dir", "absolute path", "/tmp/memsaver-<uid>",
        "Directory of the sockets of shared pools. Only the variable sets it, and it is read whenever a broker is"
        " looked for.",
        _parsing.text, None,
    ),
    Option(
        "job", "text", "not set",
        "Name of a job, 1 to 32 letters, digits and `_.-`. The processes of a job have brokers of their own. Only the"
        " variable sets it, and it is read whenever a broker is looked for.",
        _parsing.job_name, None,
    ),
    Option(
        "drop_in", "'vllm', 'tms', 'vllm:warn', 'vllm,tms'", "not set",
        "Libraries whose memory saver memsaver replaces. Only the variable sets it, in each process, before the library"
        " is imported. With ':warn' a library that cannot be replaced stays as it is, with a warning.",
        _parsing.drop_in, None,
    ),
    Option(
        "name", "text", "not set",
        "Name of the process in `memsaver top`, `stats()` and errors. Only the variable sets it, when the process"
        " starts. Without it: the title of a Ray actor, the script or module that Python runs, or the program.",
        _parsing.text, None,
    ),
)  # fmt: skip
_BY_NAME = {option.name: option for option in OPTIONS}
_DEFAULTS = {
    "close_on_fork": False, "pool": "process", "retain": 0, "backup_ahead": True,
    "memory_timeout": 0.0, "receive_timeout": 10.0, "verify": False,
}  # fmt: skip
_values: dict[str, Any] = {}
_sources: dict[str, str] = {}
_F = TypeVar("_F", bound=Callable[..., None])


def _naming_unknown(function: _F) -> _F:
    """Lets a wrong keyword raise ConfigError with the nearest option."""

    @functools.wraps(function)
    def checked(*none: object, **given: Any) -> None:
        for name, value in given.items():
            option = _BY_NAME.get(name)
            if option is None:
                names = [each.name for each in OPTIONS if each.apply is not None]
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(names))}"
                raise ConfigError(f"there is no option {name!r}; {hint}", option=name, value=value)
            if option.apply is None:
                raise ConfigError(f"{name} is set by {option.variable} alone", option=name, value=value)
        function(*none, **given)

    return cast("_F", checked)


@_naming_unknown
def configure(
    *,
    backup_ahead: bool | Unchanged = UNCHANGED,
    close_on_fork: bool | Unchanged = UNCHANGED,
    disk_dir: str | os.PathLike[str] | Unchanged = UNCHANGED,
    host_device: int | str | Unchanged = UNCHANGED,
    host_limit: int | str | Literal["auto"] | None | Unchanged = UNCHANGED,
    memory_timeout: float | Unchanged = UNCHANGED,
    pool: str | Unchanged = UNCHANGED,
    pool_capacity: int | str | None | Unchanged = UNCHANGED,
    receive_timeout: float | Unchanged = UNCHANGED,
    report_dir: str | os.PathLike[str] | Unchanged = UNCHANGED,
    retain: int | str | Unchanged = UNCHANGED,
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
            stops pinning when the machine, or the limit of one of its cgroups, is 90 % full. Default: auto.
        memory_timeout: Bound of the wait for memory that others hold, of allocations in regions and of calls without a
            memory_timeout of their own. An allocation by torch waits with the lock of torch's allocator. Default: 0.
        pool: Source of device memory: the driver, or a pool that all processes on the device share. A broker is
            started where there is none. Set it before regions are made: memory that they have stays where it came
            from. Default: process.
        pool_capacity: Capacity of a shared pool whose broker this process starts, at least 2 MiB. Default: 90 % of a
            GPU, or all of the host device.
        receive_timeout: Bound of the wait for the sender of a tensor of a region that came through
            torch.multiprocessing. Default: 10 s.
        report_dir: Directory of the reports of turns that exceed their deadline. It is made by the first turn with a
            timeout. The 50 newest reports are kept. Default: memsaver-reports-<uid> in the temporary directory.
        retain: Idle chunks that the process keeps for its own regions instead of releasing them to the driver.
            Default: 0.
        verify: Compute checksums of kept contents on the device before a pause, and compare them after the resume. It
            reads all contents twice and is for tests. A difference raises VerifyError. Default: False.

    Raises:
        ConfigError: There is no such option, or a value is wrong. It names the option, the value and the expectation.
            Nothing has changed.
        BrokerError: A shared pool cannot be reached.

    Examples:
        >>> memsaver.configure(retain="2GiB", backup_ahead=False)
        >>> memsaver.stats().options["retain"]
        2147483648
    """
    given = {
        "backup_ahead": backup_ahead, "close_on_fork": close_on_fork, "disk_dir": disk_dir, "host_device": host_device,
        "host_limit": host_limit, "memory_timeout": memory_timeout, "pool": pool,
        "pool_capacity": pool_capacity, "receive_timeout": receive_timeout, "report_dir": report_dir,
        "retain": retain, "verify": verify,
    }  # fmt: skip
    _set({name: value for name, value in given.items() if value is not UNCHANGED}, lambda option: "configure()")


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
