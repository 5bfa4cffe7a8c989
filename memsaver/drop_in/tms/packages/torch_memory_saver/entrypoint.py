import torch

from memsaver.drop_in.tms import saver

from .hooks.mode_preload import configure_subprocess
from .utils import is_xpu

__all__ = ["TorchMemorySaver", "configure_subprocess"]


class TorchMemorySaver(saver.TorchMemorySaver):
    __doc__ = saver.TorchMemorySaver.__doc__

    def _check_backend(self, backend: str | None) -> None:
        if backend is not None and is_xpu():
            raise ValueError(f"cpu_backup_backend {backend!r} is not supported on XPU")
        if backend == "mmap" and getattr(torch.version, "hip", None):
            raise ValueError("cpu_backup_backend 'mmap' is not supported on ROCm")
