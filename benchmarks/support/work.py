"""The work of a benchmark: tensors with random contents, and the check of them after a resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from support.host import GIB, MIB

RETAIN = "100GiB"  # for subjects whose chunks stay in the process


@dataclass(frozen=True)
class Work:
    tensors: int
    nbytes: int  # each
    backed_up: bool

    @property
    def total(self) -> int:
        return self.tensors * self.nbytes

    def scaled(self, scale: float) -> Work:
        """Fewer tensors; where these are few already, smaller ones."""
        if self.nbytes > 64 * MIB:
            return replace(self, nbytes=max(2 * MIB, int(self.nbytes * scale) // (2 * MIB) * 2 * MIB))
        return replace(self, tensors=max(2, int(self.tensors * scale)))

    def allocate(self, device: str) -> list[torch.Tensor]:
        return [torch.empty(self.nbytes // 8, dtype=torch.int64, device=device) for _ in range(self.tensors)]

    def __str__(self) -> str:
        how = "backed up" if self.backed_up else "without backup"
        return f"{size(self.total)} {how}, {self.tensors} tensors of {size(self.nbytes)}"


LARGE = Work(2, 32 * GIB, backed_up=False)
MEDIUM = Work(256, 64 * MIB, backed_up=True)
SMALL = Work(4096, 2 * MIB, backed_up=True)


class Contents:
    """Random contents of tensors, with a copy to compare them with where they are to be kept."""

    def __init__(self, tensors: Sequence[torch.Tensor], kept: bool = True) -> None:
        self.tensors = list(tensors)
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        self._copies: list[torch.Tensor] = []
        if kept:
            for tensor in tensors:
                tensor.random_()
            self._copies = [tensor.clone() for tensor in tensors]

    def change(self) -> None:
        """Before each pause, so that a backup of an earlier one is seen through."""
        for each in (*self.tensors, *self._copies):
            each.add_(1)

    def check(self) -> None:
        """Raises if a byte or an address has changed. Writes to tensors without kept contents, to test their memory."""
        if [tensor.data_ptr() for tensor in self.tensors] != self._addresses:
            raise AssertionError("addresses changed")
        for tensor, copy in zip(self.tensors, self._copies):
            if not torch.equal(tensor, copy):
                raise AssertionError("contents differ after a cycle")
        if not self._copies:
            for tensor in self.tensors:
                tensor.fill_(1)


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def milliseconds(device: str, call: Callable[[], object]) -> float:
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def size(nbytes: float) -> str:
    return f"{nbytes / GIB:.4g} GiB" if nbytes >= GIB else f"{nbytes / MIB:.4g} MiB"
