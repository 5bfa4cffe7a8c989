"""The library to preload, by its C functions: the settings of the calling thread's allocations."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memsaver import _core
from memsaver.drop_in.errors import DropInError

FOLDER: Final = Path(_core.__file__).parent / "drop_in" / "tms" / "packages"
_STEM: Final = "torch_memory_saver_hook_mode_"
TORCH_MODE: Final = FOLDER / "torch_memory_saver_hook_mode_torch.abi3.so"


def preload_variable(library: str, former: str) -> str:
    """``LD_PRELOAD`` with this library first. Other libraries stay, but for those of torch_memory_saver."""
    others = [each for each in former.split(":") if each and not os.path.basename(each).startswith(_STEM)]
    return ":".join([library, *others])


@dataclass(frozen=True)
class Settings:
    """Tag and policy of allocations. ``backend``: the kind of host memory, by torch_memory_saver's name."""

    tag: str = "default"
    cpu_backup: bool = False
    disk_backup: bool = False
    backend: str = "pinned"

    @property
    def policy(self) -> str:
        return "host" if self.cpu_backup else "disk" if self.disk_backup else "none"


class _Calls(ctypes.Structure):
    """The functions that the library calls in Python."""

    _fields_ = (
        ("pause", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)),
        ("resume", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)),
        ("set_disk_dir", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p)),
        ("backup", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64)),
        ("retain", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)),
    )


_served: list[_Calls] = []  # C code has pointers to their functions


class Library:
    """torch_memory_saver's ``BinaryWrapper``: ``cdll`` has its C functions."""

    def __init__(self, cdll: Any) -> None:
        self.cdll = cdll
        for kind in ("interesting_region", "enable_cpu_backup", "enable_disk_backup", "retain_cpu_backup"):
            getattr(cdll, f"tms_set_{kind}").argtypes = [ctypes.c_bool]
            getattr(cdll, f"tms_get_{kind}").restype = ctypes.c_bool
        for kind in ("current_tag", "cpu_backup_backend"):
            getattr(cdll, f"tms_set_{kind}").argtypes = [ctypes.c_char_p]
            getattr(cdll, f"tms_get_{kind}").restype = ctypes.c_char_p
        cdll.tms_set_disk_backup_dir.argtypes = [ctypes.c_char_p]
        for name in ("tms_pause", "tms_resume"):
            getattr(cdll, name).argtypes = [ctypes.c_char_p]
            getattr(cdll, name).restype = ctypes.c_int
        cdll.set_memory_margin_bytes.argtypes = [ctypes.c_uint64]
        cdll.tms_get_cpu_backup_pointer.argtypes = [ctypes.POINTER(ctypes.c_uint8), ctypes.c_uint64]
        cdll.tms_get_cpu_backup_pointer.restype = ctypes.POINTER(ctypes.c_uint8)
        cdll.memsaver_preload_calls.argtypes = [ctypes.POINTER(_Calls)]

    @classmethod
    def preloaded(cls) -> Library:
        """The library in ``LD_PRELOAD``.

        Raises DropInError if the process was started without it.
        """
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
        return cls(ctypes.CDLL(str(TORCH_MODE)))

    def serve(self, calls: Any) -> None:
        """Gives the functions that C code may call, of an object with the methods of ``_Calls``, to the library."""
        given = _Calls(*(kind(getattr(calls, name)) for name, kind in _Calls._fields_))
        _served.append(given)
        self.cdll.memsaver_preload_calls(ctypes.byref(given))

    # The settings of the thread

    @property
    def interesting(self) -> bool:
        return bool(self.cdll.tms_get_interesting_region())

    @property
    def settings(self) -> Settings:
        get = self.cdll
        return Settings(
            get.tms_get_current_tag().decode(),
            bool(get.tms_get_enable_cpu_backup()),
            bool(get.tms_get_enable_disk_backup()),
            get.tms_get_cpu_backup_backend().decode(),
        )

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> None:
        """Sets the tag and the policy of the thread's allocations. torch_memory_saver's method of this name."""
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_interesting_region(interesting_region)
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        if cpu_backup_backend is not None:
            self.cdll.tms_set_cpu_backup_backend(cpu_backup_backend.encode())
        self.cdll.tms_set_enable_disk_backup(enable_disk_backup)

    @contextmanager
    def applied(self, settings: Settings, interesting: bool = True) -> Iterator[None]:
        """Applies settings to the thread within the with statement."""
        former, was_interesting = self.settings, self.interesting
        self._apply(settings, interesting)
        try:
            yield
        finally:
            self._apply(former, was_interesting)

    def _apply(self, settings: Settings, interesting: bool) -> None:
        self.set_config(
            tag=settings.tag,
            interesting_region=interesting,
            enable_cpu_backup=settings.cpu_backup,
            cpu_backup_backend=settings.backend,
            enable_disk_backup=settings.disk_backup,
        )
