"""The begin of the count of NCCL's memory: see csrc/driver/counted_calls.h."""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any

from memsaver import _core
from memsaver.errors import Error
from memsaver.guests import nccl
from memsaver.ledger import nccl_memory

log = logging.getLogger("memsaver")

_NOT_COUNTED = "the memory of NCCL is not counted, so that it may be in 'unknown'"

_lock = threading.Lock()
_over = False  # the count runs, or cannot


def begin_if_used(device: str | None) -> bool:
    """As ``begin()``, once torch.distributed has a group with NCCL. torch is not loaded."""
    return _over or (_has_groups() and begin(device))


def begin(device: str | None = None) -> bool:
    """Begins to count the memory that NCCL takes, once for the process, as soon as this can be done.

    NCCL must have its pointers to the driver's functions. If it has none yet, it is initialised by an allocation and
    its release, on a device with a context: on another one this would make a context. Nothing is done during a capture.

    Args:
        device: The device, as ``"cuda:0"``. None: the current one of CUDA.

    Returns:
        Whether nothing is left to do: the memory is counted, or cannot be. ``ledger.nccl_memory.note`` has the reason.
    """
    global _over
    if _over:
        return True
    with _lock:
        index = None if _over else _ready(device)
        library = None if index is None else nccl.loaded()
        if index is None or library is None:
            return _over
        nccl_memory.note = _begin(library, index)
        _over = True
    if nccl_memory.note:
        log.info("%s", nccl_memory.note)
    return True


def _begin(library: nccl.Library, index: int) -> str:
    """Returns a note if not all of NCCL's memory is counted from now on."""
    import torch

    note = "NCCL was initialised before its memory was counted: that of earlier communicators is in 'unknown'"
    with torch.cuda.device(index):
        try:
            if _core.count_nccl(library.path):
                library.allocate_and_free(lambda: None)
                if reason := _core.count_nccl(library.path):
                    return f"{_NOT_COUNTED}: {reason}"
                note = ""
            _, before = _core.nccl_bytes(index)  # taken for callers, as the following
            seen: list[int] = []
            library.allocate_and_free(lambda: seen.append(_core.nccl_bytes(index)[1]))
        except Error as error:
            return f"{_NOT_COUNTED}: {error}"
    if seen[0] <= before:
        return f"{_NOT_COUNTED}: NCCL takes it by cudaMalloc, as with NCCL_CUMEM_ENABLE=0"
    return note


def _ready(device: str | None) -> int | None:
    """The number of a CUDA device on which NCCL can be initialised now. None: there is none."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized() or (device is not None and not device.startswith("cuda:")):
        return None
    index = torch.cuda.current_device() if device is None else int(device.removeprefix("cuda:"))
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)  # builds without CUDA lack it
    if has_context is None or not has_context(index):
        return None
    return None if _core.capturing() or torch.cuda.is_current_stream_capturing() else int(index)


def _has_groups() -> bool:
    """Whether torch.distributed has a group with NCCL."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not c10d.is_initialized():
        return False
    return any("nccl" in str(backends).lower() for backends in list(c10d._world.pg_backend_config.values()))
