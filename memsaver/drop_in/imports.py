"""Callbacks that run when a module is imported for the first time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` right after the module has been executed: now if it has been imported already.

    An exception of the callback is raised by the import statement, and the module counts as not imported.
    """
    module = sys.modules.get(name)
    if module is not None:
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))


class _Finder(MetaPathFinder):
    """Stays until the module has been executed: a look-up of the module alone, as by find_spec(), changes nothing."""

    def __init__(self, name: str, callback: Callback) -> None:
        self._name, self._callback = name, callback
        self._thread = threading.local()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name or getattr(self._thread, "searches", False):
            return None
        self._thread.searches = True
        try:
            spec = find_spec(name)
        finally:
            self._thread.searches = False
        if spec is not None and spec.loader is not None:
            spec.loader = _CallingLoader(spec.loader, self)
        return spec

    def executed(self, module: ModuleType) -> None:
        self._callback(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _CallingLoader(Loader):
    """The module's own loader, and the callback after it."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Code that looks at its own loader, such as importlib.resources, finds the original one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._finder.executed(module)
