"""torch's default pool, with expandable segments, as a region: its speed, its room, and its pauses.

Trainers of one seed, each in a process of its own: a small transformer whose steps have varied lengths. "plain" has
torch's expandable segments, and memsaver is not used. "taken" calls memsaver.default_pool() before its first
allocation. "shared" does so too, and takes its memory from a shared pool. torch has a cap of device memory in the
first two; in "shared" the capacity of the pool is the cap. No other program may use the device. Parts:

- pauses: of "taken". Milliseconds, and bytes that left the device by nvidia-smi. All losses are compared with those
  of plain torch. "host" is the region's own policy, which copies blocks in use. "emptied" also calls
  torch.cuda.empty_cache() while the memory is away. "none" keeps no contents, and a new trainer follows.
- speed: seconds of --steps steps in "plain" and "taken", from an empty cache on, in turns.
- largest: the largest micro-batch with which so many steps have enough memory.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import memsaver
from benchmarks.harness.command import Options, Run, count, number
from benchmarks.harness.machine import GIB, total_bytes, used_bytes
from benchmarks.harness.pools import shared_pool
from benchmarks.harness.processes import Process, Sample, processes

DEVICES = ("cuda",)
SPEED, BATCH, RELEASED = 0.01, 0.97, 0.99  # the bounds of the checks
PAUSES = ("host", "host", "emptied", "none")  # steps before each, and after the last one
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": ""}
POOL_ID = (0, 0)  # torch's, of its default pool
WIDTH, LAYERS, HEADS, WORDS, LONGEST = 1024, 8, 16, 8192, 256  # of the transformer; the longest sequence in tokens


def options(parser: Options) -> None:
    parser.add_argument("--cap-gib", type=number, default=12.0, help="device memory of each trainer")
    parser.add_argument("--steps", type=count, default=50, help="of a round, each of another length")
    parser.add_argument("--rounds", type=count, default=4, help="of the comparison of speeds")
    parser.add_argument("--batch", type=count, default=16, help="the first that is tried; it must fit twice")


def measure(run: Run) -> None:
    cap_gib, total = run.options.cap_gib, total_bytes(run.device)
    if 3 * cap_gib * GIB > total:
        raise ValueError(f"--cap-gib is {cap_gib:g}, expected less than a third of {total / GIB:.0f} GiB")
    if run.options.steps < len(PAUSES):
        raise ValueError(f"--steps is {run.options.steps}, expected {len(PAUSES)} or more: one for each pause")
    cap_bytes = int(cap_gib * GIB)
    with shared_pool(cap_bytes, run.device) as pool:
        own = {"plain": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, "taken": {}, "shared": pool.variables}
        start = partial(Process, Trainer, cap_gib=cap_gib)
        every = {kind: start(variables=VARIABLES | each, kind=kind) for kind, each in own.items()}
        with processes(*every.values()):
            _measure(run, cap_bytes, **every)


def _measure(run: Run, cap_bytes: int, plain: Process, taken: Process, shared: Process) -> None:
    steps, first = run.options.steps, run.options.batch
    peaks = []
    for batch in (first, 2 * first):
        plain.ask("reset")
        peaks.append(plain.ask("steps", batch=batch, number=steps)["peak_bytes"])
    # The batch at which the peak should reach the cap.
    near = max(2, int(first + first * (cap_bytes - peaks[0]) / max(1, peaks[1] - peaks[0])))
    batch = max(1, int(0.8 * near))
    plain.ask("reset")
    expected = plain.ask("steps", batch=batch, number=steps)["losses"]
    run.attempt("pauses", lambda: pauses(run, taken, expected, batch))
    run.attempt("speed", lambda: speed(run, {"plain": plain, "taken": taken}, batch))
    most = largest(plain, near, steps)
    batches = {"plain": most, "taken": largest(taken, most, steps), "shared": largest(shared, most, steps)}
    run.table("largest micro-batch", {"batch": batches})
    run.check("batch: at least 97 % of plain", 0 < BATCH * most <= min(batches.values()), min(batches.values()))


def pauses(run: Run, taken: Process, expected: list[str], batch: int) -> None:
    part = len(expected) // len(PAUSES)
    taken.ask("reset")
    losses = taken.ask("steps", batch=batch, number=part)["losses"]
    equal, rows = losses == expected[:part], dict[str, dict[str, Any]]()
    for at, kind in enumerate(PAUSES, 1):
        before = used_bytes(run.device)
        left = taken.ask("pause", backup="none" if kind == "none" else None)
        gone = before - used_bytes(run.device)
        if kind == "emptied":
            taken.ask("empty_cache")
        back = taken.ask("resume")
        if kind == "none":  # the parameters are lost
            taken.ask("reset")
            losses = []
        losses += taken.ask("steps", batch=batch, number=part, empty=False)["losses"]
        equal = equal and losses == expected[: len(losses)]
        rows[f"{at}, {kind}"] = {
            "pause, ms": left["ms"], "resume, ms": back["ms"], "released, GiB": left["released"] / GIB,
            "copied, GiB": left["copied"] / GIB, "by nvidia-smi, GiB": gone / GIB,
        }  # fmt: skip
        run.check(f"memory of pause {at}: 99 % of the default pool left", gone >= RELEASED * left["reserved"], gone)
    run.table(f"pauses, batch {batch}", rows)
    run.check("losses over the pauses are those of plain torch", equal)


def speed(run: Run, both: dict[str, Process], batch: int) -> None:
    """Rounds in the order plain, taken, taken, plain, ... The first of each does not count."""
    seconds: dict[str, list[float]] = {kind: [] for kind in both}
    losses = {}
    for at in range(run.options.rounds + 1):
        for kind in list(both)[:: 1 if at % 2 == 0 else -1]:
            both[kind].ask("reset")
            found = both[kind].ask("steps", batch=batch, number=run.options.steps)
            losses[kind] = found["losses"]
            seconds[kind] += [found["seconds"]] if at else []
    ratios = [taken / plain for taken, plain in zip(seconds["taken"], seconds["plain"])]
    run.table(f"{run.options.steps} steps", {kind: {"s": statistics.median(each)} for kind, each in seconds.items()})
    run.keep(seconds=seconds, ratios=ratios)
    ratio = statistics.median(ratios)
    run.check("speed: at most 1 % more time than plain", ratio <= 1 + SPEED, ratio)
    run.check("losses are equal", losses["plain"] == losses["taken"])


def largest(process: Process, near: int, steps: int) -> int:
    """By halving between a batch that fits and one that does not. The first two are sought around ``near``."""
    known = {0: True}

    def fits(batch: int) -> bool:
        if batch not in known:
            known[batch] = process.ask("fits", batch=batch, number=steps)
        return known[batch]

    stride = max(1, near // 24)
    low = high = near
    while not fits(low):
        low = max(0, low - stride)
    while fits(high):
        high += stride
    low = max(batch for batch in known if known[batch])
    high = min(batch for batch in known if not known[batch] and batch > low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class Trainer:
    """In a process of its own. ``steps()`` continues at the step that was reached; ``reset()`` begins anew."""

    def __init__(self, kind: str, cap_gib: float) -> None:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # fills cost time
        self.region = memsaver.default_pool() if kind != "plain" else None
        if kind != "shared":  # of "shared", the capacity of the pool is the cap
            torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / torch.cuda.get_device_properties(0).total_memory)
        self._begin()
        if not all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()):
            raise RuntimeError("torch's segments are not expandable")
        if self.region is not None and self.region.allocated_bytes != torch.cuda.memory_reserved():
            raise RuntimeError(f"torch has {torch.cuda.memory_reserved()} bytes, {self.region} has others")

    def _begin(self) -> None:
        torch.manual_seed(0)
        self.done = 0
        with torch.device("cuda"):
            block = partial(nn.TransformerEncoderLayer, WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
            blocks = [block(activation="gelu", norm_first=True) for _ in range(LAYERS)]
            self.model = nn.ModuleList([nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def reset(self) -> None:
        del self.model, self.optimizer
        gc.collect()
        self._begin()
        self.empty_cache()

    def _step(self, batch: int) -> torch.Tensor:
        length = random.Random(self.done).randint(LONGEST // 4, LONGEST)
        generator = torch.Generator("cuda").manual_seed(self.done)
        words = torch.randint(WORDS, (batch, length + 1), device="cuda", generator=generator)
        # One kernel of attention for all lengths, with a deterministic backward pass.
        with torch.autocast("cuda", torch.bfloat16), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            hidden = self.model[0](words[:, :-1])
            for block in self.model[1:-1]:
                hidden = block(hidden)
            loss = nn.functional.cross_entropy(self.model[-1](hidden).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.detach()

    def steps(self, batch: int, number: int, empty: bool = True) -> Sample:
        """Seconds, and the losses exactly."""
        if empty:
            self.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses = [float(loss).hex() for loss in [self._step(batch) for _ in range(number)]]
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "losses": losses, "peak_bytes": torch.cuda.max_memory_reserved()}

    def fits(self, batch: int, number: int) -> bool:
        """Whether so many steps have enough memory, from a new trainer and an empty cache on."""
        self.reset()
        try:
            self.steps(batch, number)
            fits = True
        except torch.cuda.OutOfMemoryError:
            fits = False
        self.optimizer.zero_grad()
        gc.collect()
        self.empty_cache()
        return fits

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def pause(self, backup: str | None) -> Sample:
        """``backup``: None for the policy of the region. ``reserved``: of the default pool, without the other pools."""
        torch.cuda.synchronize()
        segments = torch.cuda.memory_snapshot()
        others = sum(each["total_size"] for each in segments if tuple(each["segment_pool_id"]) != POOL_ID)
        reserved = torch.cuda.memory_reserved() - others
        return {**self._moved(lambda: memsaver.pause(self.region, backup=backup)), "reserved": reserved}

    def resume(self) -> Sample:
        return self._moved(lambda: memsaver.resume(self.region))

    def _moved(self, act: Callable[[], Any]) -> Sample:
        begin = time.perf_counter()
        done = act()
        ms = 1e3 * (time.perf_counter() - begin)
        return {"ms": ms, "released": done.released_bytes, "copied": done.copied_bytes}
