"""The guest of cuBLAS's workspaces, which torch keeps for each stream."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from memsaver import _core
from memsaver._guests import Guest
from memsaver._torch.pools import private
from memsaver.errors import Error


class Workspaces(Guest):
    """Releases the workspaces of cuBLAS and cuBLASLt, and the blocks that torch's default pool holds free.

    torch makes a workspace anew when a stream needs one. So everything happens before memory is reserved, and a switch
    can use this memory. Do not use this guest beside CUDA graphs whose capture used a workspace that had been made
    before it, as after a warm-up on the stream of the capture: such graphs write to the released memory.

    Args:
        tags: As for ``memsaver.Guest``.
        name: As for ``memsaver.Guest``.
        order: As for ``memsaver.Guest``.

    Examples:
        >>> workspaces = memsaver.guests.Workspaces("params")
        >>> memsaver.register(workspaces)
        >>> done = memsaver.pause("params")
        >>> memsaver.unregister(workspaces)
    """

    def __init__(self, tags: str | Iterable[str], *, name: str = "cuBLAS workspaces", order: int = 0) -> None:
        super().__init__(name, tags, order=order)

    def prepare(self) -> None:
        """Releases the workspaces.

        Raises:
            memsaver.Error: A graph is being captured.
        """
        if not torch.cuda.is_initialized():
            return
        if _core.capturing():
            raise Error("a graph is being captured, expected the pause after its end")
        private("_cuda_clearCublasWorkspaces")()  # of both libraries
        torch.cuda.empty_cache()

    def leave(self) -> None:
        """Does nothing: ``prepare()`` has released the workspaces."""

    def come_back(self) -> None:
        """Does nothing: torch makes workspaces when it needs them."""
