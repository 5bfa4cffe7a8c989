"""The part that uses torch: loaded on the first use. The changes of other libraries that the program asked for."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from memsaver import _core

if TYPE_CHECKING:
    from memsaver._torch.routing import Router

PATCHES: Final = ("captures", "multiprocessing")
# The changes of other libraries' state, and the calls, options and commands that ask for them. docs/what-it-touches.md
# has the names that each changes, with its versions and its check.
TOUCHES: Final = {
    "captures": 'configure(patches="captures"), default_pool(), a drop-in',
    "multiprocessing": 'configure(patches="multiprocessing"), a drop-in, the receipt of such a tensor',
    "default pool": "default_pool()",
    "process groups": "register(memsaver.guests.ProcessGroups())",
    "vllm": "MEMSAVER_DROP_IN=vllm",
    "tms": "MEMSAVER_DROP_IN=tms",
}
_noted: set[str] = set()
_wanted: set[str] = set()


def note(name: str) -> None:
    """Notes that a change of the table was made in this process."""
    assert name in TOUCHES
    _noted.add(name)


def touched() -> set[str]:
    """The changes of other libraries' state that were made in this process."""
    return set(_noted)


def with_torch(module: str) -> Any:
    """A module that needs torch. Raises ModuleNotFoundError with the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        text = "this part of memsaver needs torch; expected it from pip install 'memsaver[torch]'"
        raise ModuleNotFoundError(text, name="torch") from None


def adapter() -> Router:
    """The part that uses torch. The first call loads it."""
    router = loaded()
    if router is None:
        _core.region_count()  # raises in a forked child: another thread may have been importing it
        router = with_torch("memsaver._torch.routing").router
        router.patch(_wanted)
    return router


def loaded() -> Router | None:
    """The part that uses torch, or None before its first use."""
    return getattr(sys.modules.get("memsaver._torch.routing"), "router", None)


def patch(names: Iterable[str]) -> None:
    """Replaces functions of torch, now or when the part that uses torch is loaded. They stay replaced."""
    _wanted.update(names)
    if (router := loaded()) is not None:
        router.patch(_wanted)


def wanted() -> set[str]:
    """The changes of torch that the program has asked for: they are made when it uses regions with torch."""
    return set(_wanted)
