"""The storages of regions that this process has sent.

A storage is kept alive from its send to its receipt, and while receivers have it, as torch keeps its own. After a pause
of the region, a storage that was sent and not received is no longer kept, and its handle is refused.
"""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memsaver import _core
from memsaver.errors import ReceiveError, RegionPausedError
from memsaver.regions import Region, all_regions

_LEAST = 128  # entries before the first search for dead ones


@dataclass(eq=False)
class Sent:
    """A storage that was sent, once or several times, during one residence of its region."""

    token: str
    region: Region
    residence: int
    address: int
    nbytes: int
    weak: StorageWeakRef
    storage: torch.UntypedStorage | None = None  # set while it is kept alive
    pending: int = 0  # sends without a receipt
    claims: int = 0  # receivers

    @property
    def place(self) -> tuple[Region, int, int, int]:
        return self.region, self.residence, self.address, self.nbytes


class SentStorages:
    """All of them. Storages are dropped without the lock, because their end may run any code."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_token: dict[str, Sent] = {}
        self._by_place: dict[tuple[Region, int, int, int], Sent] = {}
        self._limit = _LEAST

    def add(self, storage: torch.UntypedStorage, region: Region) -> Sent:
        """Counts one send. The same storage has the same token during a residence."""
        region._check_fillable("send its tensors to another process")
        place = region, region.residence, storage.data_ptr(), storage.nbytes()
        with self._lock:
            self._remove_dead()
            sent = self._by_place.get(place)
            if sent is not None and sent.weak.expired():  # its memory was freed and allocated again
                self._remove(sent)
                sent = None
            if sent is None:
                sent = Sent(secrets.token_hex(16), *place, weak=StorageWeakRef(storage))
            self._by_place[place] = self._by_token[sent.token] = sent
            # torch.from_dlpack() makes further storages over the same memory: `weak` is of the one that is kept.
            sent.storage, sent.weak = storage, StorageWeakRef(storage)
            sent.pending += 1
        return sent

    def claim(self, token: str, device_uuid: str, tag: str, residence: int) -> tuple[Sent, torch.UntypedStorage]:
        """Counts one receiver. Returns the storage too, since a pause in another thread may take it from the entry.

        Raises RegionPausedError if the region is paused, and ReceiveError if the storage cannot be received any more.
        """
        with self._lock:
            sent = self._by_token.get(token)
            if sent is not None and sent.region.state == "active" and sent.region.residence == sent.residence:
                storage = torch.UntypedStorage._new_with_weak_ptr(sent.weak.cdata)
                if storage is not None:  # else it was freed
                    sent.storage = storage
                    sent.pending = max(0, sent.pending - 1)
                    sent.claims += 1
                    return sent, storage
        raise _refusal(tag, device_uuid, residence)

    def unclaim(self, sent: Sent) -> None:
        """Ends a claim."""
        with self._lock:
            sent.claims -= 1
            dropped = None if sent.claims or sent.pending else sent.storage
            if dropped is not None:
                sent.storage = None
        del dropped

    def withdraw(self, region: Region) -> None:
        """Forgets the storages of a region, which was paused. Their tokens are refused from now on."""
        with self._lock:
            withdrawn = [each for each in self._by_token.values() if each.region is region]
            for each in withdrawn:
                self._remove(each)
        for each in withdrawn:
            each.pending = 0
            each.storage = None

    def devices(self) -> set[str]:
        with self._lock:
            return {each.region.device for each in self._by_token.values()}

    def _remove(self, sent: Sent) -> None:
        del self._by_token[sent.token]
        if self._by_place.get(sent.place) is sent:
            del self._by_place[sent.place]

    def _remove_dead(self) -> None:
        if len(self._by_token) < self._limit:
            return
        for each in [each for each in self._by_token.values() if each.weak.expired()]:
            self._remove(each)
        self._limit = max(_LEAST, 2 * len(self._by_token))


def _refusal(tag: str, device_uuid: str, residence: int) -> ReceiveError | RegionPausedError:
    for region in all_regions():
        if region.tag != tag or region._handle.closed or _core.device_uuid(region.device) != device_uuid:
            continue
        if region.state != "active":
            return RegionPausedError(
                f"region {tag!r} of the sender is {region.state}: its tensors cannot be received, and those that were "
                "sent before have to be sent again after its resume",
                tag=tag,
                state=region.state,
            )
        if region.residence != residence:
            return ReceiveError(
                f"region {tag!r} of the sender was paused and resumed after the tensor was sent (residence "
                f"{residence}, now {region.residence}), expected a tensor of the present residence: send it again",
                reason="stale",
            )
    return ReceiveError(
        f"the sender has no such tensor in region {tag!r}: its memory was freed, or the token is wrong, expected the "
        "token of a tensor that the sender keeps: send it again",
        reason="unknown",
    )
