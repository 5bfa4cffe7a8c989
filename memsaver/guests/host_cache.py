"""The guest of torch's cache of pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from memsaver._guests import Guest

# In the order of preference. torch 2.8 has the first name in builds with CUDA, later versions have the second as well.
_NAMES = ("_host_emptyCache", "_accelerator_emptyHostCache")


class HostCache(Guest):
    """Releases the pinned host memory that torch keeps after its tensors were freed.

    torch pins memory anew when it needs it. So the memory is released before a pause reserves host memory for contents.

    Args:
        tags: As for ``memsaver.Guest``.
        name: As for ``memsaver.Guest``.
        order: As for ``memsaver.Guest``.

    Examples:
        >>> cache = memsaver.guests.HostCache("params")
        >>> memsaver.register(cache)
        >>> done = memsaver.pause("params")
        >>> memsaver.unregister(cache)
    """

    def __init__(self, tags: str | Iterable[str], *, name: str = "pinned host cache", order: int = 0) -> None:
        super().__init__(name, tags, order=order)

    def prepare(self) -> None:
        """Releases the cached blocks whose copies have ended."""
        if torch.cuda.is_initialized() and (release := _release()) is not None:
            release()

    def leave(self) -> None:
        """Does nothing: ``prepare()`` has released the cache."""

    def come_back(self) -> None:
        """Does nothing: torch pins memory when it needs it."""


def _release() -> Callable[[], None] | None:
    """torch's function, under the name that this version has."""
    return next((getattr(torch._C, name) for name in _NAMES if hasattr(torch._C, name)), None)
