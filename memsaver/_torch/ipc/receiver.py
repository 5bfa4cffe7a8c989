"""The receiver's side: storages over chunks that another process owns, and the thread that ends their leases."""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import queue
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch

from memsaver import _core
from memsaver._torch.ipc import packets
from memsaver._torch.ipc.handle import Place
from memsaver._torch.ipc.packets import Message
from memsaver._torch.pools import keep_forever
from memsaver.broker import pool_client
from memsaver.errors import Error, ReceiveError

log = logging.getLogger("memsaver")

ANSWER_S = 10.0  # for an answer of the sender
_EXIT_S = 1.0  # for the thread's end at the interpreter's exit
_BRIEFLY_S = 0.05  # for a thread that asks the same owner, before the releases for other owners
_AGAIN_S = 0.05  # between two tries of a release
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_CAPTURE_S = 0.02  # between two looks for the end of a capture, in which no wait for the device is possible


class Owner:
    """The connection to the owner of received storages. It is made by the first use, and again after its end."""

    def __init__(self, place: Place) -> None:
        self._lock = threading.Lock()
        self._address = place.address
        self._pid = place.pid
        self._serial = 0  # of the last message
        self._channel: socket.socket | None = None
        self._has_ended = False

    def connect(self) -> None:
        with self._turn():
            pass

    def call(self, message: Message) -> Message:
        """The answer. Raises the owner's error, and ReceiveError if it has exited or does not answer."""
        with self._turn() as deadline:
            self._ask(message)
            answer, received = self._answer(deadline)
        packets.close(received)
        return answer

    def post(self, message: Message) -> None:
        """Sends a message without an answer. It waits neither for other threads nor for an owner that reads nothing."""
        with self._turn(_BRIEFLY_S):
            self._ask(message, timeout_s=0.0)

    def borrow(self, claim: int, layout: Message, device: str) -> Any:
        """Maps the chunks of a claim. The owner exports the next ones while this process maps."""
        memory = _core.borrow(device, layout["first"], layout["span"])
        try:
            with self._turn() as deadline:
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

    def has_ended(self) -> bool:
        """Whether the connection was made and has ended. It closes the socket of an owner that has exited."""
        if not self._lock.acquire(blocking=False):
            return False  # in use
        try:
            if self._channel is not None:
                poll = select.poll()
                poll.register(self._channel, 0)  # POLLHUP is always reported
                if poll.poll(0):
                    self.close()
            return self._has_ended
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _turn(self, wait_s: float | None = None) -> Iterator[float]:
        """Holds the connection for a message. Yields the deadline of its answer.

        The deadline leaves out the wait for other threads, since the owner is not late because of them. ``wait_s``:
        the bound of this wait, by default that of the answer.
        """
        if not self._lock.acquire(timeout=ANSWER_S if wait_s is None else wait_s):
            raise self._late()
        try:
            deadline = time.monotonic() + ANSWER_S
            if self._channel is None:
                self._connect(deadline)
            yield deadline
        finally:
            self._lock.release()

    def _connect(self, deadline: float) -> None:
        self._has_ended = False
        try:
            self._channel = packets.new_socket()
            self._channel.settimeout(ANSWER_S)
            self._channel.connect(packets.bound_name(self._address))
            _, user = packets.peer(self._channel)
            # The name of an owner that has exited is free for other users.
            if user != os.geteuid():
                raise ReceiveError(
                    f"the socket of the sender, process {self._pid}, belongs to user {user}, expected user "
                    f"{os.geteuid()}",
                    reason="user",
                )
            pool_client.open_sentinel()
            files = _core.exit_descriptors()
            try:
                self._ask({"op": "hello", "version": packets.VERSION}, files)
            finally:
                packets.close(files)
            _, received = self._answer(deadline)
            packets.close(received)
        except (TimeoutError, BlockingIOError):
            self.close()
            raise self._late() from None
        except OSError as error:
            if error.errno in _EXHAUSTED:
                self.close()
                raise self._exhausted(error) from None
            raise self._exited(str(error.strerror)) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._has_ended = True
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _ask(self, message: Message, files: list[int] | None = None, timeout_s: float | None = None) -> None:
        channel = self._connected()
        self._serial += 1
        try:
            channel.settimeout(ANSWER_S if timeout_s is None else timeout_s)
            packets.send(channel, {**message, "serial": self._serial}, files or [])
        except (TimeoutError, BlockingIOError):  # it has stopped, with many unread messages
            raise self._late() from None
        except OSError as error:
            raise self._refused() or self._exited(str(error.strerror)) from None

    def _answer(self, deadline: float) -> tuple[Message, list[int]]:
        """The answer to the last message, and its descriptors, which the caller closes."""
        channel = self._connected()
        while True:
            try:
                # At least a moment: with a timeout of 0 the socket would not wait at all.
                channel.settimeout(max(0.001, deadline - time.monotonic()))
                message, files = packets.receive(channel)
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

    def _connected(self) -> socket.socket:
        if self._channel is None:
            raise self._exited("the connection was closed")
        return self._channel

    def _refused(self) -> Error | None:
        """The error with which the owner has closed the connection, if there is one."""
        with contextlib.suppress(OSError, ValueError):
            message, files = packets.receive(self._connected())
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
            f"the sender, process {self._pid}, did not answer within {ANSWER_S:g} s, expected an answer of its thread",
            reason="timeout",
            pid=self._pid,
        )

    def _exhausted(self, error: OSError) -> ReceiveError:
        return ReceiveError(
            f"this process cannot connect to the sender, process {self._pid}: {error.strerror}, expected a free "
            "descriptor: close files, or raise the limit (ulimit -n)",
            reason="exhausted",
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
        self.has_failed = False  # its release, at least once

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
        device = device_of(place)
        is_ready = wait_for(device, event)
        owner = self._owner(place)
        owner.connect()  # before there is a claim to release
        use = _Use(self, place, device, secrets.randbits(62) | 1)
        try:
            return self._storage(owner, use, is_ready)
        except BaseException:
            use.end()  # now, not when a traceback drops its references
            raise

    def _storage(self, owner: Owner, use: _Use, is_ready: bool) -> torch.UntypedStorage:
        place, device = use.place, use.device
        use.memory = owner.borrow(use.claim, owner.call(_receive(place, use.claim, is_ready)), device)
        with torch._C.DisableTorchFunction():
            storage = torch.from_dlpack(use.memory.array(place.offset, place.nbytes, use)).untyped_storage()
        use.cdata = storage._cdata
        self._received.add(use.cdata)
        return storage

    def acknowledge(self, place: Place, event: bytes) -> None:
        """Tells the owner that one more send of a storage was received, which this process has already."""
        device = device_of(place)
        is_ready = wait_for(device, event)
        owner = self._owner(place)
        owner.connect()
        use = _Use(self, place, device, secrets.randbits(62) | 1)
        try:
            owner.call(_receive(place, use.claim, is_ready))
        finally:
            use.end()  # the thread repeats a release that does not succeed

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
        if self._thread is not None:
            atexit.unregister(self._stop)
        self.__init__()  # type: ignore[misc]

    def _owner(self, place: Place) -> Owner:
        """The connection to an owner. A slow owner does not delay requests to other owners."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._end_leases, name="memsaver-leases", daemon=True)
                self._thread.start()
                atexit.register(self._stop)
            # Of all owners: the address of an owner that has exited is not requested again.
            for address in [address for address, each in self._owners.items() if each.has_ended()]:
                del self._owners[address]
            return self._owners.setdefault(place.address, Owner(place))

    def _stop(self) -> None:
        """Leases end with the process."""
        self._ended.put(None)
        if self._thread is not None:
            self._thread.join(_EXIT_S)

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
                if use.memory is not None and not self._unmap(use, use.device in idle):
                    continue
                if use.memory is not None:
                    idle.add(use.device)
                    use.memory = None
                if use.place.address in late or not self._release(use):
                    late.add(use.place.address)
                    again.append(use)
            except Exception as error:
                _warn_once(use, error)
                again.append(use)
        return again

    def _unmap(self, use: _Use, is_idle: bool) -> bool:
        try:
            _leave_between_captures(use.memory, is_idle)
            return True
        except Error as error:
            # It may still be mapped, so the lease lasts as long as the process.
            log.warning("the memory of a received tensor stays mapped: %s", error)
            self._mapped.append(use.memory)
            return False

    def _release(self, use: _Use) -> bool:
        """Sends a release. False: it has to be sent later. An owner that has exited needs none."""
        try:
            self._owner(use.place).post({"op": "release", "claim": use.claim})
        except ReceiveError as error:
            return error.reason not in ("timeout", "exhausted")
        except Error as error:  # this process lacks descriptors, for instance
            _warn_once(use, error)
            return False
        return True


def _warn_once(use: _Use, error: Exception) -> None:
    if not use.has_failed:
        use.has_failed = True
        log.warning("the use of a received tensor has not ended yet, and is tried again: %s", error)


def _leave_between_captures(memory: Any, is_idle: bool) -> None:
    while True:
        try:
            memory.leave(is_idle)
            return
        except Error:
            if not _core.capturing():
                raise
            time.sleep(_CAPTURE_S)


def _receive(place: Place, claim: int, is_ready: bool) -> Message:
    return {
        "op": "receive",
        "claim": claim,
        "token": place.token,
        "tag": place.tag,
        "backup": place.backup,
        "residence": place.residence,
        "ready": is_ready,
    }


def wait_for(device: str, event: bytes) -> bool:
    """Lets the current stream wait for the sender's work on the contents. False: only the sender can wait for it."""
    if not event:
        return True
    with torch.cuda.device(device):
        try:
            torch.cuda.Event.from_ipc_handle(torch.device(device), event).wait()
        except RuntimeError:  # the sender has dropped it: the handle was received more often than it was sent
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
