"""The options of the process: their table, which docs/reference.md explains, and the ways to set them."""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from memsaver import _adapter, _core, _moves, trace
from memsaver.broker import pool_client
from memsaver.errors import ConfigError, Error, gib, is_utf8
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
DROP_INS: Final = ("vllm", "tms")
STALE: Final = ("off", "check", "warn", "raise")

# Functions that parse a value of configure() or the text of a variable. They raise ConfigError with the option's name.


def _wrong(option: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{option} is {value!r}, expected {expected}", option=option, value=value)


def parse_size(value: Any, option: str, expected: str = _SIZE) -> int:
    """Bytes from an integer or a string such as ``"64GiB"``, ``"1.5 G"`` or ``"512MB"``, up to 1 EiB.

    Units are powers of 1024, in upper or lower case. A number without a unit is bytes. A fraction of a byte is cut off.
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
    raise _wrong(option, value, expected)


def _pages(value: Any, option: str) -> int | None:
    """A size in whole pages of the device."""
    if value is None:
        return None
    nbytes = parse_size(value, option)
    if nbytes < _PAGE:
        raise _wrong(option, value, "at least 2 MiB")
    return nbytes // _PAGE * _PAGE


def _limit(value: Any, option: str) -> int | None:
    return None if value in (None, "auto") else parse_size(value, option, f"'auto', {_SIZE}")


def _switch(value: Any, option: str, expected: str = "True or False") -> bool:
    found = _SWITCH.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(found, bool):
        raise _wrong(option, value, f"{expected} (in the environment also 1, on, 0 or off)")
    return found


def _lazy(value: Any, option: str) -> bool | str:
    return "copy" if value == "copy" else _switch(value, option, "True, False or 'copy'")


def parse_seconds(value: Any, option: str) -> float:
    found = math.nan
    with suppress(TypeError, ValueError):
        found = float(value) if isinstance(value, str) else seconds(value)
    if not 0 <= found <= _LONGEST_S:
        raise _wrong(option, value, f"seconds of 0 or more, at most {_LONGEST_S:g}")
    return found


def _one_of(names: Sequence[str]) -> Callable[[Any, str], str]:
    def parse(value: Any, option: str) -> str:
        if value not in names:
            raise _wrong(option, value, f"one of {', '.join(map(repr, names))}")
        return str(value)

    return parse


def _patches(value: Any, option: str) -> list[str]:
    """Names of changes of torch, each once. The environment separates them by commas."""
    names = value.split(",") if isinstance(value, str) and value else value
    if not isinstance(names, (str, list, tuple)) or not all(each in _adapter.PATCHES for each in names):
        raise _wrong(option, value, f"one or several of {', '.join(map(repr, _adapter.PATCHES))}")
    return sorted(set(names))


def _path(value: Any) -> str:
    """An absolute path. Empty: the value is no path, or its working directory was removed."""
    with suppress(TypeError, OSError):
        path = os.fsdecode(value)
        return os.path.abspath(path) if path and "\0" not in path else ""
    return ""


def _disk_dir(value: Any, option: str) -> str:
    path = _path(value)
    if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
        missing = "" if not path or os.path.exists(path) else "; it does not exist"
        raise _wrong(option, value, f"a directory that can be written to{missing}")
    if not is_utf8(path):
        raise _wrong(option, value, "a path in UTF-8")
    return path


def _report_dir(value: Any, option: str) -> str:
    path = _path(value)
    if not path or (os.path.exists(path) and not os.path.isdir(path)):
        raise _wrong(option, value, "the path of a directory, which need not exist yet")
    return path


def _trace(value: Any, option: str) -> str | None:
    if value is None:
        return None
    path = _path(value)
    if os.path.isdir(path) or not os.access(path if os.path.exists(path) else os.path.dirname(path), os.W_OK):
        raise _wrong(option, value, "the path of a file that can be written, in a directory that exists")
    return path


def _text(value: str, option: str) -> str | None:
    return value or None  # its users check it


def _job(value: str, option: str) -> str | None:
    from memsaver.broker import discovery

    return discovery.job()


def parse_drop_in(value: str) -> set[str]:
    """The drop-ins that ``MEMSAVER_DROP_IN`` names. Raises ConfigError."""
    names = set(filter(None, map(str.strip, value.split(","))))
    if not names <= {*DROP_INS}:
        raise _wrong("drop_in", value, f"names of {', '.join(map(repr, DROP_INS))} separated by commas")
    return names


def _drop_in(value: str, option: str) -> str | None:
    parse_drop_in(value)
    return value or None


@dataclass(frozen=True)
class Option:
    """A row of the table of options. ``apply`` puts a value into effect; None: its variable alone sets the option.

    ``text``: the default None for readers.
    """

    name: str
    default: Any
    parse: Callable[[Any, str], Any]
    apply: Callable[[Any], object] | None
    text: str = "not set"

    @property
    def variable(self) -> str:
        return f"MEMSAVER_{self.name.upper()}"

    def shown(self, value: Any) -> str:
        """A value for readers: sizes with their unit, defaults that depend on the machine in words."""
        if value is None:
            return self.text
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{gib(value)} ({value} bytes)" if value else "0"
        if isinstance(value, float):
            return f"{value:g} s" if value else "0"
        if isinstance(value, list):
            return ",".join(value) or "none"
        return str(value)


# In the order in which values are put into effect: first those that the core or a broker can refuse.
OPTIONS: Final = {
    option.name: option
    for option in (
        Option(
            "host_device", None, _pages, lambda nbytes: _core.set_host_device(nbytes or 0),
            "half of the machine's memory",
        ),
        Option("pool_capacity", None, _pages, pool_client.set_capacity, "90 % of a GPU, or all of the host device"),
        Option("pool", "process", _one_of(pool_client.POOLS), pool_client.set_pool),
        Option("retain", 0, parse_size, _core.set_retain),
        Option("host_limit", None, _limit, _core.set_host_limit, "auto"),
        Option("lazy", False, _lazy, _moves.set_lazy),
        Option("verify", False, _switch, _moves.set_verify),
        Option("stale", "off", _one_of(STALE), _moves.set_stale),
        Option("disk_dir", None, _disk_dir, lambda path: _core.set_disk_dir(path or "")),
        Option("memory_timeout", 0.0, parse_seconds, _core.set_memory_timeout),
        Option(
            "report_dir", None, _report_dir, lambda path: None,  # read by options()
            "memsaver-reports-<uid> in the temporary directory",
        ),
        Option("trace", None, _trace, trace.write_to),
        Option("nvtx", False, _switch, trace.set_nvtx),
        Option("patches", [], _patches, _adapter.patch),
        Option("pool_dir", None, _text, None, "/tmp/memsaver-<uid>"),
        Option("job", None, _job, None),
        Option("drop_in", None, _drop_in, None),
        Option("name", None, _text, None),
    )
}  # fmt: skip
_values: dict[str, Any] = {}  # that were set
_sources: dict[str, str] = {}


def configure(**options: Any) -> None:
    """Sets options of this process. They take effect at once.

    [Options](reference.md#options) has their table, and ``memsaver config`` prints them with their values. Sizes are
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
        if name not in OPTIONS:
            names = sorted(each.name for each in OPTIONS.values() if each.apply is not None)
            hint = _hint(name, {each: repr(each) for each in names}) or f"there are {', '.join(names)}"
            raise ConfigError(f"there is no option {name!r}; {hint}", option=name, value=value)
        if OPTIONS[name].apply is None:
            raise ConfigError(f"{name} is set by {OPTIONS[name].variable} alone", option=name, value=value)
    _set(options, lambda option: "configure()")


def _hint(name: str, names: dict[str, str]) -> str | None:
    """The nearest of these names, as their values."""
    import difflib

    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {names[near[0]]}?" if near else None


def _set(given: dict[str, Any], source: Callable[[Option], str]) -> None:
    """Parses all values before it applies the first. If one cannot be applied, the former values apply again."""
    parsed = {name: OPTIONS[name].parse(value, name) for name, value in given.items()}
    chosen = [(option, option.apply) for option in OPTIONS.values() if option.name in parsed and option.apply]
    begun: list[tuple[Option, Callable[[Any], object]]] = []
    try:
        for option, apply in chosen:
            begun.append((option, apply))
            apply(parsed[option.name])
    except BaseException as error:
        if isinstance(error, ConfigError) and error.option in given and error.value is None:
            error.value = given[error.option]  # the core does not know it
        for option, apply in reversed(begun):
            with suppress(Error):  # a device of the host driver may have come into use
                apply(_values.get(option.name, option.default))
        raise
    for option, _ in chosen:
        _values[option.name], _sources[option.name] = parsed[option.name], source(option)


def from_environment() -> None:
    """Applies the variables ``MEMSAVER_<OPTION>``. Those that begin with ``MEMSAVER_TEST_`` belong to tests.

    Warns of variables that name no option. Raises ConfigError for a wrong value, and then nothing has changed. In the
    command ``memsaver``, whose code is part of the package and so cannot catch it, SystemExit has it in one line.
    """
    variables = {option.variable: option for option in OPTIONS.values()}
    mine = sorted(name for name in os.environ if name.startswith("MEMSAVER_") and name[9:14] != "TEST_")
    if texts := [
        f"there is no variable {name}; {_variable(name, variables)}" for name in mine if name not in variables
    ]:
        warnings.warn("; ".join(texts), RuntimeWarning, stacklevel=3)  # the import of memsaver
    given = {option.name: os.environ[name] for name, option in variables.items() if name in os.environ}
    try:
        _set(given, lambda option: option.variable)
    except ConfigError as error:
        if error.option in given:
            error.args = (f"{error}; it comes from {OPTIONS[error.option].variable} in the environment",)
        if _is_command():
            raise SystemExit(f"memsaver: {error}") from None
        raise


def _variable(name: str, known: Iterable[str]) -> str:
    # Without the prefix, which makes all names similar.
    hint = _hint(name.removeprefix("MEMSAVER_"), {each.removeprefix("MEMSAVER_"): each for each in known})
    return hint or f"there are {', '.join(known)}"


def _is_command() -> bool:
    """Whether the program is ``memsaver`` or ``python -m memsaver``."""
    arguments = getattr(sys, "argv", None) or [""]  # an embedded interpreter has none
    if arguments[0] == "-m":  # until the package is imported; its name is the word before the arguments
        return sys.orig_argv[-len(arguments)] == "memsaver"
    return os.path.basename(arguments[0]) == "memsaver"


def options() -> dict[str, Any]:
    """The options that were set; sizes in bytes."""
    return dict(_values)


class Setting(NamedTuple):
    """The value of an option, and its source: ``"default"``, the name of the variable, or ``"configure()"``."""

    option: Option
    value: Any
    source: str


def settings() -> list[Setting]:
    """All options in alphabetical order, with their values and sources."""
    found = []
    for name, option in sorted(OPTIONS.items()):
        value, source = _values.get(name, option.default), _sources.get(name, "default")
        if option.apply is None:
            value = option.parse(os.environ.get(option.variable, ""), name)
            source = "default" if value is None else option.variable
        found.append(Setting(option, value, source))
    return found
