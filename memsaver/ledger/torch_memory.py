"""torch's memory outside of regions, by functions that memsaver/__init__.py sets."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from memsaver.ledger.rows import Part

log = logging.getLogger("memsaver")


def _no_torch(device: str) -> list[Part]:
    return []


def _no_torch_bytes(device: str) -> int:
    return 0


# memsaver/__init__.py sets these, because only that file imports both sides. They must not load torch.
parts: Callable[[str], list[Part]] = _no_torch
nbytes: Callable[[str], int] = _no_torch_bytes  # the sum of parts(), without making a list of blocks


def read(figure: Callable[[str], Any], device: str, missing: Any) -> Any:
    """Figures of torch. Some versions and allocators of torch lack them: ``missing`` if the call raises."""
    try:
        return figure(device)
    except Exception as error:
        log.debug("torch does not tell its memory on %s: %r", device, error)
        return missing
