"""vLLM's sleep mode on memsaver: a subclass of ``CuMemAllocator`` in place of the original."""

from __future__ import annotations

import sys
from importlib import metadata
from types import ModuleType

from memsaver.drop_in import DropInError, Hook
from memsaver.drop_in.vllm import sources, worker
from memsaver.errors import checked

# A package that replaces methods of CuMemAllocator by functions over the handles of its C library.
_OTHER_PATCH = "unsloth_zoo"


def version() -> str:
    return metadata.version("vllm")


def check(version: str) -> None:
    """Raises DropInError unless the allocator of the installed vLLM can be replaced."""
    check_patches()
    try:
        sources.check(version)
    except DropInError as error:
        text = f"{error}. Use another version of vLLM, or unset MEMSAVER_DROP_IN"
        raise DropInError(checked(text)) from None


def check_patches() -> None:
    """Raises DropInError if another package that patches the allocator has been imported."""
    if _OTHER_PATCH in sys.modules:
        raise DropInError(
            f"{_OTHER_PATCH} patches {sources.MODULE} as well; import it in another process, or unset MEMSAVER_DROP_IN"
        )


def hooks() -> list[Hook]:
    """The allocator is replaced as soon as its module is imported, which loads CUDA: not before."""
    return [(sources.MODULE, _replace_allocator, None), (sources.WORKER_MODULE, worker.install, None)]


def _replace_allocator(module: ModuleType) -> tuple[str, ...]:
    from memsaver.drop_in.vllm import allocator

    return allocator.install(module)
