"""Prints the places of methods in the table of torch's CUDA allocator, from wheels of torch with CUDA.

    pip download --no-deps --only-binary=:all: -d DIR torch==2.11.0 && python tools/torch_methods.py DIR/torch-*.whl

csrc/torch/torch_pools.cpp has these places for each release of torch that it accepts. Needs nm and readelf of binutils;
no GPU, and torch need not be installed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

METHODS = ("emptyCache", "releasePool", "getPoolUseCount")
ALLOCATOR = "c10::cuda::CUDACachingAllocator::Native::NativeCachingAllocator"
LIBRARY = "torch/lib/libc10_cuda.so"
HEADER = 2  # entries of a table before the first method
RELOCATION = re.compile(r"([0-9a-f]{16})\s+\S+\s+R_\w+_RELATIVE\s+([0-9a-f]+)")


def lines_of(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def places(library: str) -> dict[str, int]:
    """The place of each method in the table, from 0."""
    names: dict[int, str] = {}
    for line in lines_of("nm", "-C", library):
        address, _, name = line.partition(" ")
        if address:
            names[int(address, 16)] = name.partition(" ")[2]
    [table] = [address for address, name in names.items() if name == f"vtable for {ALLOCATOR}"]
    targets = {}
    for line in lines_of("readelf", "-rW", library):
        if found := RELOCATION.match(line):
            targets[int(found[1], 16)] = int(found[2], 16)
    result: dict[str, int] = {}
    place = 0
    while (target := targets.get(table + 8 * (HEADER + place))) is not None or len(result) < len(METHODS):
        name = names.get(target or 0, "").removeprefix(f"{ALLOCATOR}::").partition("(")[0]
        if name in METHODS:
            result[name] = place
        place += 1
        if place > 200:
            raise SystemExit(f"{library} has {result}, expected places of {', '.join(METHODS)}")
    return result


def main() -> None:
    if not sys.argv[1:]:
        raise SystemExit(__doc__)
    for wheel in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(wheel) as archive:
            library = archive.extract(LIBRARY, directory)
            print(Path(wheel).name.split("-")[1], places(library), flush=True)


if __name__ == "__main__":
    main()
