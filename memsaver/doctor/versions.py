"""The versions of other libraries that memsaver was run with, and those that it was only read against.

README.md, docs/limits.md and docs/frameworks.md say the same: tests/unit/test_doctor.py compares them.
"""

from __future__ import annotations

import re
from typing import Final

TORCH_OLDEST: Final = (2, 8)
TORCH_ON_GPUS: Final = ("2.11",)
TORCH_ON_TEST_DRIVER: Final = ("2.8", "2.11", "2.13", "2.15")
TORCH_BESIDE_EXPANDABLE: Final = (2, 10)  # from here on regions and expandable segments are possible together
CUDA_OLDEST: Final = 12
VLLM_ON_GPUS: Final = ("0.25.0",)
VLLM_ALLOCATOR: Final = ("0.23", "0.33")  # the first and the last
SGLANG_ON_GPUS: Final = ("0.5.17",)
SAVER: Final = "0.0.10"  # of torch_memory_saver


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: (2, 11, 0) of ``"2.11.0+cu128"``. Empty if it has none."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
