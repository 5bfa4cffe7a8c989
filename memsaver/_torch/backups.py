"""Backups of paused regions: CPU tensors over their contents, and the release of idle host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memsaver import _core
from memsaver._adapter import adapter
from memsaver.regions import all_regions

if TYPE_CHECKING:
    import torch


def cpu_backup(tensor: torch.Tensor, *, clone: bool = False) -> torch.Tensor:
    """Returns the contents of a torch tensor whose region is paused or lost, as a CPU tensor.

    A region is lost when its device's context dies. Its contents on the host or on disk can still be read.

    Args:
        tensor: A tensor in a region. A view is allowed.
        clone: False: the result is a view of the backup in pinned host memory. Nothing is copied, and the next resume
            copies writes to it to the device. The memory is kept as long as the result; after the resume, only the
            result uses it. If a frozen region resumes while a result is held, its next pause makes another copy.
            True: the result is a copy. Backups on disk need this.

    Returns:
        A CPU tensor with the shape, strides and dtype of ``tensor``.

    Raises:
        TypeError: ``tensor`` is not a plain torch.Tensor.
        ValueError: The tensor is in no region.
        memsaver.Error: The region is neither paused nor lost.
        BackupError: There is no backup. Or ``clone`` is False, and the backup is on disk, or lies in several pieces and
            the driver pins no memory to join them.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> tensor = weights.empty((4,)).fill_(1)
        >>> _ = weights.pause()
        >>> memsaver.cpu_backup(tensor)[0] = 5
        >>> _ = weights.resume()
        >>> tensor
        tensor([5., 1., 1., 1.])
    """
    return adapter().cpu_backup(tensor, bool(clone))


def release_host_memory() -> int:
    """Releases pinned host memory, and files, that hold no contents now.

    The next pause that needs host memory allocates it again. The background does so earlier if a region with
    ``backup="host"`` grows.

    Returns:
        The bytes that were released.

    Examples:
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> tensor = weights.empty((1 << 20,), torch.uint8)
        >>> _ = weights.pause(), weights.resume()
        >>> memsaver.release_host_memory() >= 1 << 20
        True
    """
    common = sum(each._common.leave() for each in all_regions() if each._common is not None)
    return int(_core.release_host_memory()) + common
