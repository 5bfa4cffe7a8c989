"""The engine's kernels in Triton. Nothing here is imported where there is no GPU."""

from . import fused, paged_decode, paged_prefill, sampling

__all__ = ["fused", "paged_decode", "paged_prefill", "sampling"]
