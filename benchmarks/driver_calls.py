"""The cost of the driver's virtual memory calls, by chunk class: the floor of every transition without contents.

    python benchmarks/driver_calls.py [--device cuda:0] [--gib 64] [--cycles 5] [--rest 0]

Prints milliseconds for the whole size (medians), then one JSON line.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

from memsaver import _core
from support.arguments import add_device, count, not_negative, parse, parser_for
from support.environment import environment
from support.host import MIB

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

    def map_all() -> None:
        for i, handle in enumerate(handles):
            driver.map(base + i * size, size, handle)

    def release_all() -> None:
        for handle in handles:
            driver.release(handle)

    timed("create", lambda: handles.extend(driver.create(size) for _ in range(count)))
    timed("map", map_all)
    timed("allow", lambda: driver.allow(base, total))
    timed("unmap", lambda: driver.unmap(base, total))
    timed("release", release_all)
    return took


def main() -> None:
    parser = parser_for(__doc__)
    add_device(parser)
    parser.add_argument("--gib", type=count, help="(default: 64, on the CPU 1)")
    parser.add_argument("--cycles", type=count, default=5, help="after a first")
    parser.add_argument(
        "--rest", type=not_negative, default=0.0, help="seconds between two cycles: released memory gets clean"
    )
    options = parse(parser, gib=(64, 1))
    begin = time.monotonic()
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
    result = {"benchmark": "driver_calls", **environment(options.device), "bytes": total, "rest_s": options.rest}
    print(json.dumps({**result, "ms": rows, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
