"""Where contents wait while their regions are paused: to be read, written to, and given back."""

from __future__ import annotations

from typing import Any

from memsaver import _core, regions


def cpu_backup(tensor: Any, *, clone: bool = False) -> Any:
    """The contents of a torch tensor whose region is paused, as a CPU tensor of its shape, strides and dtype.

    Without ``clone`` it lies where the contents wait, in pinned host memory: nothing is copied, and what is written to
    it before the resume arrives with it. The memory stays as long as the tensor; after the resume it is the tensor's
    alone (a frozen region that resumes while one is held makes a new copy at its next pause). With ``clone`` it is a
    copy; backups on disk can be had so only.

    Raises ValueError for a tensor in no region, memsaver.Error where its region is not paused, and BackupError where
    there is no backup of it.
    """
    return regions.adapter().cpu_backup(tensor, bool(clone))


def release_host_memory() -> int:
    """Gives back pinned host memory, and files, that hold no contents now; returns their bytes.

    The next pause that needs some makes it again; so does the background once a region with ``backup="host"`` grows.
    """
    return int(_core.release_host_memory())
