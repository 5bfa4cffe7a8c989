"""What the driver's virtual memory calls cost, by chunk class: the floor under every transition without contents.

    python benchmarks/driver_calls.py [--device cuda:0] [--gib 64] [--cycles 5] [--rest 0]

Prints milliseconds for the whole size (medians), then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from environment import environment, need_cuda

from memsaver import _core

MIB = 1 << 20
CHUNKS = (2 * MIB, 32 * MIB, 256 * MIB, 1024 * MIB)
STEPS = ("create", "map", "allow", "unmap", "release")


def cycle(device: str, total: int, size: int, base: int) -> dict[str, float]:
    """One life of ``total`` bytes of memory in chunks of ``size``: milliseconds for each step."""
    driver = _core.open_driver(device)
    took: dict[str, float] = {}
    count = total // size
    handles: list[int] = []

    def timed(step: str, call: Callable[[], object]) -> None:
        begin = time.perf_counter()
        call()
        took[step] = (time.perf_counter() - begin) * 1e3

    timed("create", lambda: handles.extend(driver.create(size) for _ in range(count)))
    timed("map", lambda: [driver.map(base + i * size, size, handle) for i, handle in enumerate(handles)])
    timed("allow", lambda: driver.allow(base, total))
    timed("unmap", lambda: driver.unmap(base, total))
    timed("release", lambda: [driver.release(handle) for handle in handles])
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--gib", type=int, default=64)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument(
        "--rest", type=float, default=0.0, help="seconds between two cycles: released memory gets clean"
    )
    options = parser.parse_args()
    if options.device != "cpu":
        need_cuda()
    total = options.gib << 30
    base = _core.open_driver(options.device).reserve(total)
    rows = {}
    print(f"{options.gib} GiB in chunks of" + "".join(f"{step:>10}" for step in STEPS) + "   ms")
    for size in CHUNKS:
        cycles = []
        for _ in range(options.cycles + 1):
            time.sleep(options.rest)
            cycles.append(cycle(options.device, total, size, base))
        rows[size] = {step: statistics.median(each[step] for each in cycles[1:]) for step in STEPS}
        print(f"{size // MIB:>10} MiB    " + "".join(f"{rows[size][step]:10.2f}" for step in STEPS), flush=True)
    print(
        json.dumps({"benchmark": "driver_calls", **environment(), "bytes": total, "rest_s": options.rest, "ms": rows})
    )


if __name__ == "__main__":
    main()
