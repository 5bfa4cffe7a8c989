"""The guest of the stacks of the threads that run kernels."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from memsaver import _core
from memsaver._guests import Guest
from memsaver.errors import Error, gib

log = logging.getLogger("memsaver")


class Stacks(Guest):
    """Returns the memory by which CUDA has enlarged the stacks of all threads.

    CUDA has stacks for all threads that a device can run at once. A kernel that needs a larger stack enlarges all of
    them, and they stay so large. NCCL's kernels are an example: see docs/how-to.md. A pause of
    the tags sets the limit of a stack to its first value. The next kernel that needs more enlarges the stacks again, in
    a replay of a graph too, and waits for the device meanwhile. Without a GPU the guest does nothing.

    The first value is that of the library's first use of a device. So make a region, or call ``memsaver.stats()``,
    before the first collective. A limit that the program raises by ``cudaDeviceSetLimit()`` after this first use is
    lowered too, and nothing restores it. CUDA cannot know the need of recursive kernels. Do not use the guest in these
    two cases.

    Args:
        tags: As for ``memsaver.Guest``.
        name: As for ``memsaver.Guest``.
        order: As for ``memsaver.Guest``. The default lets this guest leave after others, whose last kernels may need
            large stacks.

    Examples:
        >>> stacks = memsaver.guests.Stacks("params")
        >>> memsaver.register(stacks)
        >>> done = memsaver.pause("params")
        >>> memsaver.unregister(stacks)
    """

    def __init__(self, tags: str | Iterable[str], *, name: str = "stacks", order: int = 100) -> None:
        super().__init__(name, tags, order=order)

    def prepare(self) -> None:
        """Refuses a pause that would break a capture.

        Raises:
            memsaver.Error: A graph is being captured.
        """
        if _core.capturing():
            raise Error("a graph is being captured, expected the pause after its end")

    def leave(self) -> None:
        """Sets the limit of a stack on all devices in use. Does nothing if a capture has begun since ``prepare()``.

        Raises:
            DriverError: A call of the driver failed.
        """
        log.debug("the stacks of threads have returned %s", gib(_core.reset_stacks()))

    def come_back(self) -> None:
        """Does nothing: CUDA enlarges the stacks when a kernel needs it."""
