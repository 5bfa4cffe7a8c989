"""The ledger of a device during the RL loop of the examples, by process and kind.

    python benchmarks/loop_ledger.py [--steps 4] [--ranks 1] [--apart 0.5] [--device cuda]

Runs `python -m examples.colocate.loop` with the shared pool, and reads `memsaver top --json` every ``--apart`` seconds.
Prints, for each process of each device, the most and the least bytes of each kind in these accounts; then one JSON
line. Accounts that are not consistent are counted and left out: a process may change its memory while it is read. Needs
Ray, and on CUDA a GPU for each rank.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any

from support.arguments import count, parse, parser_for, positive
from support.environment import environment
from support.host import MIB
from support.processes import last_line

Bytes = dict[str, list[int]]  # by kind, in each account


def accounts() -> list[dict[str, Any]]:
    """Of the devices that have a pool now."""
    done = subprocess.run([sys.executable, "-m", "memsaver", "top", "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        return []
    return [{"device": pool["device"], **pool["ledger"]} for pool in json.loads(done.stdout)["pools"]]


def process_of(row: dict[str, Any]) -> str:
    """Its name and number. Ray adds the method that an actor runs to the actor's name."""
    return f"{row['name'].partition('.')[0]} ({row['pid']})"


def kinds(account: dict[str, Any]) -> dict[str, dict[str, int]]:
    """By process, the bytes of each kind. Memory of no known process is that of "none"."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in account["rows"]:
        name = f"{row['kind']} {row['label']}".strip() if row["kind"] == "context" else row["kind"]
        found["none" if row["pid"] is None else process_of(row)][name] += row["bytes"]
    return found


def conclusion(said: str) -> str:
    """The result of the loop: its last line without an indent, and the indented lines after it."""
    return " ".join(re.split(r"\n(?=\S)", said.strip())[-1].split())


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--steps", type=count, default=4, help="of the loop")
    parser.add_argument("--ranks", type=count, default=1, help="of the loop")
    parser.add_argument("--apart", type=positive, default=0.5, help="seconds between two accounts")
    parser.add_argument("--warm-up-steps", type=count, help="of the loop; default: the recipe's")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="of the loop")
    options = parse(parser)
    command = [sys.executable, "-m", "examples.colocate.loop", "--steps", str(options.steps)]
    command += ["--ranks", str(options.ranks), "--device", options.device]
    command += ["--warm-up-steps", str(options.warm_up_steps)] if options.warm_up_steps else []
    os.environ.setdefault("MEMSAVER_JOB", secrets.token_hex(16))  # which lets this process read the broker's figures
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (until the loop has ended)
    loop = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    found: dict[tuple[str, str], Bytes] = defaultdict(lambda: defaultdict(list))
    read = inconsistent = 0
    try:
        while loop.poll() is None:
            for account in accounts():
                read += 1
                if not account["is_consistent"]:
                    inconsistent += 1
                    continue
                for process, sizes_now in kinds(account).items():
                    for kind, size in sizes_now.items():
                        found[account["device"], process][kind].append(size)
            time.sleep(options.apart)
    finally:
        loop.kill()
        loop.wait()
    log.seek(0)
    said = log.read()
    if loop.returncode != 0:
        raise SystemExit(f"the loop has ended with {loop.returncode}: {last_line(said)}")
    print(f"{read} accounts, {inconsistent} of them inconsistent")
    for (device, process), nbytes in sorted(found.items()):
        print(f"{device} {process}")
        for kind, sizes in nbytes.items():
            print(f"  {kind:20}{min(sizes) / MIB:10.0f} to {max(sizes) / MIB:.0f} MiB, in {len(sizes)} accounts")
    rows = [
        {"device": device, "process": process, "bytes": {kind: [min(each), max(each)] for kind, each in nbytes.items()}}
        for (device, process), nbytes in sorted(found.items())
    ]
    machine = environment("cuda:0" if options.device == "cuda" else "cpu")
    result = {"benchmark": "loop_ledger", **machine, "accounts": read, "inconsistent": inconsistent}
    print(json.dumps({**result, "rows": rows, "loop": conclusion(said)}))


if __name__ == "__main__":
    main()
