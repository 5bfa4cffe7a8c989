from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memsaver.drop_in.tms import saver

from .hooks.mode_preload import configure_subprocess
from .utils import is_xpu

__all__ = ["TorchMemorySaver", "configure_subprocess"]


class TorchMemorySaver(saver.TorchMemorySaver):
    __doc__ = saver.TorchMemorySaver.__doc__

    @contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        if cpu_backup_backend is not None and is_xpu():
            raise ValueError(f"cpu_backup_backend {cpu_backup_backend!r} is not supported on XPU")
        if cpu_backup_backend == "mmap" and getattr(torch.version, "hip", None):
            raise ValueError("cpu_backup_backend 'mmap' is not supported on ROCm")
        with super().region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend):
            yield

    region.__doc__ = saver.TorchMemorySaver.region.__doc__
