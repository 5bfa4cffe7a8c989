"""The receiver's side: storages over chunks that another process owns, and the thread that ends their leases."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from memsaver import _core, errors
from memsaver._results import daemon
from memsaver._torch.ipc.handle import Place
from memsaver._torch.pools import keep_forever
from memsaver.broker.caller import Caller
from memsaver.broker.protocol import RefusedError
from memsaver.errors import Error, ReceiveError

log = logging.getLogger("memsaver")

ANSWER_S = 10.0  # for an answer of the sender
_BRIEFLY_S = 0.05  # for a thread that asks the same owner, before the releases for other owners
_AGAIN_S = 0.05  # between two tries of a release


class Owner:
    """The connection to the owner of received storages. It is made by the first use, and again after its end."""

    def __init__(self, place: Place) -> None:
        self.lock = threading.Lock()
        self._address = place.address
        self._pid = place.pid
        self._caller: Caller | None = None

    @contextlib.contextmanager
    def turn(self, wait_s: float | None = None) -> Iterator[Caller]:
        """Holds the connection for a message. Raises the owner's error, and ReceiveError if it does not answer.

        ``wait_s``: the bound of the wait for other threads, by default that of an answer.
        """
        try:
            if not self.lock.acquire(timeout=ANSWER_S if wait_s is None else wait_s):
                raise RefusedError(f"did not answer another thread within {ANSWER_S:g} s", "timeout")
            try:
                if self._caller is None or self._caller.has_ended:
                    self._caller = self._connected()
                self._caller.timeout_s = ANSWER_S
                yield self._caller
            finally:
                self.lock.release()
        except RefusedError as error:
            raise self._error(error) from None

    def receive(self, claim: int, place: Place) -> tuple[int, int, int]:
        """Claims a storage. Returns the offset of the first chunk, the bytes from there on, and the count of chunks."""
        names = "\n".join((place.token, place.device_uuid, place.tag))
        with self.turn() as caller:
            _, first, span, count = caller.call("receive", claim, place.residence, text=names, answer="lent").words
        return first, span, count

    def borrow(self, claim: int, place: Place, device: str) -> Any:
        """Claims a storage, and maps its chunks."""
        first, span, count = self.receive(claim, place)
        with self.turn() as caller:
            memory = _core.borrow(device, first, span)
            try:
                at = 0
                while at < count:
                    answer = caller.call("chunks", claim, at, answer="slots")
                    try:
                        words = answer.words[1:]
                        at += len(words) // 2
                        memory.map(list(zip(words[::2], words[1::2])), answer.files)
                    finally:
                        answer.close()
                memory.allow()
            except BaseException:
                memory.leave(idle=True)  # nothing has used it
                raise
        return memory

    def has_ended(self) -> bool:
        """Whether the connection was made and has ended. It closes the socket of an owner that has exited."""
        if not self.lock.acquire(blocking=False):
            return False  # in use
        try:
            return self._caller is not None and self._caller.has_ended
        finally:
            self.lock.release()

    def close(self) -> None:
        if self._caller is not None:
            self._caller.close()

    def _connected(self) -> Caller:
        sentinel = _core.sentinel()
        try:
            return Caller(f"\0{self._address}", "", ANSWER_S, [sentinel])
        finally:
            os.close(sentinel)

    def _error(self, error: RefusedError) -> Error:
        if error.code != "failed":
            text = f"the sender, process {self._pid}, {error}"
            if error.code == "exited":
                text += ", expected the process that sent the tensor to run, in the same network namespace"
            return ReceiveError(text, reason=error.code, pid=self._pid)
        message = json.loads(str(error))
        kind = getattr(errors, message["error"], Error)
        found: Error = kind(message["text"], **message["fields"])
        if isinstance(found, ReceiveError):
            found.pid = self._pid
        return found


class _Use:
    """Keeps memory mapped while a storage uses it: the array that torch's storage is made of refers to it."""

    def __init__(self, receiver: Receiver, place: Place, device: str) -> None:
        self.receiver = receiver
        self.place = place
        self.device = device
        self.claim = secrets.randbits(62) | 1
        self.memory: Any = None  # None: nothing was mapped
        self.cdata = 0  # of the storage
        self.has_ended = False

    def end(self) -> None:
        # The thread that drops a tensor may hold the GIL, torch's locks or a capture: another one waits and unmaps.
        if not self.has_ended:
            self.has_ended = True
            self.receiver.ended(self)

    __del__ = end


class Receiver:
    """The storages that this process has received."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owners: dict[str, Owner] = {}
        self._received: set[int] = set()  # storages, by the addresses of torch's objects
        self._mapped: list[Any] = []  # memory that could not be unmapped
        self._ended: queue.SimpleQueue[_Use | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def receive(self, place: Place) -> torch.UntypedStorage:
        """Maps a storage of another process.

        Raises ReceiveError, RegionPausedError, DriverError, and memsaver.Error in a forked child.
        """
        _core.regions()  # raises in a forked child
        use = _Use(self, place, device_of(place))
        try:
            use.memory = self._owner(place).borrow(use.claim, place, use.device)
            with torch._C.DisableTorchFunction():
                storage = torch.from_dlpack(use.memory.array(place.offset, place.nbytes, use)).untyped_storage()
        except BaseException:
            use.end()  # now, not when a traceback drops its references
            raise
        use.cdata = storage._cdata
        self._received.add(use.cdata)
        return storage

    def acknowledge(self, place: Place) -> None:
        """Tells the owner that one more send of a storage was received, which this process has already."""
        _core.regions()  # raises in a forked child
        self._owner(place).receive(0, place)

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._received

    def ended(self, use: _Use) -> None:
        """Called by the end of a storage, in any thread: it takes no lock."""
        self._received.discard(use.cdata)
        self._ended.put(use)

    def reset_in_child(self) -> None:
        """A forked child has none of its parent's storages: the parent's leases last as long as the parent.

        The child keeps the parent's objects forever. Their end would need locks of torch and of the driver, which
        another thread may have held at the fork.
        """
        keep_forever(dict(self.__dict__))
        for owner in self._owners.values():
            owner.close()
        self.__init__()  # type: ignore[misc]

    def _owner(self, place: Place) -> Owner:
        """The connection to an owner. A slow owner does not delay requests to other owners."""
        with self._lock:
            if self._thread is None:
                self._thread = daemon(self._end_leases, "memsaver-leases", partial(self._ended.put, None))
            # Of all owners: the address of an owner that has exited is not requested again.
            for address in [address for address, each in self._owners.items() if each.has_ended()]:
                del self._owners[address]
            return self._owners.setdefault(place.address, Owner(place))

    def _end_leases(self) -> None:
        is_stopping = False
        late: list[_Use] = []  # whose owners have not taken a release yet
        while not is_stopping:
            uses: list[_Use | None] = []
            with contextlib.suppress(queue.Empty):
                uses.append(self._ended.get(timeout=_AGAIN_S if late else None))
                while True:
                    uses.append(self._ended.get_nowait())
            is_stopping = None in uses
            late = self._leave([each for each in uses if each is not None] + late)

    def _leave(self, uses: list[_Use]) -> list[_Use]:
        """Unmaps memory, after one wait for each device, and releases the claims. Returns the uses to try again.

        A stopped owner would keep a lease for as long as this process lives.
        """
        idle: set[str] = set()
        again: list[_Use] = []
        late: set[str] = set()  # owners, by address: one try for each
        for use in uses:
            try:
                if use.memory is not None:
                    if not use.memory.leave(use.device in idle):
                        raise Error("the driver refuses to unmap it")
                    idle.add(use.device)
                    use.memory = None
            except Exception as error:
                if _core.capturing():  # no wait for the device is possible
                    again.append(use)
                else:  # it may still be mapped, so the lease lasts as long as the process
                    log.warning("the memory of a received tensor stays mapped: %s", error)
                    self._mapped.append(use.memory)
                continue
            if use.place.address in late or not self._release(use):
                late.add(use.place.address)
                again.append(use)
        return again

    def _release(self, use: _Use) -> bool:
        """Sends a release. False: it has to be sent later. An owner that has exited needs none."""
        try:
            # It waits neither for other threads nor for an owner that reads nothing.
            with self._owner(use.place).turn(_BRIEFLY_S) as caller:
                caller.tell("release", use.claim, timeout_s=0.0)
        except ReceiveError as error:
            if error.reason == "exited":
                with self._lock:
                    self._owners.pop(use.place.address, None)  # _owner() has added it again
            return error.reason not in ("timeout", "exhausted")
        except Exception as error:  # this process lacks descriptors, for instance
            log.debug("the use of a received tensor has not ended yet, and is tried again: %s", error)
            return False
        return True


def device_of(place: Place) -> str:
    """This process's name of the device. Raises ReceiveError if it does not see the device."""
    for ordinal in range(_core.cuda_device_count()):
        if _core.cuda_uuid(ordinal) == place.device_uuid:
            return f"cuda:{ordinal}"
    if _core.device_uuid("cpu") == place.device_uuid:
        return "cpu"
    raise ReceiveError(
        f"the tensor is on device {place.device_uuid}, which this process does not see: make the device visible here, "
        "or send the tensor to a process that sees it",
        reason="device",
        pid=place.pid,
    )
