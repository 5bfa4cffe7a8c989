"""Full weights in buckets of bounded size, for whoever takes them over."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


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


def _full(parameter: Tensor) -> Tensor:
    full: Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return full.detach()
