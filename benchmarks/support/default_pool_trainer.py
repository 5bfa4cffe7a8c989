"""One trainer of default_pool.py, in a process of its own: reads a JSON request a line, and writes a reply a line.

A trainer is a small transformer whose steps have varied lengths, so that its activations have varied sizes. Every
step is deterministic: trainers of the same seed have the same losses, bit by bit.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.host import GIB, MIB

Reply = dict[str, Any]
POOL_ID = (0, 0)  # torch's, of its default pool
MEANWHILE = 64 * MIB  # bytes of the tensor that torch allocates during a pause
PIECE = 32 * MIB  # of torch's segments, in a region


@dataclass(frozen=True)
class Shape:
    width: int = 1024
    layers: int = 8
    heads: int = 16
    words: int = 8192
    longest: int = 256  # tokens of a sequence


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


class DefaultPool:
    """torch's default pool as a region of memsaver, and the tensor that torch allocates while it is paused."""

    def __init__(self, shared: bool) -> None:
        import memsaver  # a trainer with plain torch has none

        if shared:
            memsaver.configure(pool="shared")
        self._memsaver = memsaver
        self.region = memsaver.default_pool()
        self.meanwhile: torch.Tensor | None = None

    def pause(self, backup: str | None) -> Reply:
        """``backup``: None for the region's own policy."""
        torch.cuda.synchronize()
        before = {
            "reserved_bytes": torch.cuda.memory_reserved(),
            "other_pools_bytes": sum(
                segment["total_size"]
                for segment in torch.cuda.memory_snapshot()
                if tuple(segment["segment_pool_id"]) != POOL_ID
            ),
            "active_bytes": torch.cuda.memory_stats().get("active_bytes.all.current", 0),
            "chunks_by_mib": self._chunks(),
        }
        return {**before, **self._timed(self._memsaver.pause, backup=backup)}

    def resume(self) -> Reply:
        return {**self._timed(self._memsaver.resume), "chunks_by_mib": self._chunks()}

    def allocate(self, value: int) -> Reply:
        self.meanwhile = torch.full((MEANWHILE,), value, dtype=torch.uint8, device=self.region.device)
        return {}

    def check(self, value: int) -> Reply:
        """Frees the tensor of allocate(). Whether it holds the value, and lies outside of the region."""
        tensor, self.meanwhile = self.meanwhile, None
        assert tensor is not None
        return {"contents_right": holds_only(tensor, value), "outside": not self.region.owns(tensor.data_ptr())}

    def _chunks(self) -> dict[str, int]:
        """Numbers of chunks by their size in MiB."""
        sizes = Counter(self.region._core.chunks)
        return {str(size // MIB): sizes[size] for size in sorted(sizes)}

    def _timed(self, act: Callable[..., Any], **options: Any) -> Reply:
        begin = time.perf_counter()
        done = act(self.region.tag, **options)
        seconds = time.perf_counter() - begin
        last = self._memsaver.history()[-1]
        return {
            "seconds": seconds,
            "stages": [[stage.name, stage.seconds] for stage in last.stages],
            **{name: getattr(done, name) for name in ("released_bytes", "restored_bytes", "copied_bytes")},
        }


class Subject:
    """The requests, a method each. Its arguments are those of the request, its result is the reply."""

    def __init__(self, kind: str, cap_gib: float) -> None:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # fills cost time
        self.pool = None if kind == "plain" else DefaultPool(shared=kind == "shared")
        if kind != "shared":  # there the cap is the capacity of the pool
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / total)
        self.trainer = Trainer(Shape(), "cuda")
        if not all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot()):
            raise RuntimeError("torch's segments are not expandable")
        reserved = torch.cuda.memory_reserved()
        if self.pool is not None and self.pool.region.allocated_bytes != reserved:
            raise RuntimeError(f"torch has {reserved} bytes, and the region {self.pool.region.allocated_bytes}")

    def _taken(self) -> DefaultPool:
        if self.pool is None:
            raise RuntimeError("torch's default pool is no region in this process")
        return self.pool

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
        retries, begin = _retries(), time.perf_counter()
        try:
            self.trainer.steps(batch, count)
            fits = True
        except torch.cuda.OutOfMemoryError:
            fits = False
        seconds = time.perf_counter() - begin
        self.trainer.optimizer.zero_grad()
        gc.collect()
        torch.cuda.empty_cache()
        return {"fits": fits, "retries": _retries() - retries, "seconds": seconds}

    def pause(self, backup: str | None) -> Reply:
        return self._taken().pause(backup)

    def resume(self) -> Reply:
        return self._taken().resume()

    def allocate(self, value: int) -> Reply:
        return self._taken().allocate(value)

    def check(self, value: int) -> Reply:
        return self._taken().check(value)

    def empty_cache(self) -> Reply:
        torch.cuda.empty_cache()
        return {"reserved_bytes": torch.cuda.memory_reserved()}

    def recovery(self, cap_bytes: int) -> Reply:
        """torch's recovery where the pool has no memory: frees cached blocks behind queued work, and tries again."""
        region = self._taken().region
        self.reset()
        torch.cuda.reset_peak_memory_stats()
        retries = _retries()
        spare = cap_bytes - region.allocated_bytes
        nbytes = spare * 3 // 4 // PIECE * PIECE
        cached = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(200_000_000)  # about 0.1 s, still running when torch unmaps the block
        cached.fill_(1)
        del cached
        # Another stream has a segment of its own, which cannot take the cached blocks.
        with torch.cuda.stream(torch.cuda.Stream()):
            begin = time.perf_counter()
            fresh = torch.full((nbytes,), 2, dtype=torch.uint8, device="cuda")
            right = holds_only(fresh, 2)
        seconds = time.perf_counter() - begin
        recovered = _retries() - retries
        begin = time.perf_counter()
        try:
            torch.empty(2 * cap_bytes, dtype=torch.uint8, device="cuda")
            refused = False
        except torch.cuda.OutOfMemoryError:
            refused = True
        refused_s = time.perf_counter() - begin
        right = right and holds_only(fresh, 2)
        del fresh
        torch.cuda.empty_cache()
        again = torch.full((nbytes,), 3, dtype=torch.uint8, device="cuda")
        right = right and holds_only(again, 3)
        del again
        return {
            "contents_right": right,
            "too_much_raised": refused,
            "retries": recovered,
            "nbytes": nbytes,
            "spare_bytes": spare,
            "peak_bytes": torch.cuda.max_memory_reserved(),
            "seconds": seconds,
            "too_much_s": refused_s,
        }


def _retries() -> int:
    """How often torch has freed its cached blocks for an allocation."""
    return int(torch.cuda.memory_stats()["num_alloc_retries"])


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
