"""Drop-ins: memsaver in place of another library's memory saver, without a change of the code that calls it.

``MEMSAVER_DROP_IN`` names them. It has to be set in each process before that process imports the other library.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, Literal

from memsaver._adapter import PATCHES, note, patch
from memsaver.config import DROP_INS, parse_drop_in
from memsaver.drop_in.memsaver_drop_in import when_imported
from memsaver.errors import Error

log = logging.getLogger("memsaver")

State = Literal["waiting", "active", "stepped aside"]
# Of a drop-in: a module, a function that is called after its import, and may return replaced names, and its look-up.
Hook = tuple[str, Callable[[ModuleType], tuple[str, ...]], Callable[[str], ModuleSpec | None] | None]
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

    def attempt(act: Callable[[Any], tuple[str, ...]], argument: Any) -> None:
        """Calls a function, which may return replaced names. Its DropInError is a warning if the mode is "warn"."""
        try:
            replaced = act(argument)
        except DropInError as error:
            if mode != "warn":
                _states.pop(name, None)
                raise
            _states[name] = DropIn(name, version, "stepped aside", reason=str(error))
            # Not logged: a program without handlers of logging would not see it.
            warnings.warn(str(_states[name]), RuntimeWarning, stacklevel=3)
            return
        if replaced:
            _states[name] = DropIn(name, version, "active", replaced)
            patch(PATCHES)
            getattr(argument, "logger", log).info("%s", _states[name])

    attempt(library.check, version)
    if name not in _states:
        _states[name] = DropIn(name, version, "waiting")
        note(name)
        for module, callback, find in library.hooks():
            when_imported(module, partial(attempt, callback), find)
