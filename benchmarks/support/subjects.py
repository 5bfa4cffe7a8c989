"""memsaver and torch_memory_saver, each with the same work in a process of its own."""

from __future__ import annotations

import importlib
import importlib.metadata
from contextlib import AbstractContextManager
from typing import Any, Protocol

from support.processes import Sample
from support.work import RETAIN, Contents, Work, milliseconds


class Subject(Protocol):
    def region(self) -> AbstractContextManager[object]: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Ours:
    def __init__(self, device: str, backed_up: bool, retained: bool) -> None:
        import memsaver

        if retained:
            memsaver.configure(retain=RETAIN)
        self._region = memsaver.region("work", device=device, backup="host" if backed_up else "none")

    def region(self) -> AbstractContextManager[object]:
        return self._region

    def pause(self) -> None:
        self._region.pause()

    def resume(self) -> None:
        self._region.resume()


class TorchMemorySaver:
    """The peer with its hook through torch's allocator: as a library, without LD_PRELOAD."""

    def __init__(self, device: str, backed_up: bool, retained: bool) -> None:
        self._saver: Any = importlib.import_module("torch_memory_saver").torch_memory_saver
        self._saver.hook_mode = "torch"
        self._backed_up = backed_up
        if retained:
            self._saver.retain_cpu_backup = True

    def region(self) -> AbstractContextManager[object]:
        region: AbstractContextManager[object] = self._saver.region(tag="work", enable_cpu_backup=self._backed_up)
        return region

    def pause(self) -> None:
        self._saver.pause("work")

    def resume(self) -> None:
        self._saver.resume("work")


OURS = ("memsaver", "memsaver, chunks retained")
SLOW = "torch_memory_saver"  # pins anew at every pause
PEERS = (SLOW, "torch_memory_saver, backups retained")


def peer_version() -> str | None:
    """None where there is no peer to measure."""
    try:
        return importlib.metadata.version("torch_memory_saver")
    except importlib.metadata.PackageNotFoundError:
        return None


def make(name: str, device: str, backed_up: bool) -> Subject:
    kind, _, retained = name.partition(", ")
    return (Ours if kind == "memsaver" else TorchMemorySaver)(device, backed_up, bool(retained))


def measure(name: str, work: Work, cycles: int, device: str) -> Sample:
    """Milliseconds of a first pause and resume and ``cycles`` later ones; the first comes right after the filling."""
    subject = make(name, device, work.backed_up)
    with subject.region():
        tensors = work.allocate(device)
    contents = Contents(tensors, kept=work.backed_up)
    pauses, resumes = [], []
    for _ in range(cycles + 1):
        contents.change()
        pauses.append(milliseconds(device, subject.pause))
        resumes.append(milliseconds(device, subject.resume))
        contents.check()
    return {"bytes": work.total, "pause_ms": pauses, "resume_ms": resumes}
