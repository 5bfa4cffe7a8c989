"""The memory savers that are compared: each has the same work, in a process of its own."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Protocol

import torch

import memsaver
from benchmarks.harness.processes import Sample
from benchmarks.harness.work import Contents, Work, timed

MEMSAVER = "memsaver"
RETAINED = "memsaver, chunks retained"
TMS = "torch_memory_saver"  # pins host memory anew in each pause
TMS_RETAINED = "torch_memory_saver, backups retained"
RETAIN = "100GiB"


class Subject(Protocol):
    def allocate(self, work: Work) -> list[torch.Tensor]: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Memsaver:
    """One region. ``options``: of ``memsaver.configure()``."""

    def __init__(
        self, device: str, backup: str, memory_timeout: float = 0.0, fill: str | None = None, **options: Any
    ) -> None:
        memsaver.configure(**options)
        self.device, self._memory_timeout = device, memory_timeout
        self.region = memsaver.region("work", device=device, backup=backup, fill=fill)

    def allocate(self, work: Work) -> list[torch.Tensor]:
        with self.region:
            return work.allocate(self.device)

    def pause(self) -> None:
        self.region.pause()

    def resume(self) -> None:
        self.region.resume(memory_timeout=self._memory_timeout)


class TorchMemorySaver:
    """The peer with its hook in torch's allocator: as a library, without LD_PRELOAD."""

    def __init__(self, device: str, backup: str, retained: bool = False) -> None:
        self._saver: Any = importlib.import_module("torch_memory_saver").torch_memory_saver
        self._saver.hook_mode = "torch"
        self.device, self._backup = device, backup != "none"
        if retained:
            self._saver.retain_cpu_backup = True

    def allocate(self, work: Work) -> list[torch.Tensor]:
        with self._saver.region(tag="work", enable_cpu_backup=self._backup):
            return work.allocate(self.device)

    def pause(self) -> None:
        self._saver.pause("work")

    def resume(self) -> None:
        self._saver.resume("work")


MAKERS: dict[str, Callable[..., Subject]] = {
    MEMSAVER: Memsaver,
    RETAINED: lambda device, backup: Memsaver(device, backup, retain=RETAIN),
    TMS: TorchMemorySaver,
    TMS_RETAINED: lambda device, backup: TorchMemorySaver(device, backup, retained=True),
}


class Sides:
    """Two regions of the same work, of which one is resident."""

    def __init__(self, work: Work, device: str, lazy: bool = False) -> None:
        self.device, self._resident = device, 0
        self.regions = [memsaver.region(f"side {side}", device=device, backup=work.backup) for side in range(2)]
        self.contents = []
        for region in self.regions:
            with region:
                tensors = work.allocate(device)
            self.contents.append(Contents(tensors, kept=work.backup != "none"))
            region.pause(lazy=lazy)
        self.regions[0].resume()

    def turn(self, act: Callable[[memsaver.Region, memsaver.Region], object]) -> float:
        """Milliseconds of ``act(out, into)``. The contents that came in are compared."""
        out, into = self._resident, 1 - self._resident
        self.contents[out].change()
        took = timed(self.device, lambda: act(self.regions[out], self.regions[into]))
        self.contents[into].check()
        self._resident = into
        return took


def switch(out: memsaver.Region, into: memsaver.Region) -> None:
    memsaver.switch(pause=out.tag, resume=into.tag)


def peers(device: str) -> tuple[str, ...]:
    """torch_memory_saver's two ways, if it is installed."""
    return (TMS, TMS_RETAINED) if device != "cpu" and find_spec("torch_memory_saver") else ()


def cycles_of(name: str, work: Work, number: int, device: str) -> Sample:
    """Milliseconds of a first pause and resume, directly after the contents were written, and of ``number`` others."""
    subject = MAKERS[name](device, work.backup)
    contents = Contents(subject.allocate(work), kept=work.backup != "none")
    pauses, resumes = [], []
    for _ in range(number + 1):
        contents.change()
        pauses.append(timed(device, subject.pause))
        resumes.append(timed(device, subject.resume))
        contents.check()
    return {"pause_ms": pauses, "resume_ms": resumes}
