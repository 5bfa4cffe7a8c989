"""``--sleep-mode-backend memsaver``: another name of the backend ``cumem`` once the drop-in is installed."""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import CuMemBackend


class MemsaverBackend(CuMemBackend):  # type: ignore[misc, unused-ignore]
    """Sleep and wake-up of ``CuMemAllocator``, which the drop-in has replaced."""
