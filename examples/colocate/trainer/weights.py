"""The weights for whoever takes them over: written straight into tensors of theirs, or full ones in bounded buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .memory import local

_SHOWN = 4  # names in an error


@torch.no_grad()
def weight_buckets(model: nn.Module, max_bytes: int, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Name -> full tensor of `dtype` on the CPU, in buckets of at most `max_bytes`.

    A tensor that is larger travels alone, whole: the bound is then its own size. Gathering a shard is a collective, so
    all ranks have to step through their iterators together. The device holds one full tensor at a time beyond the
    shards.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; expected a positive number of bytes")
    bucket: dict[str, Tensor] = {}
    held = 0
    for name, parameter in model.named_parameters():
        nbytes = parameter.numel() * dtype.itemsize
        if bucket and held + nbytes > max_bytes:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = _full(parameter).to(dtype=dtype, device="cpu", copy=True)
        held += nbytes
    if bucket:
        yield bucket


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


class WeightWriter:
    """Writes a model's parameters into tensors of others: full ones by name, parts of fused weights among them.

    What does not change is looked up once: a write then costs the host a fraction of what it costs the device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows = [_row(name, parameter) for name, parameter in model.named_parameters()]
        self._names = {row.name for row in self._rows}

    @torch.no_grad()
    def write(self, targets: Sequence[Mapping[str, Tensor]], dtype: torch.dtype, gather: bool = False) -> int:
        """Write into all `targets`, of `dtype`, such as the attached weights of every engine on the device.

        Each rank writes its shards; when all ranks are done each target is whole. The cast is part of the copy, a few
        kernels in all, and takes no memory. With `gather`, for ranks that do not reach each other's targets, every rank
        gathers one full parameter after the other, which is all that it takes, and writes each into its own targets.
        That is collective, also for a rank without targets.

        Returns the bytes that this rank wrote. Raises ValueError, before the first byte is written, for names, shapes,
        dtypes or devices that are not those of the model.
        """
        for target in targets:
            self._check(target, dtype)
        if gather:
            for row in self._rows:
                full = _full(row.parameter)
                for target in targets:
                    target[row.name].copy_(full)
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


def _full(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    group = parameter.device_mesh.get_group()
    if not (parameter.is_cuda and dist.get_backend(group) == "gloo"):
        return parameter.full_tensor().detach()
    # Ranks that share a GPU: gloo's gathering on CUDA ended the process (torch 2.11), on the CPU it works.
    row = _row("", parameter)
    chunk = -(-row.shape[0] // dist.get_world_size(group))
    shard = torch.zeros((chunk, *row.shape[1:]), dtype=parameter.dtype)
    shard[: row.last - row.first].copy_(local(parameter))
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard, group=group)
    return torch.cat(shards)[: row.shape[0]]
