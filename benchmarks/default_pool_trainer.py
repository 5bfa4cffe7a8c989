"""One trainer of default_pool.py, in a process of its own: reads a JSON request a line, and writes a reply a line.

A trainer is a small transformer whose steps have varied lengths, so that its activations have varied sizes. Every
step is deterministic: trainers of the same seed have the same losses, bit by bit.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from host import GIB, MIB
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Reply = dict[str, Any]
MOST_SIZES = 8


@dataclass(frozen=True)
class Shape:
    width: int = 1024
    layers: int = 8
    heads: int = 16
    words: int = 8192
    longest: int = 256  # tokens of a sequence


class Range(ctypes.Structure):
    _fields_ = [("address", ctypes.c_uint64), ("size", ctypes.c_uint64)]


class Report(ctypes.Structure):
    _fields_ = [
        *((f"{stage}_s", ctypes.c_double) for stage in ("work", "host", "copy", "unmap", "create", "map", "access")),
        *((name, ctypes.c_uint64) for name in ("chunks", "bytes", "backed_up_bytes", "staying_bytes")),
    ]


class Stats(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("taken", "creates", "releases", "maps", "unmaps", "accesses")),
        *((name, ctypes.c_uint64) for name in ("reserves", "refused_by_limit", "refused_by_driver", "exports")),
        *((name, ctypes.c_uint64) for name in ("mapped_bytes", "paused_bytes", "staying_bytes", "handle_types")),
        *((name, ctypes.c_uint64) for name in ("checked_unmaps", "busy_unmaps")),
        ("sizes", ctypes.c_uint64 * MOST_SIZES),
        ("counts", ctypes.c_uint64 * MOST_SIZES),
    ]


class Chunks:
    """The preloaded library's control functions. Raises RuntimeError with the driver's code where one fails."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        self._library.pool_pause.argtypes = [ctypes.c_int, ctypes.POINTER(Range), ctypes.c_size_t, ctypes.c_void_p]
        self._library.pool_resume.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._library.pool_limit.argtypes, self._library.pool_limit.restype = [ctypes.c_uint64], None
        self._library.pool_check.argtypes, self._library.pool_check.restype = [ctypes.c_bool], ctypes.c_bool
        self._library.pool_stats.argtypes, self._library.pool_stats.restype = [ctypes.c_void_p], None

    def pause(self, kept: Sequence[tuple[int, int]]) -> Reply:
        """Keeps the contents of chunks with a byte of the ``kept`` ranges (address, bytes)."""
        ranges = (Range * len(kept))(*(Range(*each) for each in sorted(kept)))
        return self._call("pool_pause", ranges, len(kept))

    def resume(self) -> Reply:
        return self._call("pool_resume")

    def limit(self, nbytes: int) -> None:
        """cuMemCreate fails beyond so many bytes; 0: no limit."""
        self._library.pool_limit(nbytes)

    def check(self, wanted: bool) -> bool:
        """Whether each cuMemUnmap asks if the default stream has work. Returns False where it cannot."""
        return bool(self._library.pool_check(wanted))

    def stats(self) -> Reply:
        found = Stats()
        self._library.pool_stats(ctypes.byref(found))
        reply: Reply = {name: getattr(found, name) for name, *_ in Stats._fields_[:-2]}
        reply["chunks_by_mib"] = {str(size // MIB): n for size, n in zip(found.sizes, found.counts) if n}
        return reply

    def _call(self, name: str, *arguments: object) -> Reply:
        report = Report()
        begin = time.perf_counter()
        code = getattr(self._library, name)(0, *arguments, ctypes.byref(report))
        seconds = time.perf_counter() - begin
        if code != 0:
            raise RuntimeError(f"{name}: the driver's error {code}")
        return {"seconds": seconds, **{field: getattr(report, field) for field, *_ in Report._fields_}}


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden_BSD.shape
        split = self.attention(self.before(hidden_BSD)).view(batch, length, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden_BSD = hidden_BSD + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden_BSD + self.wide(self.between(hidden_BSD))


class Trainer:
    """``steps()`` counts on from the step that the trainer has reached; ``reset()`` begins anew."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.device = shape, device
        self.model, self.optimizer, self.done = self._begin()

    def _begin(self) -> tuple[nn.ModuleList, torch.optim.Optimizer, int]:
        torch.manual_seed(0)
        shape = self.shape
        with torch.device(self.device):
            blocks = [Block(shape) for _ in range(shape.layers)]
            model = nn.ModuleList(
                [nn.Embedding(shape.words, shape.width), *blocks, nn.Linear(shape.width, shape.words)]
            )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device != "cpu"), 0

    def reset(self) -> None:
        del self.model, self.optimizer
        gc.collect()
        self.model, self.optimizer, self.done = self._begin()

    def step(self, batch: int) -> torch.Tensor:
        """Returns the loss, on the device."""
        choose = random.Random(self.done)
        length = choose.randint(self.shape.longest // 4, self.shape.longest)
        generator = torch.Generator(self.device).manual_seed(self.done)
        words = torch.randint(self.shape.words, (batch, length + 1), device=self.device, generator=generator)
        with torch.autocast(self.device.partition(":")[0], torch.bfloat16), self._attention():
            hidden = self.model[0](words[:, :-1])
            for block in self.model[1:-1]:
                hidden = block(hidden)
            logits = self.model[-1](hidden)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return loss.detach()

    def _attention(self) -> Any:
        # One kernel for all lengths, with a deterministic backward pass.
        return nullcontext() if self.device == "cpu" else sdpa_kernel(SDPBackend.FLASH_ATTENTION)

    def steps(self, batch: int, count: int) -> list[str]:
        """The losses, exactly."""
        return [float(loss).hex() for loss in [self.step(batch) for _ in range(count)]]


def holds_only(tensor: torch.Tensor, value: int) -> bool:
    """Compares part by part: a comparison of the whole needs as much memory again."""
    return all(bool((part == value).all()) for part in tensor.split(16 * MIB))


class Subject:
    """The requests, a method each. Its arguments are those of the request, its result is the reply."""

    def __init__(self, cap_gib: float, library: str | None) -> None:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # fills cost time
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / total)
        self.chunks = Chunks(library) if library else None
        self.trainer = Trainer(Shape(), "cuda")
        if not all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()):
            raise RuntimeError("torch's segments are not expandable")
        if self.chunks is not None and self.chunks.stats()["mapped_bytes"] != torch.cuda.memory_reserved():
            raise RuntimeError(f"torch's memory is not the library's: {self.chunks.stats()}")

    def _taken(self) -> Chunks:
        if self.chunks is None:
            raise RuntimeError("the library is not preloaded in this process")
        return self.chunks

    def steps(self, batch: int, count: int, empty: bool = False) -> Reply:
        if empty:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses = self.trainer.steps(batch, count)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        peak = {"reserved": torch.cuda.max_memory_reserved(), "allocated": torch.cuda.max_memory_allocated()}
        return {"seconds": seconds, "losses": losses, "peak_bytes": peak}

    def reset(self) -> Reply:
        self.trainer.reset()
        torch.cuda.empty_cache()
        return {}

    def fits(self, batch: int, count: int) -> Reply:
        """Whether so many steps have enough memory, from a new trainer and an empty cache on."""
        self.reset()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        try:
            self.trainer.steps(batch, count)
            fits = True
        except torch.cuda.OutOfMemoryError:
            fits = False
        self.trainer.optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        return {"fits": fits, "retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries}

    def pause(self, backup: str) -> Reply:
        """``backup``: "live" (of chunks with a block in use), "all" or "none"."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        kept, live = [], 0
        for segment in torch.cuda.memory_snapshot():
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    live += block["size"]
                if backup == "all" or (backup == "live" and block["state"] != "inactive"):
                    kept.append((block.get("address", address), block["size"]))
                address += block["size"]
        snapshot_s = time.perf_counter() - begin
        reserved = torch.cuda.memory_reserved()
        return {"snapshot_s": snapshot_s, "live_bytes": live, "reserved_bytes": reserved, **self._taken().pause(kept)}

    def resume(self) -> Reply:
        return self._taken().resume()

    def empty_cache(self) -> Reply:
        torch.cuda.empty_cache()
        return {"reserved_bytes": torch.cuda.memory_reserved()}

    def limit(self, nbytes: int) -> Reply:
        self._taken().limit(nbytes)
        return {}

    def fraction(self, cap_gib: float) -> Reply:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_gib * GIB / total))
        return {}

    def stats(self) -> Reply:
        return self._taken().stats() if self.chunks else {}

    def recovery(self, spare_bytes: int) -> Reply:
        """Torch's recovery where the driver has no memory: frees cached blocks behind queued work, and tries again."""
        chunks = self._taken()
        self.reset()
        chunks.limit(chunks.stats()["mapped_bytes"] + spare_bytes)
        checks = chunks.check(True)
        before, retries = chunks.stats(), torch.cuda.memory_stats()["num_alloc_retries"]
        nbytes = spare_bytes * 3 // 4 // (20 * MIB) * (20 * MIB)
        try:
            cached = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
            torch.cuda._sleep(200_000_000)  # about 0.1 s, still running when the block is unmapped
            cached.fill_(1)
            del cached
            # Another stream has a segment of its own, which cannot take the cached blocks.
            with torch.cuda.stream(torch.cuda.Stream()):
                begin = time.perf_counter()
                fresh = torch.full((nbytes,), 2, dtype=torch.uint8, device="cuda")
                right = holds_only(fresh, 2)
            seconds = time.perf_counter() - begin
            try:
                torch.empty(2 * spare_bytes, dtype=torch.uint8, device="cuda")
                refused = False
            except torch.cuda.OutOfMemoryError:
                refused = True
            del fresh
            torch.cuda.empty_cache()
            again = torch.full((nbytes,), 3, dtype=torch.uint8, device="cuda")
            right = right and holds_only(again, 3)
            del again
        finally:
            chunks.check(False)
            chunks.limit(0)
        after = chunks.stats()
        counted = ("refused_by_limit", "unmaps", "checked_unmaps", "busy_unmaps")
        return {
            "contents_right": right,
            "too_much_raised": refused,
            "retries": torch.cuda.memory_stats()["num_alloc_retries"] - retries,
            "seconds": seconds,
            "checks": checks,
            **{name: after[name] - before[name] for name in counted},
        }


def serve() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries goes to the log
    subject: Subject | None = None
    for line in sys.stdin:
        request = json.loads(line)
        name = request.pop("do")
        try:
            if name == "begin":
                subject, reply = Subject(**request), {}
            else:
                act: Callable[..., Reply] = getattr(subject, name)
                reply = act(**request)
        except BaseException as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    serve()
