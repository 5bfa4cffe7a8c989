"""The classes of torch_memory_saver 0.0.10 over regions."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from memsaver import _core, transitions
from memsaver._torch.graphs import check_registration
from memsaver.broker import pool_client
from memsaver.drop_in.tms import check_passes
from memsaver.drop_in.tms.library import Settings
from memsaver.drop_in.tms.regions import DefaultPool, Retained, saver_regions
from memsaver.drop_in.tms.routing import PreloadRouting, TorchRouting, set_disk_dir, set_initial_disk_dir
from memsaver.regions import Region, cpu_backup, owning

HOOK_MODES: Final = ("preload", "torch")
_BACKENDS = (None, "pinned", "mmap")
_MEMORY_S: Final = 60.0  # seconds that a resume waits for memory


class TorchMemorySaver:
    """The object ``torch_memory_saver.torch_memory_saver``.

    Calls for which the original ends the process raise an error, or are no-ops where callers rely on that: a pause of a
    paused tag, a resume of an active one, and ``get_cpu_backup()`` of a tensor outside of regions.
    """

    def __init__(self) -> None:
        self._impl_ctor_kwargs: dict[str, Any] = {}
        self._impl: TorchMemorySaverImpl | None = None
        self._moving = threading.RLock()  # held over a pause and over a resume

    # Settings

    def _set_hook_mode(self, mode: str) -> None:
        if self._impl is not None:
            raise AttributeError("hook_mode was used already: set it before the first use of torch_memory_saver")
        if mode not in HOOK_MODES:
            raise ValueError(f"hook_mode is {mode!r}, expected one of {', '.join(map(repr, HOOK_MODES))}")
        self._impl_ctor_kwargs["hook_mode"] = mode

    hook_mode = property(None, _set_hook_mode, doc='``"preload"``, the default, or ``"torch"``. It can only be set.')

    @property
    def enabled(self) -> bool:
        """Always True."""
        return True

    def _get_margin(self) -> int:
        raise NotImplementedError("memory_margin_bytes can only be set")

    def _set_margin(self, nbytes: int) -> None:
        if not isinstance(nbytes, int) or isinstance(nbytes, bool) or nbytes < 0:
            raise ValueError(f"memory_margin_bytes is {nbytes!r}, expected a number of bytes, 0 or more")
        self._ensure_initialized().routing.set_margin(nbytes)

    memory_margin_bytes = property(_get_margin, _set_margin)

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether get_cpu_backup() finds the contents of the last pause after the resume: TMS_RETAIN_CPU_BACKUP."""
        return bool(self._ensure_initialized().routing.library.cdll.tms_get_retain_cpu_backup())

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, wanted: bool) -> None:
        if not isinstance(wanted, bool):
            raise TypeError(f"retain_cpu_backup is {wanted!r}, expected True or False")
        self._ensure_initialized().routing.library.cdll.tms_set_retain_cpu_backup(wanted)

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """The directory of backups on disk. It is created if it does not exist."""
        self._ensure_initialized()
        set_disk_dir(path)

    # Regions

    @contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Allocates in the region of a tag within the with statement.

        Args:
            tag: A tag, also a paused one.
            enable_cpu_backup: Whether a pause keeps the contents in host memory.
            enable_disk_backup: Whether a pause keeps the contents on disk.
            cpu_backup_backend: ``"pinned"``, ``"mmap"`` or None for TMS_INIT_CPU_BACKUP_BACKEND. The memory is pinned
                with both. With ``"mmap"`` it returns to the system after the resume.

        Raises:
            AssertionError: Both backups are enabled.
            ValueError: The backend is unknown, or there is no backup in host memory.
            TypeError: The tag is no string.
        """
        settings = self._settings(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        with self._ensure_initialized().routing.into(settings):
            yield

    @contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        cpu_backup_backend: str | None = None,
    ) -> Iterator[None]:
        """Captures a graph, as ``torch.cuda.graph()``, with new segments in the region of a tag.

        Raises:
            AssertionError: The hook mode is not ``"preload"``.
            TypeError, ValueError: As :meth:`region`.
            memsaver.ConfigError: As :func:`memsaver.graph`: NCCL would register the buffers of graphs.
        """
        settings = self._settings(tag, enable_cpu_backup, False, cpu_backup_backend)
        check_registration()
        impl = self._ensure_initialized()
        assert isinstance(impl.routing, PreloadRouting), "pausable CUDA graphs need hook_mode = 'preload'"
        modes: Any = {"pool": pool, "stream": stream, "capture_error_mode": capture_error_mode}
        with impl.routing.calls_into(settings), torch.cuda.graph(cuda_graph, **modes):
            yield

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Allocates outside of regions within the with statement, also while all regions are paused."""
        with self._ensure_initialized().routing.outside():
            yield

    def pause(self, tag: str | None = None) -> None:
        """Releases the memory of a tag, or of all tags if it is None or empty. An unknown tag is a no-op.

        Raises as :func:`memsaver.pause`.
        """
        impl = self._ensure_initialized()
        with self._moving:
            # Empty regions stay active, for allocations while the others are paused.
            chosen = [each for each in self._chosen(tag) if each.state == "active" and each.allocated_bytes]
            for device in {each.device for each in chosen}:
                pool_client.join(device)
            with impl.default_pool.leaving(chosen):
                # Contents that a lazy pause leaves on the device could not be retained.
                lazy = False if self.retain_cpu_backup else None
                impl.retained.drop(chosen)
                transitions.pause(chosen, lazy=lazy)

    def resume(self, tag: str | None = None) -> None:
        """Maps the memory of a tag again, or of all tags, with the contents that were kept.

        Waits up to a minute for memory that other processes hold: callers of the original end if a resume fails. Raises
        as :func:`memsaver.resume`.
        """
        impl = self._ensure_initialized()
        with self._moving:
            chosen = [each for each in self._chosen(tag) if each.state != "active"]
            if self.retain_cpu_backup:
                impl.retained.keep(chosen)
            try:
                transitions.resume(chosen, memory_timeout=_MEMORY_S)
            finally:  # some errors come when the regions are active
                impl.default_pool.return_threads()
            if not self.retain_cpu_backup and saver_regions.unpinned.intersection(chosen):
                _core.release_host_memory()

    def _chosen(self, tag: str | None) -> list[Region]:
        if tag is not None and not isinstance(tag, str):
            raise TypeError(f"tag is {tag!r}, expected a string or None")
        return saver_regions.of(tag) if tag else [each for _, each in saver_regions.all()]

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """The contents of a tensor whose region is paused.

        Args:
            x: A contiguous tensor.
            zero_copy: Whether the result is a view of the backup, which is valid until the resume.

        Returns:
            A CPU tensor. None if the tensor is in no region, if its region is active and no backup was retained, or if
            the backup is on disk.

        Raises:
            AssertionError: The tensor is not contiguous.
            BackupError: The region was paused without a backup.
        """
        assert x.is_contiguous(), f"x has strides {x.stride()}, expected a contiguous tensor"
        region = owning(x.data_ptr())
        if region is None or region.backup == "disk":
            return None
        if region.state == "active":
            found = self._ensure_initialized().retained.find(x, region)
            return found if found is None or zero_copy else found.clone()
        return cpu_backup(x, clone=not zero_copy)

    def _settings(self, tag: str, cpu: bool, disk: bool, backend: str | None) -> Settings:
        """The settings of a region with these options. Raises as region()."""
        if not isinstance(tag, str):
            raise TypeError(f"tag is {tag!r}, expected a string")
        assert not (cpu and disk), "enable_cpu_backup and enable_disk_backup are both set, expected one at most"
        if backend not in _BACKENDS:
            raise ValueError(f"cpu_backup_backend is {backend!r}, expected 'pinned', 'mmap' or None")
        if backend is not None and not cpu:
            raise ValueError(f"cpu_backup_backend {backend!r} requires enable_cpu_backup")
        initial = self._ensure_initialized().initial
        return Settings(tag, cpu, disk, backend or initial.backend)

    def _ensure_initialized(self) -> TorchMemorySaverImpl:
        with self._moving:
            if self._impl is None:
                self._impl = TorchMemorySaverImpl(**self._impl_ctor_kwargs)
                del self._impl_ctor_kwargs
            return self._impl


class TorchMemorySaverImpl:
    """The state of the saver from its first use on."""

    def __init__(self, hook_mode: str = "preload") -> None:
        self.routing: PreloadRouting | TorchRouting = PreloadRouting() if hook_mode == "preload" else TorchRouting()
        self.initial = self.routing.library.initial
        self.default_pool = DefaultPool(self.initial)
        self.retained = Retained()
        self._binary_wrapper = self.routing.library  # by its original name: callers use its C functions
        set_initial_disk_dir(self.initial)
        check_passes(saver_regions.check_written)
