"""The weights for whoever takes them over: written straight into tensors of theirs, or full ones in bounded buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
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


@torch.no_grad()
def write_weights(
    model: nn.Module, targets: Sequence[Mapping[str, Tensor]], dtype: torch.dtype, gather: bool = False
) -> int:
    """Write every parameter into the tensors of its name: full ones of `dtype`, parts of fused weights among them.

    Each rank writes its shards into all `targets`, such as the attached weights of every engine on the device that the
    ranks share; when all ranks are done each target is whole. The cast is part of the copy, a few kernels in all, and
    takes no memory. With `gather`, for ranks that do not reach each other's targets, every rank gathers one full
    parameter after the other, which is all that it takes, and writes each into its own targets. That is collective,
    also for a rank without targets.

    Returns the bytes that this rank wrote. Raises ValueError, before the first byte is written, for names, shapes or
    dtypes that are not those of the model.
    """
    parameters = dict(model.named_parameters())
    for target in targets:
        check_target(parameters, target, dtype)
    if gather:
        for name, parameter in parameters.items():
            full = _full(parameter)
            for target in targets:
                target[name].copy_(full)
        return sum(tensor.nbytes for target in targets for tensor in target.values())
    written = 0
    for target in targets:
        pairs = [(_part(target[name], parameter), local(parameter)) for name, parameter in parameters.items()]
        pairs = [(to, shard) for to, shard in pairs if shard.numel()]  # the last ranks may have none of a small one
        torch._foreach_copy_([to for to, _ in pairs], [shard for _, shard in pairs])
        written += sum(to.nbytes for to, _ in pairs)
    return written


def check_target(parameters: Mapping[str, Tensor], target: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise ValueError unless `target` has a tensor of `dtype` for each parameter, of its full shape, and no other."""
    for verb, names in (("missing", parameters.keys() - target.keys()), ("unknown", target.keys() - parameters.keys())):
        if names:
            raise ValueError(f"targets are {verb}: {_some(names)}; expected one for every parameter of the model")
    device = next(iter(target.values())).device
    for name, parameter in parameters.items():
        to = target[name]
        if to.shape != parameter.shape or to.dtype != dtype:
            raise ValueError(
                f"the target of {name!r} is {to.dtype} {tuple(to.shape)}; expected {dtype} {tuple(parameter.shape)}"
            )
        if to.device != device:
            raise ValueError(f"the target of {name!r} is on {to.device}; expected {device}, where the first one is")
        if isinstance(parameter, DTensor) and tuple(parameter.placements) != (Shard(0),):
            raise ValueError(f"{name!r} is placed as {parameter.placements}; expected (Shard(dim=0),)")


def _part(full: Tensor, parameter: Tensor) -> Tensor:
    """The rows of a full tensor that this rank's shard of a parameter is: as torch.chunk() deals them out."""
    if not isinstance(parameter, DTensor):
        return full
    rank, ranks, rows = parameter.device_mesh.get_local_rank(), parameter.device_mesh.size(), full.shape[0]
    chunk = -(-rows // ranks)
    first, last = min(rank * chunk, rows), min((rank + 1) * chunk, rows)
    assert local(parameter).shape[0] == last - first, "FSDP2 shards as torch.chunk() does"
    return full[first:last]


def _some(names: set[str]) -> str:
    shown = sorted(names)[:_SHOWN]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")


def _full(parameter: Tensor) -> Tensor:
    full: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach()
