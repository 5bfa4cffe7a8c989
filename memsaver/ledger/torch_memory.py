"""torch's memory outside of regions."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import Any

from memsaver.ledger.rows import Part

log = logging.getLogger("memsaver")


def parts(device: str) -> list[Part]:
    found: list[Part] = _figure("parts", device, [])
    return found


def nbytes(device: str) -> int:
    """The sum of parts(), without making a list of blocks."""
    return int(_figure("outside_bytes", device, 0))


def _figure(function: str, device: str, missing: Any) -> Any:
    """A figure of torch, if torch is loaded. ``missing``: the answer where torch, or this version of it, has none."""
    if "torch" not in sys.modules:
        return missing
    try:
        return getattr(import_module("memsaver._torch.ledger"), function)(device)
    except Exception as error:
        log.debug("torch does not tell its memory on %s: %r", device, error)
        return missing
