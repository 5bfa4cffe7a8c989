"""Memory of one process in another: the same physical memory, without a copy.

An attachment is a lease. The owner's pause waits for its end, and its tensors are unmapped then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, cast, overload

import torch
from typing_extensions import TypeVar

from memsaver import _core, _pool_client, regions
from memsaver._arguments import seconds
from memsaver.errors import ConfigError, Error

_TENSORS_IN_A_LEASE = 1000  # so that the ranges of one lease fit a message
_Tensors = TypeVar("_Tensors", default=Any)  # torch.Tensor, or dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Shared:
    """A tensor within a region. ``offset``: its address in the owner. ``shape``, ``stride``: in elements."""

    name: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Part:
    """Tensors of one region. They can be attached while its residence is the same."""

    tag: str
    backup: str
    residence: int
    tensors: tuple[_Shared, ...]

    @property
    def key(self) -> str:
        """The request to the owner: see csrc/pool/wire.h."""
        ranges = sorted({(each.offset, each.nbytes) for each in self.tensors})
        return "\n".join([self.tag, self.backup, *(f"{offset}\n{nbytes}" for offset, nbytes in ranges)])


@dataclass(frozen=True)
class Token(Generic[_Tensors]):
    """A description of shared tensors for ``attach()`` in another process. It is small, and pickles.

    ``share()`` returns it. It is valid until one of its regions is paused.

    Attributes:
        device_uuid: The driver's name of the device.
        owner: The owner's number at the broker.
        pid: The owner's process id.

    Examples:
        >>> memsaver.configure(pool="shared")
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> token = memsaver.share({"bias": weights.empty((4,))})
        >>> token.names, token.pid == os.getpid()
        (('bias',), True)
    """

    device_uuid: str
    owner: int
    pid: int
    _parts: tuple[_Part, ...]
    _single: bool

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors. One empty name if a tensor was shared without a name."""
        return tuple(each.name for part in self._parts for each in part.tensors)


@overload
def share(tensors: torch.Tensor) -> Token[torch.Tensor]: ...
@overload
def share(tensors: Mapping[str, torch.Tensor]) -> Token[dict[str, torch.Tensor]]: ...
def share(tensors: torch.Tensor | Mapping[str, torch.Tensor]) -> Token[Any]:
    """Offers tensors of this process's regions to other processes on the same device, without a copy.

    Args:
        tensors: A tensor, or a mapping of names to tensors, all on one device. Views are allowed, such as a part of a
            fused projection. For a DTensor, the local shard is shared. The tensors have to stay allocated while other
            processes attach.

    Returns:
        The token to pass to the other processes. It is valid until one of the regions is paused.

    Raises:
        TypeError: A value is not a tensor, or a name is not a string.
        ValueError: There is no tensor, a tensor is in no region or has no strided memory, or there are several devices.
        RegionPausedError: The region of a tensor is not active.
        ConfigError: The memory of a tensor does not come from the shared pool.

    Examples:
        >>> memsaver.configure(pool="shared")
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> token = memsaver.share({"bias": weights.empty((4,)), "scale": weights.empty((1,))})
        >>> token.names
        ('bias', 'scale')
    """
    single = not isinstance(tensors, Mapping)
    named: dict[Any, Any] = dict(tensors) if isinstance(tensors, Mapping) else {"": tensors}
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
        if not _pool_client.is_pooled(region.tag, region.device, region.backup, region.residence):
            raise ConfigError(
                f"region {region.tag!r} holds memory that it took from the driver before configure(pool='shared'), and "
                "only memory of the shared pool can be shared: pause and resume the region, or configure the pool "
                "before the region is made",
                option="pool",
                value="shared",
            )
        for first in range(0, len(shared_there), _TENSORS_IN_A_LEASE):
            some = tuple(shared_there[first : first + _TENSORS_IN_A_LEASE])
            parts.append(_Part(region.tag, region.backup, region.residence, some))
    return Token(_core.device_uuid(device), _core.pool_client(device), os.getpid(), tuple(parts), single)


@contextmanager
def attach(token: Token[_Tensors], *, timeout: float = 10.0) -> Iterator[_Tensors]:
    """Maps shared tensors of another process for the length of a with statement.

    Writes to the tensors are writes to the owner's memory. The end of the statement waits for the device and unmaps the
    memory. The tensors are empty then, and views of them must not be used any more. The owner's pause waits for it.

    Args:
        token: The result of ``share()`` in the owner.
        timeout: Seconds in which the owner must have answered. The call does not wait for memory or for other attached
            processes.

    Yields:
        The tensor if ``share()`` was called with a tensor, else a dict of names to tensors.

    Raises:
        TypeError: ``token`` is not a token.
        memsaver.Error: The owner refuses, since its region was paused after ``share()``, or it has exited.
        BrokerError: The owner or the broker does not answer.

    Examples:
        In the owner:

        >>> memsaver.configure(pool="shared")
        >>> weights = memsaver.region("weights", device="cpu", backup="host")
        >>> bias = weights.empty((4,)).fill_(1)
        >>> token = memsaver.share(bias)

        In another process, with the token from the owner:

        >>> def write(token):
        ...     with memsaver.attach(token) as bias:
        ...         bias.mul_(3)
        >>> run_in_another_process(write, token)
        >>> bias
        tensor([3., 3., 3., 3.])
    """
    if not isinstance(token, Token):
        raise TypeError(f"token is {token!r}, expected a result of share()")
    until = time.monotonic() + seconds(timeout)
    device = _device_of(token.device_uuid)
    _pool_client.connect(device)
    with ExitStack() as leases:
        tensors: dict[str, torch.Tensor] = {}
        leases.callback(_forget, tensors)
        for part in token._parts:
            left = max(0.0, until - time.monotonic())
            lease = _core.attach(device, token.owner, token.pid, part.residence, part.key, left)
            leases.callback(lease.leave)
            for each in part.tensors:
                tensors[each.name] = _view(lease, device, each)
        leases.callback(_forget, tensors)  # runs first: the tensors must be empty before their memory is unmapped
        yield cast(_Tensors, tensors[""] if token._single else dict(tensors))


def _placed(name: str, tensor: Any) -> tuple[regions.Region, _Shared]:
    local = getattr(tensor, "to_local", None)
    tensor = local() if local is not None else tensor
    subject = f"tensor {name!r}" if name else "the tensor"
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{subject} is a {type(tensor).__name__}, expected a torch.Tensor")
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or not tensor.numel():
        raise ValueError(f"{subject}, of shape {tuple(tensor.shape)}, has no memory of a plain layout to share")
    address = tensor.data_ptr()
    region = regions.owning(address)
    if region is None:
        raise ValueError(f"{subject}, of shape {tuple(tensor.shape)} on {tensor.device}, is in no region")
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride()))
    return region, _Shared(
        name,
        address,
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
