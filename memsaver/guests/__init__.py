"""Guests for memory of libraries on the device, beside regions. Those that use torch load it on the first access."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsaver.guests.choice import for_nccl
    from memsaver.guests.communicators import Communicators
    from memsaver.guests.host_cache import HostCache
    from memsaver.guests.process_groups import ProcessGroups
    from memsaver.guests.registrations import Registrations
    from memsaver.guests.stacks import Stacks
    from memsaver.guests.workspaces import Workspaces

_MODULES = {
    "Communicators": "memsaver.guests.communicators",
    "HostCache": "memsaver.guests.host_cache",
    "ProcessGroups": "memsaver.guests.process_groups",
    "Registrations": "memsaver.guests.registrations",
    "Stacks": "memsaver.guests.stacks",
    "Workspaces": "memsaver.guests.workspaces",
    "for_nccl": "memsaver.guests.choice",
}
__all__ = ["Communicators", "HostCache", "ProcessGroups", "Registrations", "Stacks", "Workspaces", "for_nccl"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
