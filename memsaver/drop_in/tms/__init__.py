"""torch_memory_saver's API on memsaver: a package ``torch_memory_saver`` in place of the original."""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Final

from memsaver_drop_in import when_imported

from memsaver.drop_in import DropInError, Hook
from memsaver.drop_in.startup import PACKAGES

PACKAGE: Final = "torch_memory_saver"
# Processes of SGLang receive weights from others, through torch.multiprocessing. SGLang's unpickler refuses classes and
# functions of modules that are not in its list.
SGLANG: Final = "sglang.srt.utils.common"
HANDLES: Final = "memsaver._torch.ipc."  # of the names in a pickled handle


def version() -> str:
    """Of the API."""
    return "0.0.10"


def check(version: str) -> None:
    """Raises DropInError if the original package has been imported."""
    if PACKAGE in sys.modules:
        raise DropInError(
            f"{PACKAGE} ({getattr(sys.modules[PACKAGE], '__file__', None)}) is imported already: set MEMSAVER_DROP_IN "
            "before Python starts"
        )


def hooks() -> list[Hook]:
    """The next import of the package finds memsaver's."""
    if os.environ.get("TMS_INIT_ENABLE"):
        when_imported("torch", _manage)
    return [(PACKAGE, lambda module: (PACKAGE,), _find), (SGLANG, _allow_handles, None)]


def _find(name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(name, [str(PACKAGES)])


def _manage(torch: ModuleType) -> None:
    from memsaver.drop_in.tms.routing import manage

    manage()


def _allow_handles(module: ModuleType) -> tuple[()]:
    unpickler = getattr(module, "SafeUnpickler", None)
    prefixes = getattr(unpickler, "ALLOWED_MODULE_PREFIXES", None)
    if isinstance(prefixes, set):  # else this version of SGLang has no such list
        prefixes.add(HANDLES)
    return ()
