"""The owner's side: a thread that lends the chunks of sent storages to receivers of the same user.

The thread starts at the first send. A lease of a receiver ends when it says so, or when nothing of its process can run
any more (memsaver/broker/monitor.py). The end of its socket alone ends no lease, since its memory stays mapped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from dataclasses import dataclass
from typing import Any

from memsaver import _core
from memsaver._results import daemon
from memsaver._torch.ipc.sent import Sent, SentStorages
from memsaver._torch.pools import keep_forever
from memsaver.broker import protocol
from memsaver.broker.monitor import Process
from memsaver.broker.protocol import MalformedError, Message
from memsaver.broker.server import Connection, Server
from memsaver.errors import Error

log = logging.getLogger("memsaver")

CHUNKS_AT_ONCE = protocol.MOST_DESCRIPTORS  # in an answer
_AFTER_FAILURE_S = 0.05


@dataclass(eq=False)
class _Claim:
    """The use of a storage by a process, and the chunks that were lent for it: (offset, bytes, handle)."""

    sent: Sent
    process: Process
    chunks: list[tuple[int, int, int]]


class Sender:
    """The storages that this process has sent, and their service: see csrc/pool/wire.h for the messages."""

    def __init__(self) -> None:
        self.sent = SentStorages()
        self.claims: dict[int, _Claim] = {}
        self.thread: threading.Thread | None = None  # from the first send on
        self._lock = threading.Lock()
        self._address = ""
        self._server: Server
        self._memories: dict[str, Any] = {}
        self._is_stopping = False

    def address(self) -> str:
        """The name of the socket. The first call starts the service."""
        with self._lock:
            if self.thread is None:
                address = f"memsaver-{os.getuid()}-{os.getpid()}-{secrets.token_hex(8)}"
                listener = protocol.new_socket()
                listener.bind(f"\0{address}")  # in the system's abstract namespace, which leaves no file behind
                listener.listen(1024)
                self._server = Server(listener, self, self._compute_pids)
                self.thread = daemon(self._serve, "memsaver-ipc", self.stop)
                self._address = address
            return self._address

    def is_own(self, address: str) -> bool:
        """Whether an address is that of this process. A pid would not do: each container of a pod has a pid 1."""
        return address == self._address

    def stop(self) -> None:
        """Ends the thread. Leases end with the process."""
        self._is_stopping = True
        with contextlib.suppress(OSError):
            self._server.waker.send(b"1")

    def reset_in_child(self) -> None:
        """A forked child serves nothing. The locks are new, since another thread may have held them.

        The child keeps the parent's objects forever. The end of a storage would need a lock of torch's allocator, which
        another thread may have held as well.
        """
        keep_forever(dict(self.__dict__))
        if self.thread is not None:
            # Receivers must see the end of this process, and not of its children. The selector stays as it is: it is
            # shared with the parent.
            for channel in self._server.channels():
                channel.close()
        self.__init__()  # type: ignore[misc]

    def _compute_pids(self) -> list[int]:
        """The processes that the driver lists on the devices of sent storages."""
        pids: list[int] = []
        for device in self.sent.devices() | self._memories.keys():
            if device not in self._memories:
                ordinal = int(device.partition(":")[2] or -1)
                self._memories[device] = _core.open_cuda_memory(ordinal) if ordinal >= 0 else None
            memory = self._memories[device]
            pids += memory.compute_pids() if memory is not None else []
        return pids

    def _serve(self) -> None:
        while not self._is_stopping:
            try:
                self._server.turn(None)
            except Exception:
                log.exception("serving the receivers of tensors failed")
                time.sleep(_AFTER_FAILURE_S)

    # Of Service

    def begin(self, connection: Connection, number: int, subject: str) -> int:
        if not connection.process.has_sentinel:
            raise MalformedError("'hello' has no sentinel")
        connection.session = connection.process
        return 0

    def handle(self, connection: Connection, message: Message) -> None:
        process = connection.process
        serial = message.words[0]
        try:
            match message.kind:
                case "receive":
                    first, span, count = self._lend(process, message)
                    connection.send(Message("lent", (serial, first, span, count)))
                case "chunks":
                    self._send_chunks(connection, *message.words)
                case "release":
                    if serial in self.claims:  # else it was refused
                        self._claim(process, serial)
                        self._release(serial)
                case _:
                    raise MalformedError(f"{message.kind!r} is not a message of a receiver")
        except Error as error:
            fields = {"error": type(error).__name__, "text": str(error), "fields": error.__dict__}
            connection.send(protocol.refusal("failed", serial, json.dumps(fields)))

    def end(self, connection: Connection) -> None: ...

    def exited(self, process: Process) -> None: ...

    def gone(self, process: Process) -> None:
        for number in [number for number, each in self.claims.items() if each.process is process]:
            self._release(number)

    # Messages

    def _claim(self, process: Process, number: int) -> _Claim:
        claim = self.claims.get(number)
        if claim is None or claim.process is not process:
            raise MalformedError(f"claim {number} is not one of process {process.pid}")
        return claim

    def _lend(self, process: Process, message: Message) -> tuple[int, int, int]:
        _, number, residence = message.words
        if number in self.claims or message.text.count("\n") < 2:
            raise MalformedError(f"claim {number} exists already, or has no token, device and tag")
        token, device_uuid, tag = message.text.split("\n", 2)
        # No variable refers to the storage: the traceback of an error would keep it until the answer has been sent.
        sent = self.sent.claim(token, device_uuid, tag, residence)[0]
        if not number:  # a receipt of a storage that the receiver has already
            self.sent.unclaim(sent)
            return 0, 0, 0
        try:
            chunks = _core.lend(sent.region._core, (sent.address, sent.nbytes), sent.residence, number, process.pid)
        except BaseException:
            self.sent.unclaim(sent)
            raise
        self._server.monitor.retain(process)
        self.claims[number] = _Claim(sent, process, chunks)
        first, last = chunks[0], chunks[-1]
        return first[0], last[0] + last[1] - first[0], len(chunks)

    def _send_chunks(self, connection: Connection, serial: int, number: int, at: int) -> None:
        claim = self._claim(connection.process, number)
        answer = Message("slots")
        chunks = claim.chunks[at : at + CHUNKS_AT_ONCE]
        answer.words = [serial, *(word for offset, nbytes, _ in chunks for word in (offset, nbytes))]
        answer.files = _core.export_chunks(claim.sent.region.device, [handle for *_, handle in chunks])
        try:
            connection.send(answer, answer.files)
        finally:
            answer.close()

    def _release(self, number: int) -> None:
        claim = self.claims.pop(number)
        _core.end_lease(claim.sent.region._core, number)
        self.sent.unclaim(claim.sent)
        self._server.monitor.release(claim.process)
