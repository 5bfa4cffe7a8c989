"""A kernel that reads at an address of another device."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_from(address, target, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = address.to(tl.pointer_type(tl.float32))
    tl.store(target + at, tl.load(there + at))
