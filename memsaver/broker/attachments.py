"""Attachments of a process to memory of another client: requested here, granted by the owner, ended by either."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from memsaver.broker import protocol
from memsaver.broker.clients import Client, Clients
from memsaver.broker.monitor import Process, ProcessMonitor
from memsaver.broker.pool import Pool
from memsaver.broker.protocol import MOST_CHUNKS, MOST_DESCRIPTORS, ExhaustedError, MalformedError, Message

_EARLY_DETACHES = 10_000


@dataclass(eq=False)
class AttachRequest:
    """An ``attach`` that waits for the owner's ``attach_reply``."""

    client: Client | None  # None: it is disconnected
    serial: int
    owner: Client
    process: Process
    rows: list[tuple[int, ...]] = field(default_factory=list)


class Attachments:
    """The attachments of a pool. ``device``: its name, for messages."""

    def __init__(self, pool: Pool, clients: Clients, monitor: ProcessMonitor, device: str) -> None:
        self._pool = pool
        self._clients = clients
        self._monitor = monitor
        self._device = device
        self._processes: dict[int, Process] = {}  # the attached process, by attachment
        self._requests: dict[int, AttachRequest] = {}  # by the number in the owner's answer
        self._request_numbers = itertools.count(1)
        # Ended by the attached process before the owner reported them to this broker.
        self._early_detaches: OrderedDict[int, None] = OrderedDict()

    def cancel(self, client: Client, reason: str) -> None:
        """Cancels the requests of a disconnected client, and refuses those that wait for its answer."""
        for number, request in list(self._requests.items()):
            if request.client is client:
                request.client = None
            if request.owner is client:
                del self._requests[number]
                _refuse(request, reason)

    def end_all(self, process: Process) -> None:
        """Ends the attachments of a process."""
        for number in [number for number, each in self._processes.items() if each is process]:
            self._end(number)

    def _begin(self, number: int, owner: Client, process: Process, chunks: list[int], is_restored: bool) -> None:
        """Records an attachment. The caller's reference to the process becomes the attachment's."""
        self._pool.attach(number, owner, process.pid, chunks).is_restored = is_restored
        previous = self._processes.get(number)
        self._processes[number] = process
        if previous is not None:
            self._monitor.release(previous)

    def _end(self, number: int) -> None:
        ended = self._pool.detach(number)
        if ended is None:
            return
        if self._clients.get(ended.owner.id) is ended.owner:
            ended.owner.send(Message("detached", (number,)))
        self._monitor.release(self._processes.pop(number))

    def _end_unreported(self, pid: int) -> None:
        """Ends attachments of an earlier broker of which the attached process never received the number."""
        for client in self._clients.values():
            if client.pid != pid or client.attachments is None:
                continue
            for each in [each for each in self._pool.attachments.values() if each.pid == pid and each.is_restored]:
                if each.id not in client.attachments:
                    self._end(each.id)

    # Messages of clients

    def attach(self, client: Client, message: Message) -> None:
        serial, owner_id, pid, residence = message.words
        owner = self._clients.get(owner_id)
        if owner is None or not owner.is_connected or owner.pid != pid:
            text = f"process {pid} has exited, or is no client of the broker of {self._device} now"
            client.send(protocol.refusal("not_attached", serial, text))
            return
        descriptors = client.process.descriptors()
        if len(descriptors) > MOST_DESCRIPTORS:
            text = f"process {client.pid} is watched by {len(descriptors)} descriptors, {MOST_DESCRIPTORS} are the most"
            client.send(protocol.refusal("not_attached", serial, text))
            return
        number = next(self._request_numbers)
        self._requests[number] = AttachRequest(client, serial, owner, client.process)
        owner.send(Message("attach_request", (number, client.pid, residence), message.text), descriptors)

    def attach_reply(self, client: Client, message: Message) -> None:
        number, attachment, more = message.words[:3]
        request = self._requests.get(number)
        if request is None or request.owner is not client:
            raise MalformedError(f"there is no attach_request {number} to answer")
        rows = [tuple(message.words[at : at + 3]) for at in range(3, len(message.words), 3)]
        if len(rows) > MOST_CHUNKS or more not in (0, 1):
            raise MalformedError(
                f"'attach_reply' has {len(rows)} chunks, more {more}, expected {MOST_CHUNKS}, and 0 or 1"
            )
        for _, chunk, size in rows:
            if chunk not in client.held or size != client.held[chunk].size:
                raise MalformedError(f"chunk {chunk} of {size} bytes is not held by this client")
        request.rows += rows
        if more:
            return
        del self._requests[number]
        if attachment == 0:
            _refuse(request, message.text)
            return
        self._monitor.retain(request.process)
        try:
            self._begin(attachment, client, request.process, [chunk for _, chunk, _ in request.rows], is_restored=False)
        except MalformedError:
            self._monitor.release(request.process)
            _refuse(request, f"the answer of process {client.pid} was malformed")
            raise
        if request.client is None:  # disconnected before the answer
            self._end(attachment)
            return
        _send_chunks(request, request.client, client, attachment)

    def detach(self, client: Client, message: Message) -> None:
        number = message.words[0]
        attachment = self._pool.attachments.get(number)
        if attachment is None:
            self._early_detaches[number] = None
            if len(self._early_detaches) > _EARLY_DETACHES:
                self._early_detaches.popitem(last=False)
            return
        if attachment.pid != client.pid:
            raise MalformedError(f"attachment {number} is not one of process {client.pid}")
        self._end(number)

    def restore(self, client: Client, message: Message) -> None:
        """An owner reports an attachment that an earlier broker made."""
        self._pool.finish_inventory(client)
        number, pid, *chunks = message.words
        try:
            process = self._monitor.adopt(pid, message.files)
        except OSError as error:
            raise ExhaustedError(f"the broker cannot watch process {pid}: {error.strerror}") from None
        try:
            self._begin(number, client, process, chunks, is_restored=True)
        except MalformedError:
            self._monitor.release(process)
            raise
        if number in self._early_detaches:
            del self._early_detaches[number]
            self._end(number)
        else:
            self._end_unreported(pid)

    def attachments(self, client: Client, message: Message) -> None:
        """An attached process reports its attachments of an earlier broker."""
        self._pool.finish_inventory(client)
        client.attachments = set(message.words)
        self._end_unreported(client.pid)


def _send_chunks(request: AttachRequest, client: Client, owner: Client, number: int) -> None:
    for at in range(0, max(1, len(request.rows)), MOST_CHUNKS):
        rows = request.rows[at : at + MOST_CHUNKS]
        more = int(at + MOST_CHUNKS < len(request.rows))
        words = (request.serial, number, more, *itertools.chain.from_iterable(rows))
        client.send(Message("attached", words), [owner.held[chunk].file for _, chunk, _ in rows])


def _refuse(request: AttachRequest, text: str) -> None:
    if request.client is not None:
        request.client.send(protocol.refusal("not_attached", request.serial, text))
