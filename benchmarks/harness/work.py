"""The work of a benchmark: tensors with random contents, the comparison of these, times, and summaries of samples."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.harness.machine import GIB, MIB

_PIECE = 8 * MIB  # numbers that are summed at a time


@dataclass(frozen=True)
class Work:
    tensors: int
    nbytes: int  # of each
    backup: str = "host"  # "none": the contents are not kept

    @property
    def total(self) -> int:
        return self.tensors * self.nbytes

    def scaled(self, scale: float) -> Work:
        """With fewer tensors, but at least two, and if these are too large, with smaller ones."""
        tensors = max(2, int(self.tensors * scale))
        nbytes = min(self.nbytes, int(self.total * scale / tensors))
        return replace(self, tensors=tensors, nbytes=max(2 * MIB, nbytes // (2 * MIB) * 2 * MIB))

    def allocate(self, device: str) -> list[torch.Tensor]:
        return [torch.empty(self.nbytes // 8, dtype=torch.int64, device=device) for _ in range(self.tensors)]

    def __str__(self) -> str:
        how = "without backup" if self.backup == "none" else f"with backup {self.backup!r}"
        return f"{size(self.total)} {how}, {self.tensors} tensors"


class Contents:
    """Random contents of tensors, which :meth:`check` compares by checksums of all bytes, and their addresses.

    ``kept`` False: contents are undefined after a resume, and the check writes to the memory.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], kept: bool = True) -> None:
        self.tensors, self._kept = list(tensors), kept
        self._addresses = [tensor.data_ptr() for tensor in tensors]
        for tensor in self.tensors if kept else ():
            tensor.random_()
        self._sums = checksums(self.tensors) if kept else []

    def change(self) -> None:
        """Before each pause, so that a backup of an earlier one does not pass for this one's."""
        if self._kept:
            torch._foreach_add_(self.tensors, 1)
            self._sums = checksums(self.tensors)

    def check(self) -> None:
        """Raises AssertionError if a byte or an address has changed."""
        if [tensor.data_ptr() for tensor in self.tensors] != self._addresses:
            raise AssertionError("addresses have changed")
        if not self._kept:
            for number, tensor in enumerate(self.tensors):
                tensor.fill_(number)
                if int(tensor[0]) != number or int(tensor[-1]) != number:
                    raise AssertionError(f"tensor {number} does not hold what was written to it")
            return
        found = checksums(self.tensors)
        if found != self._sums:
            number = next(at for at, sums in enumerate(zip(found, self._sums)) if sums[0] != sums[1])
            raise AssertionError(f"the contents of tensor {number} of {len(found)} have changed")


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Sums of int64 numbers times odd weights, modulo 2**64: a number that has changed or has moved changes the sum."""
    if not tensors:
        return []
    longest = min(_PIECE, max(tensor.numel() for tensor in tensors))
    weights = torch.arange(1, 2 * longest, 2, dtype=torch.int64, device=tensors[0].device)
    sums = []
    for tensor in tensors:
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for piece in tensor.split(_PIECE):
            total = total * 31 + (piece * weights[: piece.numel()]).sum()
        sums.append(total)
    found: list[int] = torch.stack(sums).tolist()
    return found


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def timed(device: str, call: Callable[[], object]) -> float:
    """Milliseconds of a call, with the work of the device."""
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - begin) * 1e3


def copy_rate(device: str, nbytes: int) -> float:
    """Bytes per second, read and written, of a plain copy on the device."""
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    took = [timed(device, lambda: target.copy_(source)) for _ in range(13)]
    return 2e3 * nbytes / statistics.median(took[3:])


def take_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The samples of each way. The ways take turns, after one round that does not count: a machine's speed drifts."""
    samples: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(1 + rounds):
        for way, measure in ways.items():
            sample = measure()
            samples[way] += [sample] if number else []
    return samples


def ratio(samples: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """The median over the rounds of one way's sample to the other's."""
    return statistics.median(each / compared for each, compared in zip(samples[one], samples[other]))


def median(samples: Sequence[float]) -> float | None:
    return statistics.median(samples) if samples else None


def share(limit: float | None, took: float | None) -> str | None:
    """How much of the limit's rate a time has."""
    return f"{100 * limit / took:.0f} %" if limit and took else None


def size(nbytes: float) -> str:
    return f"{nbytes / GIB:.4g} GiB" if nbytes >= GIB else f"{nbytes / MIB:.4g} MiB"
