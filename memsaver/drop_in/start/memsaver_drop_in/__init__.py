"""Entry points of other libraries' plugins, and callbacks at imports. Installed as the package ``memsaver_drop_in``.

Python imports this module in each process of a library that loads plugins, with or without the variable. So it imports
nothing of memsaver until the variable is set.
"""

from __future__ import annotations

import os
import sys
import threading

TYPE_CHECKING = False  # typing is not imported when Python starts
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def vllm() -> None:
    """The plugin in the group ``vllm.general_plugins``."""
    if os.environ.get("MEMSAVER_DROP_IN"):
        _install("vllm")


def start() -> None:
    """Prepares the import of torch_memory_saver. The files of ``memsaver/drop_in/startup.py`` call it.

    It runs when Python starts, where an error would be printed and ignored. So errors come with the import.
    """
    names = [part.partition(":")[0].strip() for part in os.environ.get("MEMSAVER_DROP_IN", "").split(",")]
    # A name that does not exist may be a misspelt "tms": the import then raises ConfigError.
    if all(name in ("", "vllm") for name in names) or "torch_memory_saver" in sys.modules:
        return
    if any(isinstance(each, _Finder) for each in sys.meta_path):
        return
    when_imported("torch_memory_saver", lambda module: None, _find_saver)
    if os.environ.get("TMS_INIT_ENABLE"):  # the process is managed whether it imports that package or not
        when_imported("torch", lambda module: _install("tms"))


def _install(name: str) -> None:
    from memsaver import drop_in

    drop_in.install(name)


def _find_saver(name: str) -> ModuleSpec | None:
    from importlib.util import find_spec

    _install("tms")  # which finds the package
    return find_spec(name)


def when_imported(
    name: str, callback: Callable[[ModuleType], None], find: Callable[[str], ModuleSpec | None] | None = None
) -> None:
    """Calls ``callback(module)`` right after the module has been executed: now if it has been imported already.

    An exception of the callback is raised by the import statement, and the module counts as not imported. ``find``
    looks the module up in place of Python.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback, find))  # type: ignore[arg-type]


class _Finder:
    """Finds a module, and loads it by its own loader. It stays until then: a look-up alone changes nothing."""

    def __init__(self, name: str, callback: Any, find: Any) -> None:
        self._name, self._callback, self._find = name, callback, find
        self._thread = threading.local()
        self._loader: Any = None

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != self._name or getattr(self._thread, "searches", False):
            return None
        from importlib.util import find_spec

        self._thread.searches = True
        try:
            spec: ModuleSpec | None = (self._find or find_spec)(name)
        finally:
            self._thread.searches = False
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self  # type: ignore[assignment]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        # Code that looks at its own loader, such as importlib.resources, finds the original one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._callback(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
