"""The owner's side: a thread that lends the chunks of sent storages to receivers of the same user.

The thread starts at the first send. A lease of a receiver ends when it says so, or when nothing of its process can run
any more (memsaver/broker/monitor.py). The end of its socket alone ends no lease, since its memory stays mapped.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

from memsaver import _core
from memsaver._torch.ipc import packets
from memsaver._torch.ipc.packets import Message
from memsaver._torch.ipc.sent import Sent, SentStorages
from memsaver._torch.pools import keep_forever
from memsaver.broker import pool_client
from memsaver.broker.monitor import Process, ProcessMonitor
from memsaver.broker.protocol import RefusedError
from memsaver.errors import Error, ReceiveError

log = logging.getLogger("memsaver")

CHUNKS_AT_ONCE = 64  # in an answer: less than the 253 descriptors that the kernel passes at once
_EXIT_S = 1.0  # for the thread's end at the interpreter's exit
_AFTER_FAILURE_S = 0.05


@dataclass(eq=False)
class _Claim:
    """The use of a storage by a process, and the chunks that were lent for it: (offset, bytes, handle)."""

    sent: Sent
    process: Process
    chunks: list[tuple[int, int, int]]


@dataclass(eq=False)
class _Connection:
    channel: socket.socket
    process: Process


class Server:
    """Serves the sent storages of this process. The data of each key of the selector takes the events."""

    def __init__(self, sent: SentStorages) -> None:
        self._sent = sent
        self.address = f"memsaver-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = packets.new_socket()
        self._listener.bind(packets.bound_name(self.address))
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._wakes, self._waker = socket.socketpair()
        self._connections: set[_Connection] = set()
        self._claims: dict[int, _Claim] = {}
        self._memories: dict[str, Any] = {}
        self._is_stopping = False
        self._accepts = True  # False: the last connection failed, and this was logged
        self._selector = selectors.DefaultSelector()
        self._monitor = ProcessMonitor(self._selector, self._compute_pids)
        self._selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())
        self._selector.register(self._wakes, selectors.EVENT_READ, lambda _: self._wakes.recv(64))
        self._thread = threading.Thread(target=self._serve, name="memsaver-ipc", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """Ends the thread at the interpreter's exit. Leases end with the process."""
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._waker.send(b"1")
        self._thread.join(_EXIT_S)

    def close_in_child(self) -> None:
        """Closes the sockets in a forked child: receivers must see the end of this process, and not of its children.

        The selector stays as it is: it is shared with the parent.
        """
        atexit.unregister(self.stop)
        for channel in (self._listener, self._wakes, self._waker, *(each.channel for each in self._connections)):
            channel.close()

    def _compute_pids(self) -> list[int]:
        """The processes that the driver lists on the devices of sent storages."""
        pids: list[int] = []
        for device in self._sent.devices() | self._memories.keys():
            if device not in self._memories:
                ordinal = int(device.partition(":")[2] or -1)
                self._memories[device] = _core.open_cuda_memory(ordinal) if ordinal >= 0 else None
            memory = self._memories[device]
            pids += memory.compute_pids() if memory is not None else []
        return pids

    # The thread

    def _serve(self) -> None:
        while not self._is_stopping:
            try:
                for key, mask in self._selector.select(self._timeout_s()):
                    key.data(mask)
                self._end_exited()
            except Exception:
                log.exception("serving the receivers of tensors failed")
                time.sleep(_AFTER_FAILURE_S)

    def _timeout_s(self) -> float | None:
        deadlines = self._monitor.deadlines()
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _end_exited(self) -> None:
        self._monitor.take_exited()
        torn_down = set(self._monitor.take_torn_down())
        for number in [number for number, each in self._claims.items() if each.process in torn_down]:
            self._release(number)

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # without free descriptors the listener stays readable
            if self._accepts:
                self._accepts = False
                log.warning("the receivers of tensors cannot connect to this process: %s", error.strerror)
            time.sleep(_AFTER_FAILURE_S)
            return
        self._accepts = True
        try:
            channel.setblocking(False)
            connection = _Connection(channel, self._watched(channel))
        except Error as error:
            _refuse(channel, error)
            return
        self._connections.add(connection)
        self._selector.register(channel, selectors.EVENT_READ, lambda _: self._read(connection))

    def _watched(self, channel: socket.socket) -> Process:
        pid, user = packets.peer(channel)
        if user != os.geteuid():
            text = f"process {pid} belongs to user {user}, expected user {os.geteuid()}, to whom the tensor belongs"
            raise ReceiveError(text, reason="user")
        if pid == 0:
            text = f"process {os.getpid()}, the sender, cannot watch this one in another pid namespace: run both in one"
            raise ReceiveError(text, reason="namespace")
        try:
            return self._monitor.watch(pid)
        except OSError as error:
            text = f"the sender, process {os.getpid()}, cannot watch process {pid}: {error.strerror}"
            raise ReceiveError(text, reason="exhausted") from None

    def _read(self, connection: _Connection) -> None:
        try:
            message, files = packets.receive(connection.channel)
        except BlockingIOError:
            return
        except (OSError, ValueError) as error:
            self._disconnect(connection, str(error))
            return
        if message is None:
            self._disconnect(connection, "it closed the connection")
            return
        sending: list[int] = []
        try:
            answer, sending = self._answered(connection.process, message, files)
        except Error as error:
            answer = packets.from_error(error)
        except (KeyError, TypeError, ValueError, RefusedError) as error:
            answer = packets.from_error(ReceiveError(f"a message was malformed: {error!r}", reason="malformed"))
        finally:
            packets.close(files)
        try:
            if answer is not None:
                packets.send(connection.channel, {**answer, "serial": message.get("serial")}, sending)
        except OSError as error:  # it reads no answers, or has exited
            self._disconnect(connection, str(error))
        finally:
            packets.close(sending)

    def _disconnect(self, connection: _Connection, why: str) -> None:
        log.debug("process %d, which receives tensors, is disconnected: %s", connection.process.pid, why)
        self._connections.remove(connection)
        self._selector.unregister(connection.channel)
        connection.channel.close()
        self._monitor.release(connection.process)

    # Messages

    def _answered(self, process: Process, message: Message, files: list[int]) -> tuple[Message | None, list[int]]:
        """The answer to a message, and descriptors to send with it."""
        match message["op"]:
            case "hello":
                if message["version"] != packets.VERSION:
                    raise ReceiveError(
                        f"the sender speaks version {packets.VERSION} of the protocol and the receiver version "
                        f"{message['version']}, expected the same: install one version of memsaver for both",
                        reason="version",
                    )
                self._monitor.add_descriptors(process, files)
                return {}, []
            case "receive":
                return self._receive(process, message), []
            case "chunks":
                return _exported(self._claim(process, message["claim"]), message["at"])
            case "release":
                if message["claim"] in self._claims:  # else it was refused
                    self._claim(process, message["claim"])
                    self._release(message["claim"])
                return None, []
        raise ValueError(f"op is {message['op']!r}, expected 'hello', 'receive', 'chunks' or 'release'")

    def _claim(self, process: Process, number: int) -> _Claim:
        claim = self._claims[number]
        if claim.process is not process:
            raise ValueError(f"claim {number} is not one of process {process.pid}")
        return claim

    def _receive(self, process: Process, message: Message) -> Message:
        number = message["claim"]
        if number in self._claims:
            raise ValueError(f"claim {number} exists already")
        sent = self._sent.claim(message["token"], message["tag"], message["backup"], message["residence"])
        try:
            if not message["ready"]:
                _wait_for_work(sent.region.device)
            chunks = _core.lend(sent.region._core, sent.address, sent.nbytes, sent.residence, number, process.pid)
        except BaseException:
            self._sent.unclaim(sent)
            raise
        self._monitor.retain(process)
        self._claims[number] = _Claim(sent, process, chunks)
        first, last = chunks[0], chunks[-1]
        return {"first": first[0], "span": last[0] + last[1] - first[0], "count": len(chunks)}

    def _release(self, number: int) -> None:
        claim = self._claims.pop(number)
        _core.end_lease(claim.sent.region._core, number)
        self._sent.unclaim(claim.sent)
        self._monitor.release(claim.process)


def _wait_for_work(device: str) -> None:
    """Waits for this process's work in the place of a receiver, which has no event."""
    if device == "cpu":
        return
    why = "captures a graph"
    if not _core.capturing():  # a wait would end the capture
        try:
            torch.cuda.synchronize(device)
            return
        except RuntimeError as error:
            why = str(error)
    raise ReceiveError(
        f"the event of the tensor is gone, since the tensor was received more often than it was sent, and the sender "
        f"cannot wait for {device} instead ({why}): send it again",
        reason="event",
    )


def _refuse(channel: socket.socket, error: Error) -> None:
    with contextlib.suppress(OSError):
        packets.send(channel, packets.from_error(error))
        # If an unread packet were left at close(), the peer would get a reset before it could read the refusal.
        channel.shutdown(socket.SHUT_RDWR)
        while channel.recv(1):
            pass
    channel.close()


def _exported(claim: _Claim, at: int) -> tuple[Message, list[int]]:
    """The answer to ``chunks``, and its descriptors."""
    rows = claim.chunks[at : at + CHUNKS_AT_ONCE]
    files: list[int] = []
    try:
        for _, _, handle in rows:
            files.append(_core.export_chunk(claim.sent.region.device, handle))
    except BaseException:
        packets.close(files)
        raise
    return {"slots": [row[:2] for row in rows]}, files


class Servers:
    """The server of this process, made at its first send."""

    def __init__(self) -> None:
        self.sent = SentStorages()
        self._lock = threading.Lock()
        self._server: Server | None = None

    def address(self) -> str:
        with self._lock:
            if self._server is None:
                pool_client.open_sentinel()
                self._server = Server(self.sent)
            return self._server.address

    def is_own(self, address: str) -> bool:
        """Whether an address is that of this process. A pid would not do: each container of a pod has a pid 1."""
        return self._server is not None and self._server.address == address

    def reset_in_child(self) -> None:
        """A forked child serves nothing. The locks are new, since another thread may have held them.

        The child keeps the parent's objects forever. The end of a storage would need a lock of torch's allocator, which
        another thread may have held as well.
        """
        keep_forever(dict(self.__dict__))
        if self._server is not None:
            self._server.close_in_child()
        self.__init__()  # type: ignore[misc]
