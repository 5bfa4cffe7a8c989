"""The functions of torch that send and receive storages, extended to storages in regions.

The methods of the storage's class are replaced, and not the functions of torch.multiprocessing that call them: other
libraries import those by name, or replace them as well. Storages outside of regions pass through unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.multiprocessing import reductions

from memsaver import _adapter, _core, regions
from memsaver._torch.ipc.handle import Handle, Place, parsed
from memsaver._torch.ipc.receiver import Receiver
from memsaver._torch.ipc.server import Sender
from memsaver.errors import Error

_sender = Sender()
_receiver = Receiver()


def install() -> None:
    """Extends torch. To be called once."""
    _extend_cuda_storages()
    _extend_host_storages()
    os.register_at_fork(after_in_child=_after_fork)
    _adapter.note("multiprocessing")


def withdraw(region: regions.Region) -> None:
    """Refuses the handles of a region that was paused."""
    _sender.sent.withdraw(region)


def _after_fork() -> None:
    _sender.reset_in_child()
    _receiver.reset_in_child()


def _extend_cuda_storages() -> None:
    """``_share_cuda_`` returns eight values, of which torch passes six on to ``_new_shared_cuda``."""
    share, new, release = (
        getattr(torch.UntypedStorage, name)
        for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda")
    )

    def _share_cuda_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        region = _region_of(self)
        if region is None:
            return share(self, *args, **kwargs)
        handle = _sent(self, region)
        return self.device.index, handle, self.nbytes(), 0, handle, 0, b"", False

    def _new_shared_cuda(*args: Any, **kwargs: Any) -> Any:
        # args: device, handle, bytes, offset, counter, offset of the counter, event, whether to wait for it
        place = parsed(args[1]) if len(args) > 1 else None
        return new(*args, **kwargs) if place is None else _received(place)

    def _release_ipc_counter_cuda(*args: Any, **kwargs: Any) -> Any:
        place = parsed(args[0]) if args else None
        return release(*args, **kwargs) if place is None else _received_again(place)

    torch.UntypedStorage._share_cuda_ = _share_cuda_  # type: ignore[assignment,method-assign]
    torch.UntypedStorage._new_shared_cuda = staticmethod(_new_shared_cuda)  # type: ignore[assignment,method-assign]
    torch.UntypedStorage._release_ipc_counter_cuda = staticmethod(  # type: ignore[assignment,method-assign]
        _release_ipc_counter_cuda
    )


def _extend_host_storages() -> None:
    """torch would copy a storage of the host into shared memory, out of its region."""
    reduce: Callable[[Any], Any] = reductions.reduce_storage

    def reduce_storage(storage: Any) -> Any:
        region = _region_of(storage) if storage.device.type == "cpu" else None
        return reduce(storage) if region is None else (receive_host_storage, (_sent(storage, region),))

    reductions.reduce_storage = reduce_storage  # for libraries that register all of torch's reductions again
    if ForkingPickler._extra_reducers.get(torch.UntypedStorage) is reduce:  # type: ignore[attr-defined]
        ForkingPickler.register(torch.UntypedStorage, reduce_storage)


def receive_host_storage(handle: Handle) -> torch.UntypedStorage:
    """The storage of a handle: that of an earlier receipt if it still exists."""
    place = parsed(handle)
    if place is None:
        raise ValueError(f"handle is {handle!r}, expected the handle of a storage in a region")
    storage = reductions.storage_from_cache(torch.UntypedStorage, handle)
    if storage is None:
        storage = _received(place)
        reductions.shared_cache[handle] = reductions.StorageWeakRef(storage)
    else:
        _received_again(place)
    return storage


def _region_of(storage: torch.UntypedStorage) -> regions.Region | None:
    """The region of a storage to be sent, or None if torch sends it."""
    if not _core.usable() or not storage.nbytes():
        return None  # a forked child of a process with regions has none
    if _receiver.has(storage):
        raise Error(
            "the tensor's memory belongs to a region of another process, from which it was received, expected memory "
            "of this process: clone the tensor before sending it on"
        )
    return regions.owning(storage.data_ptr())


def _sent(storage: torch.UntypedStorage, region: regions.Region) -> Handle:
    """The handle of the storage, equal for all of its sends."""
    address = _sender.address()
    if region.device != "cpu":  # receivers cannot wait for this process's work
        torch.cuda.current_stream(region.device).synchronize()
    sent = _sender.sent.add(storage, region)
    uuid = _core.device_uuid(region.device)
    place = Place(address, os.getpid(), sent.token, uuid, region.tag, sent.residence, sent.address, sent.nbytes)
    return place.handle()


def _received(place: Place) -> torch.UntypedStorage:
    if not _sender.is_own(place.address):
        return _receiver.receive(place)
    sent, storage = _sender.sent.claim(place.token, place.device_uuid, place.tag, place.residence)  # its own
    _sender.sent.unclaim(sent)
    return storage


def _received_again(place: Place) -> None:
    if _sender.is_own(place.address):
        _received(place)
    else:
        _receiver.acknowledge(place)
