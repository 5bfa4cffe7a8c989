"""Which guest releases the memory of NCCL: suspended communicators, or groups that are opened anew."""

from __future__ import annotations

from collections.abc import Iterable

import torch._C._distributed_c10d as c10d

from memsaver.guests import nccl
from memsaver.guests.communicators import Communicators
from memsaver.guests.process_groups import ProcessGroups


def for_nccl(tags: str | Iterable[str], *, order: int = 0, timeout: float = 20.0) -> Communicators | ProcessGroups:
    """Makes the guest for the memory of NCCL in torch's process groups. It is not registered yet.

    Call it before ``torch.distributed.init_process_group()``, after the import of torch, which loads NCCL.

    Args:
        tags: As for ``memsaver.Guest``.
        order: As for ``memsaver.Guest``.
        timeout: As for the guest that is made.

    Returns:
        ``Communicators`` if NCCL can suspend (2.29.7 and newer) and torch returns its communicators, else
        ``ProcessGroups``.

    Raises:
        memsaver.Error: As from ``ProcessGroups``.

    Examples:
        >>> guest = memsaver.guests.for_nccl("params")
        >>> type(guest).__name__  # without NCCL
        'ProcessGroups'
        >>> guest.unwrap()
    """
    found = nccl.loaded()
    backend = getattr(c10d, "ProcessGroupNCCL", None)  # builds without CUDA lack it
    if found is not None and found.can_suspend and hasattr(backend, "_comm_ptr"):
        return Communicators(tags, order=order, library=found.path, timeout=timeout)
    return ProcessGroups(tags, order=order, timeout=timeout)
