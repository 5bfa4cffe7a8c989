"""The errors of groups over torch.distributed's store."""

from __future__ import annotations

from memsaver.errors import Error


class LostRankError(Error):
    """The process of a rank has ended, or its host cannot be reached.

    Attributes:
        process: The rank of the process in torch.distributed.

    Examples:
        >>> try:
        ...     raise memsaver.distributed.LostRankError("rank 3 has ended", process=3)
        ... except memsaver.Error as error:
        ...     print(error.process, error)
        3 rank 3 has ended
    """

    process: int
