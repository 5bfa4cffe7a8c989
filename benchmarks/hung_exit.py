"""How long a process with a hung kernel takes to end: torch alone, with regions, and with a pause under way.

    python benchmarks/hung_exit.py [--kernel 30] [--only torch regions pause]

Each process queues a kernel that spins for ``--kernel`` seconds, and its program ends at once. Prints the seconds from
there to the end of the process, and how much later than torch alone that is, then one JSON line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from support.arguments import parse, parser_for, positive
from support.environment import environment
from support.processes import last_line

WAYS = {"torch": "torch alone", "regions": "regions active", "pause": "regions active, and a pause under way"}
START_S = 60.0  # at most, for a process to come so far as to leave
LATER_S = 10.0  # the most time that memsaver may add
PROGRAM = """
import sys, time, torch
way, seconds = sys.argv[1], float(sys.argv[2])
plain = torch.zeros(1 << 20, device="cuda")
if way != "torch":
    import memsaver
    weights, cache = memsaver.region("weights", backup="host"), memsaver.region("kv_cache")
    tensors = [region.empty((1 << 28,), torch.uint8).fill_(1) for region in (weights, cache)]
began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for _ in range(2):
    began.record()
    torch.cuda._sleep(200_000_000)
    ended.record()
torch.cuda.synchronize()
rate = 200_000_000 / (began.elapsed_time(ended) / 1e3)
torch.cuda._sleep(int(seconds * rate))
ended.record()
if way == "pause":
    moved = memsaver.pause(wait=False)
    time.sleep(0.5)
    assert not moved.done()
assert not ended.query()
print("leaving", flush=True)
"""


def leave(way: str, kernel_s: float) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, way, str(kernel_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    begin = time.monotonic()
    try:
        process.wait(kernel_s + START_S)
    except subprocess.TimeoutExpired:
        process.kill()
    took = time.monotonic() - begin
    status, words = process.wait(), process.stderr.read()
    if line != "leaving\n":
        return {"error": f"status {status}: {last_line(words)}"}
    return {"seconds": took, "status": status, "stderr": words}


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--kernel", type=positive, default=30.0, help="seconds for which it spins")
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), default=tuple(WAYS))
    options = parse(parser)
    begin = time.monotonic()
    print(f"a kernel of {options.kernel:g} s; seconds until the process has ended")
    samples: dict[str, Any] = {}
    for way in options.only:
        sample = samples[way] = leave(way, options.kernel)
        if "error" in sample:
            print(f"  {WAYS[way]:40}{sample['error']}", flush=True)
            continue
        text = f"{sample['seconds']:8.2f} s"
        plain = samples.get("torch", {}).get("seconds")
        if way != "torch" and plain is not None:
            later = sample["seconds"] - plain
            text += f"   {later:+.2f} s" + (f", more than {LATER_S:g}" if later > LATER_S else "")
        if sample["status"]:
            text += f"   status {sample['status']}: {last_line(sample['stderr'])}"
        print(f"  {WAYS[way]:40}{text}", flush=True)
    result = {"benchmark": "hung_exit", **environment(), "kernel_s": options.kernel, "samples": samples}
    print(json.dumps({**result, "seconds": time.monotonic() - begin}))


if __name__ == "__main__":
    main()
