"""Guests for memory of libraries on the device, beside regions. Those that use torch load it on the first access."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsaver.guests.host_cache import HostCache
    from memsaver.guests.process_groups import ProcessGroups
    from memsaver.guests.stacks import Stacks
    from memsaver.guests.workspaces import Workspaces

_MODULES = {
    "HostCache": "memsaver.guests.host_cache",
    "ProcessGroups": "memsaver.guests.process_groups",
    "Stacks": "memsaver.guests.stacks",
    "Workspaces": "memsaver.guests.workspaces",
}
__all__ = ["HostCache", "ProcessGroups", "Stacks", "Workspaces"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
