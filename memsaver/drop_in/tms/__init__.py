"""torch_memory_saver's API on memsaver: a package ``torch_memory_saver`` in place of the original."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Final

from memsaver.drop_in import DropInError
from memsaver.drop_in.memsaver_drop_in import when_imported
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


def replace(activate: Callable[[Callable[[], tuple[str, ...]], logging.Logger], None]) -> None:
    """Lets the next import of the package find memsaver's."""
    when_imported(
        PACKAGE,
        lambda module: activate(lambda: (PACKAGE,), logging.getLogger("memsaver")),
        lambda name: PathFinder.find_spec(name, [str(PACKAGES)]),
    )
    when_imported(SGLANG, _allow_handles)
    if os.environ.get("TMS_INIT_ENABLE"):
        when_imported("torch", _manage)


def _manage(torch: ModuleType) -> None:
    from memsaver.drop_in.tms.routing import manage

    manage()


def _allow_handles(module: ModuleType) -> None:
    unpickler = getattr(module, "SafeUnpickler", None)
    prefixes = getattr(unpickler, "ALLOWED_MODULE_PREFIXES", None)
    if isinstance(prefixes, set):  # else this version of SGLang has no such list
        prefixes.add(HANDLES)
