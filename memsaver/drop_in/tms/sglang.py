"""SGLang's unpickler of weights: it takes the handles of tensors in regions.

Its processes receive weights from others, through torch.multiprocessing. The unpickler refuses classes and functions of
modules that are not in its list.
"""

from __future__ import annotations

from types import ModuleType
from typing import Final

from memsaver.drop_in.imports import when_imported

MODULE: Final = "sglang.srt.utils.common"
PREFIX: Final = "memsaver._torch.ipc."  # of the names in a pickled handle


def allow_handles() -> None:
    """Extends the list now, or when SGLang is imported."""
    when_imported(MODULE, _extend)


def _extend(module: ModuleType) -> None:
    unpickler = getattr(module, "SafeUnpickler", None)
    prefixes = getattr(unpickler, "ALLOWED_MODULE_PREFIXES", None)
    if isinstance(prefixes, set):  # else this version of SGLang has no such list
        prefixes.add(PREFIX)
