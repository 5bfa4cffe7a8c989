"""Memory of one process in another: the same physical memory, without a copy.

An attachment is a lease. The owner's pause waits for it, and what it showed is gone when it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memsaver import _core, membership, regions
from memsaver.errors import ConfigError, Error

_TENSORS_IN_A_LEASE = 1000  # so that the ranges of one fit a message


@dataclass(frozen=True)
class _Shared:
    """A tensor within a region: ``offset`` in bytes, ``shape`` and ``stride`` in elements."""

    name: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Part:
    """Tensors of one region, in one of its stays in memory."""

    tag: str
    backup: str
    residence: int
    tensors: tuple[_Shared, ...]

    @property
    def key(self) -> str:
        """What the owner is asked for: see csrc/wire.h."""
        ranges = sorted({(each.offset, each.nbytes) for each in self.tensors})
        return "\n".join([self.tag, self.backup, *(f"{offset}\n{nbytes}" for offset, nbytes in ranges)])


@dataclass(frozen=True)
class Token:
    """What :func:`attach` needs: small, and picklable. Worth nothing any more once a region of it was paused."""

    device_uuid: str
    owner: int  # as brokers know it
    pid: int
    parts: tuple[_Part, ...]
    single: bool

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(each.name for part in self.parts for each in part.tensors)


def share(tensors: Any) -> Token:
    """Offers tensors of this process's regions to other processes on the same device.

    ``tensors``: a tensor, or a mapping of names to tensors. They can be views, such as a part of a fused projection;
    of a DTensor it is the local shard. They have to stay allocated while others attach.

    Raises TypeError for what is no tensor, ValueError for a tensor that is in no region, RegionPausedError where its
    region is not active, ConfigError where its memory is not in the shared pool.
    """
    single = not isinstance(tensors, Mapping)
    named = {"": tensors} if single else dict(tensors)
    if not named:
        raise ValueError("tensors is empty, expected a tensor or several by name")
    devices: set[str] = set()
    by_region: dict[regions.Region, list[_Shared]] = {}
    for name, tensor in named.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no name, expected a string")
        region, shared = _placed(name, tensor)
        devices.add(region.device)
        by_region.setdefault(region, []).append(shared)
    if len(devices) > 1:
        raise ValueError(f"the tensors are on {', '.join(sorted(devices))}, expected one device")
    (device,) = devices
    if not _core.in_pool(device):
        raise ConfigError(
            f"memory on {device} comes from the driver, and only that of a shared pool can be shared: "
            "configure(pool='shared') before the regions are made",
            option="pool",
            value="process",
        )
    parts = []
    for region, shared_there in by_region.items():
        region.check_active("be shared")
        for first in range(0, len(shared_there), _TENSORS_IN_A_LEASE):
            some = tuple(shared_there[first : first + _TENSORS_IN_A_LEASE])
            parts.append(_Part(region.tag, region.backup, region.residence, some))
    return Token(_core.device_uuid(device), _core.pool_client(device), os.getpid(), tuple(parts), single)


@contextmanager
def attach(token: Token, *, timeout: float = 10.0) -> Iterator[Any]:
    """The shared tensors, for the length of the ``with`` block: a tensor, or a dict of names to tensors.

    What is written there is written in the owner's memory. Leaving waits for the device and unmaps; the tensors are
    empty then, and views of them must not be used any more. ``timeout``: seconds for the owner to answer.

    Raises memsaver.Error where the owner refuses, as for a token from before its last resume, or has ended, and
    BrokerError where nobody answers.
    """
    if not isinstance(token, Token):
        raise TypeError(f"token is {token!r}, expected what share() returns")
    timeout = regions.seconds(timeout)
    device = _device_of(token.device_uuid)
    membership.connect(device)
    with ExitStack() as leases:
        tensors: dict[str, torch.Tensor] = {}
        leases.callback(_forget, tensors)
        for part in token.parts:
            lease = _core.attach(device, token.owner, token.pid, part.residence, part.key, timeout)
            leases.callback(lease.leave)
            for each in part.tensors:
                tensors[each.name] = _view(lease, device, each)
        leases.callback(_forget, tensors)  # first of all: nobody uses what is about to be unmapped
        yield tensors[""] if token.single else dict(tensors)


def _placed(name: str, tensor: Any) -> tuple[regions.Region, _Shared]:
    local = getattr(tensor, "to_local", None)
    tensor = local() if local is not None else tensor
    what = f"tensor {name!r}" if name else "the tensor"
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{what} is a {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        raise ValueError(f"{what}, of shape {tuple(tensor.shape)}, has no memory of a plain layout to share")
    address = tensor.data_ptr()
    region = regions.owning(address)
    if region is None:
        raise ValueError(f"{what}, of shape {tuple(tensor.shape)} on {tensor.device}, is in no region")
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    return region, _Shared(
        name,
        address - region._core.base,
        extent * tensor.dtype.itemsize,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
    )


def _view(lease: Any, device: str, shared: _Shared) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        flat = torch.from_dlpack(lease.array(shared.offset, shared.nbytes))
        return flat.view(getattr(torch, shared.dtype)).as_strided(shared.shape, shared.stride)


def _forget(tensors: dict[str, torch.Tensor]) -> None:
    while tensors:
        _, tensor = tensors.popitem()
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _device_of(uuid: str) -> str:
    for ordinal in range(_core.cuda_device_count()):
        if _core.cuda_uuid(ordinal) == uuid:
            return f"cuda:{ordinal}"
    if _core.device_uuid("cpu") == uuid:
        return "cpu"
    raise Error(f"the token is of device {uuid}, which this process does not see")
