"""The weights for other processes: written into their tensors, or sent in buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..collectives import all_gather_tensor
from .memory import local

_SHOWN = 4  # names in an error
_BUCKET_BYTES = 256 << 20  # of full tensors that are gathered at once


@torch.no_grad()
def weight_buckets(model: nn.Module, max_bytes: int, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Name -> full tensor of `dtype` on the CPU, in buckets of at most `max_bytes`.

    A tensor that is larger travels alone, whole: the bound is then its own size. Gathering a bucket is one collective,
    so all ranks have to step through their iterators together. Beyond the shards the device holds one bucket, and this
    rank's part of it.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; expected a positive number of bytes")
    rows = [_row(name, parameter) for name, parameter in model.named_parameters()]
    for bucket in _buckets(rows, max_bytes, dtype):
        full: dict[str, Tensor] = {}
        for row, parts in _gathered(bucket, dtype):
            full[row.name] = torch.empty(row.shape, dtype=dtype)
            for part, first, last in parts:
                full[row.name][first:last].copy_(part.to(dtype))  # cast on the device, so that fewer bytes leave it
        yield full


@dataclass(frozen=True)
class _Row:
    """A parameter, and the rows of it that this rank's shard is."""

    name: str
    parameter: Tensor
    shape: torch.Size  # of the whole
    first: int
    last: int

    def part(self, full: Tensor) -> Tensor:
        return full if self.last - self.first == self.shape[0] else full[self.first : self.last]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that share it; None if this one has all of it."""
        return self.parameter.device_mesh.get_group() if isinstance(self.parameter, DTensor) else None


class WeightWriter:
    """Writes a model's parameters into tensors of others: full ones by name, parts of fused weights among them.

    Constant parts are looked up once, so a write costs the host less time than the device.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int = _BUCKET_BYTES) -> None:
        """`bucket_bytes`: of full tensors, in the dtype that is written, that a write with `gather` holds at once.

        A larger tensor is gathered alone.
        """
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {bucket_bytes}; expected a positive number of bytes")
        self._bucket_bytes = bucket_bytes
        self._rows = [_row(name, parameter) for name, parameter in model.named_parameters()]
        self._names = {row.name for row in self._rows}

    @torch.no_grad()
    def write(self, targets: Sequence[Mapping[str, Tensor]], dtype: torch.dtype, gather: bool = False) -> int:
        """Write into all `targets`, of `dtype`, such as the attached weights of every engine on the device.

        Each rank writes its shards; when all ranks are done each target is whole. The cast is part of the copy, a few
        kernels in all, and takes no memory. With `gather`, for ranks that do not reach each other's targets, every rank
        casts its shards, gathers a bucket of parameters in one collective, and writes it into its own targets; then the
        next one. That takes the memory of a bucket and of this rank's part of it, and is collective, also for a rank
        without targets.

        Returns the bytes that this rank wrote. Raises ValueError, before the first byte is written, for names, shapes,
        dtypes or devices that are not those of the model.
        """
        for target in targets:
            self._check(target, dtype)
        if gather:
            for bucket in _buckets(self._rows, self._bucket_bytes, dtype):
                found = list(_gathered(bucket, dtype))
                for target in targets:
                    pieces = [
                        (target[row.name][first:last], part) for row, parts in found for part, first, last in parts
                    ]
                    torch._foreach_copy_([to for to, _ in pieces], [part for _, part in pieces])
                del found  # before the next bucket comes
            return sum(tensor.nbytes for target in targets for tensor in target.values())
        rows = [row for row in self._rows if row.last > row.first]  # the last ranks may have none of a small one
        shards = [local(row.parameter) for row in rows]
        for target in targets:
            torch._foreach_copy_([row.part(target[row.name]) for row in rows], shards)
        return len(targets) * sum(shard.numel() for shard in shards) * dtype.itemsize

    def _check(self, target: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        for verb, names in (("missing", self._names - target.keys()), ("unknown", target.keys() - self._names)):
            if names:
                raise ValueError(f"targets are {verb}: {_some(names)}; expected one for every parameter of the model")
        device = next(iter(target.values())).device
        for row in self._rows:
            to = target[row.name]
            if to.shape != row.shape or to.dtype != dtype:
                raise ValueError(
                    f"the target of {row.name!r} is {to.dtype} {tuple(to.shape)}; expected {dtype} {tuple(row.shape)}"
                )
            if to.device != device:
                raise ValueError(
                    f"the target of {row.name!r} is on {to.device}; expected {device}, where the first one is"
                )


def _row(name: str, parameter: Tensor) -> _Row:
    """Raises ValueError for a parameter that is sharded otherwise than FSDP2 does it: rows, as torch.chunk() deals."""
    if not isinstance(parameter, DTensor):
        return _Row(name, parameter, parameter.shape, 0, parameter.shape[0])
    if tuple(parameter.placements) != (Shard(0),):
        raise ValueError(f"{name!r} is placed as {parameter.placements}; expected (Shard(dim=0),)")
    rank, ranks, rows = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size(), parameter.shape[0]
    chunk = -(-rows // ranks)
    first, last = min(rank * chunk, rows), min((rank + 1) * chunk, rows)
    assert local(parameter).shape[0] == last - first, "FSDP2 shards as torch.chunk() does"
    return _Row(name, parameter, parameter.shape, first, last)


def _some(names: set[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _buckets(rows: list[_Row], max_bytes: int, dtype: torch.dtype) -> Iterator[list[_Row]]:
    """In order, as many at a time as `max_bytes` of `dtype` hold, and one at least."""
    bucket: list[_Row] = []
    held = 0
    for row in rows:
        nbytes = row.shape.numel() * dtype.itemsize
        if bucket and held + nbytes > max_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append(row)
        held += nbytes
    if bucket:
        yield bucket


def _gathered(rows: list[_Row], dtype: torch.dtype) -> Iterator[tuple[_Row, list[tuple[Tensor, int, int]]]]:
    """Each parameter with its parts, cast to `dtype`: the rows `first` to `last` of it, from every rank that has some.

    One collective for all that ranks share, over shards that are cast before: a cast of each number by itself
    gives the same bits before and after the collective, and 16 bits halve the traffic of 32.
    """
    shared = [row for row in rows if row.group is not None]
    gathered: dict[str, list[tuple[Tensor, int, int]]] = {}
    if shared:
        group = shared[0].group
        assert all(row.group == group for row in shared), "FSDP2 shards over one mesh"
        ranks = dist.get_world_size(group)
        # Ranks send as many rows of a parameter: those of the first rank, which has most.
        chunks = [-(-row.shape[0] // ranks) for row in shared]
        sizes = [chunk * row.shape[1:].numel() for chunk, row in zip(chunks, shared)]
        shards = [local(row.parameter) for row in shared]
        # Ranks that share a GPU: gloo's gathering on CUDA ended the process (torch 2.11), on the CPU it works.
        device = torch.device("cpu") if dist.get_backend(group) == "gloo" else shards[0].device
        mine = torch.zeros(sum(sizes), dtype=dtype, device=device)
        places = [
            place[: shard.numel()].view(shard.shape) for place, shard in zip(mine.split(sizes), shards, strict=True)
        ]
        torch._foreach_copy_(places, shards if device == shards[0].device else [shard.to(dtype) for shard in shards])
        everyone = torch.empty((ranks, len(mine)), dtype=dtype, device=device)
        all_gather_tensor(everyone.flatten(), mine, group)
        columns = everyone.split(sizes, dim=1)
        for row, chunk, column in zip(shared, chunks, columns):
            parts = []
            for rank in range(ranks):
                first, last = min(rank * chunk, row.shape[0]), min((rank + 1) * chunk, row.shape[0])
                if last > first:
                    part = column[rank][: (last - first) * row.shape[1:].numel()]
                    parts.append((part.view(last - first, *row.shape[1:]), first, last))
            gathered[row.name] = parts
    for row in rows:
        yield row, gathered.get(row.name) or [(row.parameter.detach(), 0, row.shape[0])]
