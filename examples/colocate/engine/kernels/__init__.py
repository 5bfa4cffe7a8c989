"""The engine's kernels in Triton. Nothing here is imported where there is no GPU."""
