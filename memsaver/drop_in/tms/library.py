"""The library to preload, by its C functions: the settings of the calling thread's allocations."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from memsaver._results import in_thread
from memsaver.drop_in import DropInError
from memsaver.drop_in.startup import LIBRARIES

log = logging.getLogger("memsaver")

_FLAGS: Final = ("interesting_region", "enable_cpu_backup", "enable_disk_backup", "retain_cpu_backup")
_NAMES: Final = ("current_tag", "cpu_backup_backend")


@dataclass(frozen=True)
class Settings:
    """The settings of a thread's allocations.

    Attributes:
        tag: Of their region.
        cpu_backup: Whether a pause keeps the contents in host memory.
        disk_backup: Whether a pause keeps the contents on disk.
        backend: The kind of host memory, by torch_memory_saver's name.
        interesting: Whether they lie in a region.
    """

    tag: str = "default"
    cpu_backup: bool = False
    disk_backup: bool = False
    backend: str = "pinned"
    interesting: bool = True

    @property
    def policy(self) -> str:
        return "host" if self.cpu_backup else "disk" if self.disk_backup else "none"


def _c_function(name: str) -> Any:
    """``tms_pause`` or ``tms_resume``. It returns 0 if it succeeds: C code gets no exceptions."""

    def call(tag: bytes | None) -> int:
        try:
            saver = import_module("torch_memory_saver").torch_memory_saver
            getattr(saver, name)(tag and tag.decode())
            return 0
        except Exception:
            log.exception("tms_%s", name)
            return 1

    return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)(call)


_C_FUNCTIONS = _c_function("pause"), _c_function("resume")  # kept, since the library has pointers to them


class Library:
    """torch_memory_saver's ``BinaryWrapper``: ``cdll`` has its C functions.

    ``initial``: the settings of a thread that has entered no region, by the variables. Raises DropInError if one has a
    wrong value. The original ends the process.
    """

    def __init__(self, cdll: Any) -> None:
        self.cdll = cdll
        for names, kind in (_FLAGS, ctypes.c_bool), (_NAMES, ctypes.c_char_p):
            for name in names:
                getattr(cdll, f"tms_set_{name}").argtypes = [kind]
                getattr(cdll, f"tms_get_{name}").restype = kind
        for name in ("tms_pause", "tms_resume"):
            getattr(cdll, name).argtypes = [ctypes.c_char_p]
        cdll.set_memory_margin_bytes.argtypes = [ctypes.c_uint64]
        cdll.memsaver_preload_problem.restype = ctypes.c_char_p
        if (problem := cdll.memsaver_preload_problem()) is not None:
            raise DropInError(problem.decode())
        cdll.memsaver_preload_calls(*_C_FUNCTIONS)
        self.initial = in_thread(self.settings, "memsaver settings").result()  # a new thread has them

    @classmethod
    def preloaded(cls) -> Library:
        """The library in ``LD_PRELOAD``. Raises DropInError if the process was started without it."""
        cdll = ctypes.CDLL(None)
        if not hasattr(cdll, "memsaver_preload_calls"):
            raise DropInError(
                "the hook mode 'preload' needs memsaver's library in LD_PRELOAD, which is "
                f"{os.environ.get('LD_PRELOAD', '')!r}: start the process within "
                "torch_memory_saver.configure_subprocess(), or set torch_memory_saver.hook_mode = 'torch'"
            )
        return cls(cdll)

    @classmethod
    def beside(cls) -> Library:
        """The library of the hook mode ``"torch"``: it routes nothing."""
        return cls(ctypes.CDLL(str(LIBRARIES / "torch_memory_saver_hook_mode_torch.abi3.so")))

    def settings(self) -> Settings:
        """Those of the calling thread."""
        get = self.cdll
        return Settings(
            get.tms_get_current_tag().decode(),
            get.tms_get_enable_cpu_backup(),
            get.tms_get_enable_disk_backup(),
            get.tms_get_cpu_backup_backend().decode(),
            get.tms_get_interesting_region(),
        )

    @contextmanager
    def applied(self, settings: Settings) -> Iterator[None]:
        """Applies settings to the calling thread within the with statement."""
        former = self.settings()
        self._apply(settings)
        try:
            yield
        finally:
            self._apply(former)

    def _apply(self, settings: Settings) -> None:
        self.cdll.tms_set_current_tag(settings.tag.encode())
        self.cdll.tms_set_enable_cpu_backup(settings.cpu_backup)
        self.cdll.tms_set_enable_disk_backup(settings.disk_backup)
        self.cdll.tms_set_cpu_backup_backend(settings.backend.encode())
        self.cdll.tms_set_interesting_region(settings.interesting)
