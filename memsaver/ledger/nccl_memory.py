"""NCCL's memory, which is counted as NCCL takes it: by a function that memsaver/__init__.py sets."""

from __future__ import annotations

from collections.abc import Callable


def _nothing(device: str | None) -> bool:
    return False


# Begins the count if torch.distributed has groups with NCCL. ``device``: one on which NCCL may be initialised, as
# "cuda:0"; None: the current one of CUDA. Returns whether nothing is left to do. memsaver/__init__.py sets it, because
# only that file imports both sides.
begin: Callable[[str | None], bool] = _nothing

note = ""  # the reason why memory of NCCL may have no row
