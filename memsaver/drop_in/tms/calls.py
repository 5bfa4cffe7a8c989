"""Functions of the library to preload that need Python: C code calls them, and gets no exceptions."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

from memsaver.regions import owning

log = logging.getLogger("memsaver")

_FAILED = 1  # the C functions return 0 if they succeed


class Calls:
    """The methods are named as the members of ``Calls`` in csrc/preload/preload.c."""

    def pause(self, tag: bytes | None) -> int:
        return self._called("tms_pause", lambda saver: saver.pause(tag and tag.decode()))

    def resume(self, tag: bytes | None) -> int:
        return self._called("tms_resume", lambda saver: saver.resume(tag and tag.decode()))

    def set_disk_dir(self, path: bytes) -> int:
        return self._called("tms_set_disk_backup_dir", lambda saver: saver.set_disk_backup_dir(path.decode()))

    def backup(self, address: int | None, nbytes: int) -> int:
        """The address of contents in host memory; 0: there are none."""
        try:
            region = owning(address or 0)
            if region is None or region.backup == "disk":
                return 0
            if region.state == "active":
                part = _saver()._retained.part(address, nbytes, region)
                return 0 if part is None else int(part.data_ptr())
            import torch

            return torch.from_dlpack(region._core.backup_view(address, nbytes)).data_ptr()
        except Exception:
            log.exception("tms_get_cpu_backup_pointer")
            return 0

    def retain(self, wanted: int) -> int:
        def call(saver: Any) -> None:
            if wanted >= 0:
                saver.retain_cpu_backup = bool(wanted)

            found.append(int(saver.retain_cpu_backup))

        found: list[int] = []
        self._called("tms_set_retain_cpu_backup", call)
        return found[0] if found else 0

    def _called(self, name: str, call: Callable[[Any], None]) -> int:
        try:
            call(_saver())
            return 0
        except Exception:
            log.exception("%s", name)
            return _FAILED


def _saver() -> Any:
    return import_module("torch_memory_saver").torch_memory_saver
