"""torch_memory_saver's API on memsaver: a package ``torch_memory_saver`` in place of the original."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Final

from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.imports import when_imported
from memsaver.drop_in.tms import sglang

PACKAGE: Final = "torch_memory_saver"
VERSION: Final = "0.0.10"  # of the API
FOLDER: Final = Path(__file__).parent / "packages"  # holds the package, apart from site-packages


def version() -> str:
    return VERSION


def check(version: str) -> None:
    """Raises DropInError if the original package has been imported."""
    if PACKAGE in sys.modules:
        raise DropInError(
            f"{PACKAGE} ({getattr(sys.modules[PACKAGE], '__file__', None)}) is imported already: set MEMSAVER_DROP_IN "
            "before Python starts"
        )


def replace(activate: Callable[[Callable[[], tuple[str, ...]], logging.Logger], None]) -> None:
    """Lets the next import of the package find memsaver's."""
    sys.meta_path.insert(0, _Finder())

    def imported(module: ModuleType) -> None:
        activate(lambda: (PACKAGE,), logging.getLogger("memsaver"))

    when_imported(PACKAGE, imported)
    sglang.allow_handles()
    if os.environ.get("TMS_INIT_ENABLE"):
        when_imported("torch", _prepare)


def _prepare(torch: ModuleType) -> None:
    from memsaver.drop_in.tms.process import prepare

    prepare()


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(FOLDER)]) if name == PACKAGE else None
