"""The loop's actors without memsaver: tensors move by ``.to("cpu")`` and back.

Contents that are not kept are freed and allocated again. Addresses change, so the engine has no graphs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import memsaver
from examples.colocate.actors import EngineWorker, Memory, TrainerWorker, Worker
from examples.colocate.loop import Loop


class PlainRegion:
    """Tensors that move together, with as much of a region's interface as the loop uses."""

    def __init__(self, tag: str, device: str, backup: str) -> None:
        self.tag, self.device, self.backup = tag, device, backup
        self.state = "active"
        self.residence = 1
        self._tensors: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []

    def empty(self, shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        size = math.prod((shape,) if isinstance(shape, int) else shape)
        self._tensors.append(torch.empty(size, dtype=dtype, device=self.device))
        return self._tensors[-1].view(shape)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def expect(self, backup: str | None) -> None:
        """No memory is made ahead here."""

    def check_active(self, purpose: str) -> None:
        if self.state != "active":
            raise RuntimeError(f"cannot {purpose}: {self.tag} is away")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def leave(self, backup: str) -> int:
        """Returns the bytes copied."""
        if backup != "none":
            self._kept = [tensor.to("cpu", copy=True) for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)  # views of it stay views
        self.state = "paused"
        return sum(kept.nbytes for kept in self._kept)

    def come(self) -> int:
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(tensor.nbytes)
        for tensor, kept in zip(self._tensors, self._kept):
            tensor.copy_(kept)
        copied = sum(kept.nbytes for kept in self._kept)
        self._kept, self.state = [], "active"
        self.residence += 1
        return copied


class Plain(Worker):
    """An actor whose regions are plain ones."""

    def _join(self) -> None:
        self.regions: dict[str, PlainRegion] = {}
        memsaver.region = self._region  # type: ignore[assignment]  # in this process, for all of the loop's code

    def _region(self, tag: str, device: str, backup: str = "none") -> PlainRegion:
        return self.regions.setdefault(tag, PlainRegion(tag, device, backup))

    def _named(self, tags: Any) -> list[PlainRegion]:
        names = {tags} if isinstance(tags, str) else set(self.regions if tags is None else tags)
        return [region for tag, region in self.regions.items() if tag in names]

    def pause(  # type: ignore[override]  # without bounds
        self, tags: Any = None, backup: memsaver.policies.Backup = None
    ) -> memsaver.Transition:
        self.colocated_drain([])
        begin = time.perf_counter()
        leaving = [region for region in self._named(tags) if region.state == "active"]
        named: dict[str, Any] = backup if isinstance(backup, dict) else {region.tag: backup for region in leaving}
        copied = sum(region.leave(named.get(region.tag) or region.backup) for region in leaving)
        self._release_cache()
        return self._done(begin, leaving, copied, paused=True)

    def resume(self, tags: Any = None, restore: Any = True, **bounds: Any) -> memsaver.Transition:
        begin = time.perf_counter()
        coming = [region for region in self._named(tags) if region.state == "paused"]
        copied = sum(region.come() for region in coming)
        self._synchronize()
        if isinstance(self, EngineWorker) and any(region.tag == "kv_cache" for region in coming):
            self.engine.drop_prefix_cache()
        return self._done(begin, coming, copied, paused=False)

    def memory(self) -> Memory:
        if self.device.type == "cpu":
            return Memory(self.capacity, 0)
        free, total = torch.cuda.mem_get_info(self.device)
        return Memory(total, free)

    def _figures(self) -> dict[str, Any]:
        return {"uuid": "", "regions": []}

    def _done(self, begin: float, regions: Iterable[PlainRegion], copied: int, paused: bool) -> memsaver.Transition:
        tags, nbytes = tuple(region.tag for region in regions), sum(region.nbytes for region in regions)
        seconds = time.perf_counter() - begin
        if paused:
            return memsaver.Transition(paused=tags, released_bytes=nbytes, copied_bytes=copied, seconds=seconds)
        return memsaver.Transition(resumed=tags, restored_bytes=nbytes, copied_bytes=copied, seconds=seconds)


class PlainEngine(Plain, EngineWorker):
    """MRO: Plain's pauses, the engine's calls."""


class PlainTrainer(Plain, TrainerWorker):
    """MRO: Plain's pauses, the trainer's calls."""


class OffloadingLoop(Loop):
    engine_worker, trainer_worker = PlainEngine, PlainTrainer
