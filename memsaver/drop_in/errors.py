"""The error of drop-ins."""

from __future__ import annotations

from memsaver.errors import Error


class DropInError(Error):
    """A drop-in cannot take the place of a library, or its ranks do not agree.

    Attributes:
        rank: The rank that has no drop-in, or another one. None where the error concerns this process alone.
    """

    rank: int | None = None
