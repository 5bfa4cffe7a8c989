"""Measurements of memsaver, one module each: `python -m benchmarks` lists them. `harness` has their common parts."""
