"""torch's private functions in use, and its version, for faults and rules of it that differ."""

from __future__ import annotations

from typing import Any

import torch

from memsaver.errors import Error

RELEASE = tuple(int(each) for each in torch.__version__.split(".")[:2])


def private(name: str) -> Any:
    """A function of ``torch._C``. Raises memsaver.Error where torch lacks it."""
    found = getattr(torch._C, name, None)
    if found is None:
        text = f"this build of torch ({torch.__version__}) has no torch._C.{name}"
        raise Error(f"{text}, expected a build of torch 2.8 or newer with CUDA")
    return found
