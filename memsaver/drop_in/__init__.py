"""Drop-ins: memsaver in place of another library's memory saver, without a change of the code that calls it.

``MEMSAVER_DROP_IN`` names them. It has to be set in each process before that process imports the other library.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Final, Literal

from memsaver._adapter import PATCHES, note, patch
from memsaver.config import DROP_INS, parse_drop_in
from memsaver.errors import Error

State = Literal["waiting", "active", "stepped aside"]
VARIABLE: Final = "MEMSAVER_DROP_IN"


class DropInError(Error):
    """A drop-in cannot take the place of a library, or its ranks do not agree.

    Attributes:
        rank: The rank that has no drop-in, or another one. None where the error concerns this process alone.
    """

    rank: int | None = None


@dataclass(frozen=True)
class DropIn:
    """The state of one drop-in in this process.

    Attributes:
        name: Name of the replaced library, such as ``"vllm"``.
        version: Its version.
        state: ``"waiting"`` until the module with the replaced names is imported, then ``"active"``.
            ``"stepped aside"``: the library is unchanged, for the ``reason``.
        replaced: The names that are replaced, in full.
        reason: Why the drop-in stepped aside, else empty.
    """

    name: str
    version: str
    state: State
    replaced: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        from memsaver import __version__

        if self.state == "stepped aside":
            return f"drop-in for {self.name} {self.version} stepped aside: {self.reason}"
        return f"memsaver {__version__} replaces {', '.join(self.replaced)} of {self.name} {self.version}"


_states: dict[str, DropIn] = {}


def status() -> dict[str, DropIn]:
    """The drop-ins that this process has installed, by name.

    Returns:
        One :class:`DropIn` for each name in ``MEMSAVER_DROP_IN`` whose library has loaded its plugins. Empty where the
        variable is not set.

    Example:
        >>> memsaver.drop_in.status()
        {}
    """
    return dict(_states)


def install(name: str) -> None:
    """Installs the drop-in of this name if ``MEMSAVER_DROP_IN`` asks for it. Again: no-op.

    Args:
        name: ``"vllm"`` or ``"tms"``, for torch_memory_saver.

    Raises:
        ValueError: There is no drop-in of this name.
        DropInError: The library is not one that memsaver can replace, or another patch of it is present. With
            ``MEMSAVER_DROP_IN=<name>:warn`` this is a warning, and the library stays unchanged.
    """
    if name not in DROP_INS:
        raise ValueError(f"name is {name!r}, expected one of {', '.join(map(repr, DROP_INS))}")
    mode = parse_drop_in(os.environ.get(VARIABLE, "")).get(name)
    if mode is None or name in _states:
        return
    library = import_module(f"memsaver.drop_in.{name}")
    version: str = library.version()

    def activate(replace: Callable[[], tuple[str, ...]], logger: logging.Logger) -> None:
        with _stepping_aside(name, version, mode):
            _states[name] = DropIn(name, version, "active", replace())
            patch(PATCHES)
            logger.info("%s", _states[name])

    with _stepping_aside(name, version, mode):
        library.check(version)
        _states[name] = DropIn(name, version, "waiting")
        note(name)
        library.replace(activate)


@contextmanager
def _stepping_aside(name: str, version: str, mode: str) -> Iterator[None]:
    """Turns a DropInError of the body into a warning if the mode is ``"warn"``."""
    try:
        yield
    except DropInError as error:
        if mode != "warn":
            _states.pop(name, None)
            raise
        _states[name] = DropIn(name, version, "stepped aside", reason=str(error))
        # Not logged: a program without handlers of logging would not see it.
        warnings.warn(str(_states[name]), RuntimeWarning, stacklevel=2)
