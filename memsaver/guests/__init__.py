"""Guests for memory of libraries on the device, beside regions. Those that use torch load it on the first access."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsaver.guests.process_groups import ProcessGroups
    from memsaver.guests.workspaces import Workspaces

_MODULES = {
    "ProcessGroups": "memsaver.guests.process_groups",
    "Workspaces": "memsaver.guests.workspaces",
}
__all__ = ["ProcessGroups", "Workspaces"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
