"""Callbacks that run when a module is imported for the first time."""

from __future__ import annotations

import sys
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
    def __init__(self, name: str, callback: Callback) -> None:
        self._name, self._callback = name, callback

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        except BaseException:
            sys.meta_path.insert(0, self)
            raise
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
        else:
            spec.loader = _CallingLoader(spec.loader, self)
        return spec

    def executed(self, module: ModuleType) -> None:
        self._callback(module)

    def failed(self) -> None:
        """The import may be tried again."""
        sys.meta_path.insert(0, self)


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
        try:
            self._loader.exec_module(module)
            self._finder.executed(module)
        except BaseException:
            self._finder.failed()
            raise
