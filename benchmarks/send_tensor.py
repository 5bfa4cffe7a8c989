"""How long a tensor in a region takes to another process through torch.multiprocessing, and how a pause waits for it.

    python benchmarks/send_tensor.py [--gib 8] [--rounds 10] [--only memsaver torch] [--device cuda:0]

Two processes on one device. In each round one fills a tensor, puts it into a queue while the kernel runs, and the other
takes it out, reads its last number, compares all of it, and writes to it. Then the sender's pause is refused within its
bound, waits while the other process sleeps and drops the tensor, and ends. memsaver runs with memory of the driver and
of a shared pool, with and without a backup; torch sends a tensor of its default pool, and there is no pause. Times are
medians after the first round, which is listed apart: it makes connections. ``taken_bytes`` is the device memory that
the receipt took. Prints a table, then one JSON line. With ``--device cpu`` it runs on the host driver, without torch's
part, and measures nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch

import memsaver
from support.arguments import add_device, count, parse, parser_for, positive
from support.environment import environment
from support.host import GIB, MIB
from support.processes import CONTEXT, Process, Sample, ask_all
from support.work import size, synchronize

SLEEP_S = 0.2  # of the receiver, while the sender's pause waits
PART = GIB // 8  # numbers compared at once
TIMES = ("put_ms", "arrival_ms", "read_ms", "refused_after_ms", "pause_ms")


@dataclass(frozen=True)
class Sending:
    subject: str
    pool: str
    backup: str

    def __str__(self) -> str:
        return f"{self.subject}, {self.pool}, backup {self.backup}" if self.subject == "memsaver" else self.subject


SENDINGS = (
    *(Sending("memsaver", pool, backup) for pool in ("process", "shared") for backup in ("none", "host")),
    Sending("torch", "", ""),
)


def sender(sending: Sending, nbytes: int, rounds: int, device: str, directory: str, queue: Any, back: Any) -> Sample:
    region = _region(sending, device, directory)
    shape = (nbytes // 8,)
    if region is not None:
        tensor = region.empty(shape, torch.int64)
    else:
        tensor = torch.empty(shape, dtype=torch.int64, device=device)
    pid = back.get()
    found: list[Sample] = []
    for number in range(1, rounds + 2):
        tensor.fill_(number)
        begin = time.monotonic()
        queue.put((number, tensor))
        put = time.monotonic()
        there = back.get()
        sample = {
            "put_ms": 1e3 * (put - begin),
            "arrival_ms": 1e3 * (there["arrived"] - begin),
            "read_ms": 1e3 * (there["read"] - begin),
            "taken_bytes": there["taken_bytes"],
        }
        _check(int(tensor[-1]) == -number, "the sender does not see what the receiver wrote")
        if region is not None:
            sample["refused_after_ms"] = _refused_ms(region, pid)
        queue.put("drop")
        if region is not None:
            region.pause(reader_timeout=60)
            # With a backup the copy of the contents is part of it.
            sample["pause_ms"] = 1e3 * (time.monotonic() - back.get())
            region.resume()
        else:
            back.get()
        found.append(sample)
    queue.put(None)
    return {"rounds": found}


def _refused_ms(region: memsaver.Region, pid: int) -> float:
    begin = time.monotonic()
    try:
        region.pause(reader_timeout=0.05)
    except memsaver.AttachedError as error:
        _check([each for each, _ in error.holders] == [pid], f"the error names {error.holders}, not {pid}")
        return 1e3 * (time.monotonic() - begin)
    raise RuntimeError("the pause did not wait for the receiver")


def receiver(sending: Sending, device: str, directory: str, queue: Any, back: Any) -> Sample:
    _region(sending, device, directory)
    if device != "cpu":
        torch.cuda.set_device(device)
        assert int((torch.zeros(4, dtype=torch.int64, device=device) == 0).all())  # loads the kernels
        synchronize(device)
    back.put(os.getpid())
    while True:
        before = _free_bytes(device)
        # The message waits until the tensor is sent: the time until then is not part of the figures.
        message = queue.get()
        arrived = time.monotonic()
        if message is None:
            return {}
        number, tensor = message
        last = int(tensor[-1])
        read = time.monotonic()
        taken = before - _free_bytes(device)
        _check(last == number, f"the receiver read {last}, expected {number}")
        for at in range(0, tensor.numel(), PART):
            _check(bool((tensor[at : at + PART] == number).all()), f"contents differ from number {at} on")
        tensor[-1] = -number
        synchronize(device)
        back.put({"arrived": arrived, "read": read, "taken_bytes": taken})
        del message
        queue.get()
        time.sleep(SLEEP_S)
        begin = time.monotonic()
        del tensor
        back.put(begin)


def _region(sending: Sending, device: str, directory: str) -> memsaver.Region | None:
    if sending.subject != "memsaver":
        return None
    os.environ["MEMSAVER_POOL_DIR"] = directory
    memsaver.configure(pool=sending.pool)
    return memsaver.region("sent", device=device, backup=sending.backup)


def _free_bytes(device: str) -> int:
    return 0 if device == "cpu" else torch.cuda.mem_get_info(device)[0]


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise RuntimeError(text)


def measure(sending: Sending, nbytes: int, rounds: int, device: str) -> Sample:
    with tempfile.TemporaryDirectory(prefix="memsaver-") as directory:
        queue, back = CONTEXT.Queue(), CONTEXT.Queue()
        common = {"sending": sending, "device": device, "directory": directory, "queue": queue, "back": back}
        processes = [
            Process(receiver, timeout_s=600, **common),
            Process(sender, timeout_s=600, nbytes=nbytes, rounds=rounds, **common),
        ]
        try:
            _, found = ask_all(processes)
        finally:
            for process in processes:
                process.close()
    first, *rest = found["rounds"]
    medians = {name: statistics.median(each[name] for each in rest) for name in TIMES if name in first}
    return {
        "subject": str(sending),
        **medians,
        "longest_arrival_ms": max(each["arrival_ms"] for each in rest),
        "first_arrival_ms": first["arrival_ms"],
        "taken_bytes": max(each["taken_bytes"] for each in found["rounds"]),
    }


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--gib", type=positive, default=None, help="bytes of the tensor in GiB; 8, or 0.25 on the CPU")
    parser.add_argument("--rounds", type=count, default=10)
    parser.add_argument("--only", nargs="+", choices=("memsaver", "torch"), default=("memsaver", "torch"))
    add_device(parser)
    options = parse(parser, gib=(8, 0.25))
    nbytes = int(options.gib * GIB) // MIB * MIB
    only = [each for each in options.only if each == "memsaver" or options.device != "cpu"]
    print(f"{size(nbytes)}, medians of {options.rounds} rounds, in ms")
    columns = ("arrival_ms", "longest_arrival_ms", "first_arrival_ms", "read_ms", "pause_ms")
    names = ("arrives", "longest", "first", "read", "pause after drop")
    print(f"{'':34}" + "".join(f"{name:>18}" for name in names) + f"{'taken':>12}")
    results = []
    for sending in SENDINGS:
        if sending.subject not in only:
            continue
        result = measure(sending, nbytes, options.rounds, options.device)
        results.append(result)
        cells = [f"{result[name]:18.2f}" if name in result else f"{'':18}" for name in columns]
        print(f"{result['subject']:34}" + "".join(cells) + f"{result['taken_bytes'] / MIB:8.0f} MiB", flush=True)
    print(json.dumps({**environment(options.device), "bytes": nbytes, "rounds": options.rounds, "results": results}))


if __name__ == "__main__":
    main()
