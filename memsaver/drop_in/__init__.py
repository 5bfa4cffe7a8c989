"""Drop-ins: memsaver in place of another library's memory saver, without a change of the code that calls it.

``MEMSAVER_DROP_IN`` names them. It has to be set in each process before that process imports the other library.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final, Literal

from memsaver_drop_in import when_imported

from memsaver._adapter import PATCHES, note, patch
from memsaver.config import DROP_INS, parse_drop_in
from memsaver.errors import Error

log = logging.getLogger("memsaver")

State = Literal["waiting", "active"]
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
        replaced: The names that are replaced, in full.
    """

    name: str
    version: str
    state: State
    replaced: tuple[str, ...] = ()


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
        DropInError: The library is not one that memsaver can replace, or another patch of it is present.
    """
    if name not in DROP_INS:
        raise ValueError(f"name is {name!r}, expected one of {', '.join(map(repr, DROP_INS))}")
    if name not in parse_drop_in(os.environ.get(VARIABLE, "")) or name in _states:
        return
    library = import_module(f"memsaver.drop_in.{name}")
    version: str = library.version()

    def imported(module: ModuleType, replace: Callable[[ModuleType], tuple[str, ...]]) -> None:
        from memsaver import __version__

        try:
            replaced = replace(module)
        except DropInError:
            _states.pop(name, None)
            raise
        if replaced:
            _states[name] = DropIn(name, version, "active", replaced)
            patch(PATCHES)
            text = f"memsaver {__version__} replaces {', '.join(replaced)} of {name} {version}"
            getattr(module, "logger", log).info("%s", text)

    library.check(version)
    _states[name] = DropIn(name, version, "waiting")
    note(name)
    for module, replace, find in library.hooks():
        when_imported(module, partial(imported, replace=replace), find)
