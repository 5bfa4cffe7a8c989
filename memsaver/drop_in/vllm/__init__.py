"""vLLM's sleep mode on memsaver: a subclass of ``CuMemAllocator`` in place of the original."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib import metadata
from types import ModuleType

from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.imports import when_imported
from memsaver.drop_in.vllm import sources, worker
from memsaver.drop_in.vllm.sources import Behaviour

# Packages that replace methods of CuMemAllocator by functions over the handles of its C library.
_OTHER_PATCHES = ("unsloth_zoo",)


def version() -> str:
    return metadata.version("vllm")


def check(version: str) -> Behaviour:
    """The behaviour of the installed vLLM. Raises DropInError unless it can be replaced."""
    check_patches()
    return sources.check(version)


def check_patches() -> None:
    """Raises DropInError if another package that patches the allocator has been imported."""
    present = [name for name in _OTHER_PATCHES if name in sys.modules]
    if present:
        raise DropInError(
            f"{present[0]} patches {sources.MODULE} as well; import it in another process, or unset MEMSAVER_DROP_IN"
        )


def replace(behaviour: Behaviour, activate: Callable[[Callable[[], tuple[str, ...]], logging.Logger], None]) -> None:
    """Replaces the allocator as soon as its module is imported, which loads CUDA: not before."""

    def install(module: ModuleType) -> None:
        from memsaver.drop_in.vllm import allocator

        def replace_names() -> tuple[str, ...]:
            check_patches()
            return allocator.install(module, behaviour)

        activate(replace_names, module.logger)

    when_imported(sources.MODULE, install)
    when_imported(sources.WORKER_MODULE, worker.install)
    when_imported("vllm.device_allocator.sleep_mode_backend", _register_backend)


def _register_backend(module: ModuleType) -> None:
    """``--sleep-mode-backend memsaver``. vLLM 0.24 has no such module."""
    module.SleepModeBackendFactory.register_backend("memsaver", "memsaver.drop_in.vllm.backend", "MemsaverBackend")
