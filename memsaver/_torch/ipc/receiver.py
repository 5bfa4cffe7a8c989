"""The receiver's side: storages over chunks that another process owns, and the thread that ends their leases."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import secrets
import threading
import time
from typing import Any

import torch

from memsaver import _core, _pool_client, config
from memsaver._torch.ipc import packets
from memsaver._torch.ipc.handle import Place
from memsaver._torch.ipc.packets import Message
from memsaver.errors import Error, ReceiveError

log = logging.getLogger("memsaver")

_EXIT_S = 1.0  # for the thread's end at the interpreter's exit
_CAPTURE_S = 0.02  # between two looks for the end of a capture, in which no wait for the device is possible


class Owner:
    """The connection to the owner of received storages."""

    def __init__(self, place: Place) -> None:
        self._lock = threading.Lock()
        self._pid = place.pid
        self._serial = 0  # of the last message
        self._channel = packets.new_socket()
        try:
            self._channel.settimeout(config.receive_timeout())
            self._channel.connect(packets.bound_name(place.address))
            _, user = packets.peer(self._channel)
            # The name of an owner that has exited is free for other users.
            if user != os.geteuid():
                raise ReceiveError(
                    f"the socket of the sender, process {place.pid}, belongs to user {user}, expected user "
                    f"{os.geteuid()}",
                    reason="user",
                )
        except OSError as error:
            self._channel.close()
            raise self._exited(str(error.strerror)) from None
        except BaseException:
            self._channel.close()
            raise

    def greet(self, deadline: float) -> None:
        _pool_client.open_sentinel()
        files = _core.exit_descriptors()
        try:
            self.call({"op": "hello", "version": packets.VERSION}, deadline, files)
        finally:
            packets.close(files)

    def call(self, message: Message, deadline: float, files: list[int] | None = None) -> Message:
        """The answer. Raises the owner's error, and ReceiveError if it has exited or does not answer."""
        with self._lock:
            self._ask(message, files)
            answer, received = self._answer(deadline)
        packets.close(received)
        return answer

    def post(self, message: Message) -> None:
        """Sends a message without an answer."""
        with self._lock:
            self._ask(message)

    def borrow(self, claim: int, layout: Message, device: str, deadline: float) -> Any:
        """Maps the chunks of a claim. The owner exports the next ones while this process maps."""
        memory = _core.borrow(device, layout["first"], layout["span"])
        try:
            with self._lock:
                at, count = 0, layout["count"]
                self._ask({"op": "chunks", "claim": claim, "at": at})
                while at < count:
                    answer, files = self._answer(deadline)
                    try:
                        slots = [tuple(slot) for slot in answer["slots"]]
                        at += len(slots)
                        if at < count:
                            self._ask({"op": "chunks", "claim": claim, "at": at})
                        memory.map(slots, files)
                    finally:
                        packets.close(files)
            memory.allow()
        except BaseException:
            memory.leave(idle=True)  # nothing has used it
            raise
        return memory

    def close(self) -> None:
        self._channel.close()

    @property
    def is_closed(self) -> bool:
        return self._channel.fileno() < 0

    def _ask(self, message: Message, files: list[int] | None = None) -> None:
        self._serial += 1
        try:
            self._channel.settimeout(config.receive_timeout())
            packets.send(self._channel, {**message, "serial": self._serial}, files or [])
        except TimeoutError:  # it has stopped, with many unread messages
            raise self._late() from None
        except OSError as error:
            raise self._refused() or self._exited(str(error.strerror)) from None

    def _answer(self, deadline: float) -> tuple[Message, list[int]]:
        """The answer to the last message, and its descriptors, which the caller closes."""
        while True:
            try:
                # At least a moment: with a timeout of 0 the socket would not wait at all.
                self._channel.settimeout(max(0.001, deadline - time.monotonic()))
                message, files = packets.receive(self._channel)
            except TimeoutError:
                raise self._late() from None
            except (OSError, ValueError) as error:
                raise self._exited(str(error)) from None
            if message is None:
                raise self._exited("the connection was closed")
            if "error" in message:  # without a serial if the connection was refused
                packets.close(files)
                if message.get("serial") in (None, self._serial):
                    raise self._error(message)
            elif message.get("serial") == self._serial:
                return message, files
            packets.close(files)  # late: its caller has stopped waiting

    def _refused(self) -> Error | None:
        """The error with which the owner has closed the connection, if there is one."""
        with contextlib.suppress(OSError, ValueError):
            message, files = packets.receive(self._channel)
            packets.close(files)
            if message is not None and "error" in message:
                self.close()
                return self._error(message)
        return None

    def _error(self, message: Message) -> Error:
        error = packets.to_error(message)
        if isinstance(error, ReceiveError):
            error.pid = self._pid
        return error

    def _late(self) -> ReceiveError:
        return ReceiveError(
            f"the sender, process {self._pid}, did not answer within {config.receive_timeout():g} s, expected an "
            "answer of its thread: configure(receive_timeout=...) sets the bound",
            reason="timeout",
            pid=self._pid,
        )

    def _exited(self, why: str) -> ReceiveError:
        self.close()
        return ReceiveError(
            f"the sender, process {self._pid}, cannot be reached ({why}), expected the process that sent the tensor to "
            "run, in the same network namespace",
            reason="exited",
            pid=self._pid,
        )


class _Use:
    """Keeps memory mapped while a storage uses it: the array that torch's storage is made of refers to it."""

    def __init__(self, receiver: Receiver, place: Place, device: str, claim: int) -> None:
        self.receiver = receiver
        self.place = place
        self.device = device
        self.claim = claim
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

    def receive(self, place: Place, event: bytes) -> torch.UntypedStorage:
        """Maps a storage of another process.

        Raises ReceiveError, RegionPausedError, DriverError, and memsaver.Error in a forked child.
        """
        _core.regions()  # raises in a forked child
        deadline = time.monotonic() + config.receive_timeout()
        device = device_of(place)
        wait_for(device, event)
        owner = self._owner(place, deadline)
        use = _Use(self, place, device, secrets.randbits(62) | 1)
        try:
            return self._storage(owner, use, deadline)
        except BaseException:
            use.end()  # now, not when a traceback drops its references
            raise

    def _storage(self, owner: Owner, use: _Use, deadline: float) -> torch.UntypedStorage:
        place, device = use.place, use.device
        layout = owner.call(_receive(place, use.claim), deadline)
        if "key" in layout:
            _pool_client.connect(device)
            left = max(0.0, deadline - time.monotonic())
            use.memory = _core.attach(device, layout["owner"], place.pid, place.residence, layout["key"], left)
        else:
            use.memory = owner.borrow(use.claim, layout, device, deadline)
        with torch._C.DisableTorchFunction():
            storage = torch.from_dlpack(use.memory.array(place.offset, place.nbytes, use)).untyped_storage()
        use.cdata = storage._cdata
        self._received.add(use.cdata)
        return storage

    def acknowledge(self, place: Place) -> None:
        """Tells the owner that one more send of a storage was received, which this process has already."""
        deadline = time.monotonic() + config.receive_timeout()
        owner = self._owner(place, deadline)
        claim = secrets.randbits(62) | 1
        try:
            owner.call(_receive(place, claim), deadline)
        finally:
            self._release(place, claim)

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._received

    def ended(self, use: _Use) -> None:
        """Called by the end of a storage, in any thread: it takes no lock."""
        self._received.discard(use.cdata)
        self._ended.put(use)

    def reset_in_child(self) -> None:
        """A forked child has none of its parent's storages: the parent's leases last as long as the parent."""
        for owner in self._owners.values():
            owner.close()
        if self._thread is not None:
            atexit.unregister(self._stop)
        self.__init__()  # type: ignore[misc]

    def _owner(self, place: Place, deadline: float) -> Owner:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._end_leases, name="memsaver-leases", daemon=True)
                self._thread.start()
                atexit.register(self._stop)
            owner = self._owners.get(place.address)
            if owner is None or owner.is_closed:
                owner = Owner(place)
                owner.greet(deadline)
                self._owners[place.address] = owner
            return owner

    def _stop(self) -> None:
        """Leases end with the process."""
        self._ended.put(None)
        if self._thread is not None:
            self._thread.join(_EXIT_S)

    def _end_leases(self) -> None:
        is_stopping = False
        while not is_stopping:
            uses = [self._ended.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    uses.append(self._ended.get_nowait())
            is_stopping = None in uses
            try:
                self._leave([each for each in uses if each is not None])
            except Exception:
                log.exception("ending the use of received tensors failed")

    def _leave(self, uses: list[_Use]) -> None:
        """Unmaps memory, after one wait for each device, and releases the claims."""
        idle: set[str] = set()
        for use in uses:
            if use.memory is not None:
                try:
                    _leave_between_captures(use.memory, use.device in idle)
                except Error as error:
                    # It may still be mapped, so the lease lasts as long as the process.
                    log.warning("the memory of a received tensor stays mapped: %s", error)
                    self._mapped.append(use.memory)
                    continue
                idle.add(use.device)
            while not self._release(use.place, use.claim):
                pass  # a stopped owner would keep the lease for as long as this process lives

    def _release(self, place: Place, claim: int) -> bool:
        """Sends a release. False: the owner has stopped for longer than the bound. One that has exited needs none."""
        try:
            owner = self._owner(place, time.monotonic() + config.receive_timeout())
            owner.post({"op": "release", "claim": claim})
        except ReceiveError as error:
            return error.reason != "timeout"
        except Error as error:
            log.warning("the use of a received tensor lasts as long as this process: %s", error)
        return True


def _leave_between_captures(memory: Any, is_idle: bool) -> None:
    while True:
        try:
            memory.leave(is_idle)
            return
        except Error:
            if not _core.capturing():
                raise
            time.sleep(_CAPTURE_S)


def _receive(place: Place, claim: int) -> Message:
    return {
        "op": "receive",
        "claim": claim,
        "token": place.token,
        "tag": place.tag,
        "backup": place.backup,
        "residence": place.residence,
    }


def wait_for(device: str, event: bytes) -> None:
    """Lets the current stream wait for the sender's work on the contents."""
    if not event:
        return
    with torch.cuda.device(device):
        torch.cuda.Event.from_ipc_handle(torch.device(device), event).wait()


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
