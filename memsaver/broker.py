"""The process that owns a device's chunks and lends them to its clients. The words between them: csrc/wire.h.

One thread, one loop: read all that has come, then serve, then send. Nothing waits for a client: sockets do not block,
and what one does not take is sent when it does. A client's exit is told by its pidfd, since its socket's hang-up may
come late (a forked child holds it) or early (the process goes on and will be back): only the exit returns its chunks.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import resource
import select
import selectors
import signal
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from memsaver import protocol
from memsaver.connection import Connection
from memsaver.errors import gib, process_name
from memsaver.pool import RETRY_S, Chunk, Demand, Member, Memory, NoRoomError, Pool
from memsaver.protocol import MOST_CHUNKS, ExhaustedError, MalformedError, Message
from memsaver.sockets import Listener

log = logging.getLogger("memsaver")

STATES = ("active", "pausing", "paused", "resuming", "lost")  # as reports number them
BACKUPS = ("none", "host", "disk")
REPORTS_S = 0.2  # how long a status waits for reports
MOST_MESSAGES = 256  # of one client in one turn, so that one that never stops is not the only one heard
_EARLY_DETACHES = 10_000

# Words of each message of a client: how many come first, how many a group has, and how many groups at least.
_WORDS = {
    "hello": (3, 0, 0), "want": (1, 3, 1), "more": (1, 3, 1), "close": (1, 0, 0), "give": (0, 1, 0),
    "dropped": (0, 1, 0), "bring": (0, 2, 0), "owed": (2, 1, 0), "scrub": (1, 0, 0), "look": (1, 0, 0),
    "status": (1, 0, 0), "report": (0, 5, 0), "attach": (4, 0, 0), "leased": (3, 3, 0), "detach": (1, 0, 0),
    "trim": (2, 0, 0), "holds": (0, 1, 0),
}  # fmt: skip
_WITH_TEXT = {"hello", "report", "attach", "leased"}


class Device(Memory, Protocol):
    """What a broker needs of csrc/physical.h beside its pool."""

    def uuid(self) -> str: ...
    def total_bytes(self) -> int: ...


@dataclass(eq=False)
class Client:
    """A process that speaks the protocol, with or without a socket now."""

    member: Member
    pid: int
    connection: Connection | None
    bringing: set[int] | None = field(default_factory=set)  # None: it has said what it uses
    leases: set[int] | None = None  # of other clients' memory, that it has from an earlier broker; None: not said
    is_user: bool = False  # of memory, unlike a tool that asks for figures
    report: list[dict[str, Any]] = field(default_factory=list)
    reported_at: float | None = None
    asked_at: float | None = None  # for a report, which it has not sent yet

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        if self.connection is not None:
            self.connection.send(message, files)


@dataclass(eq=False)
class Question:
    """A status that waits for reports."""

    client: Client
    serial: int
    deadline: float
    awaited: set[Client]


@dataclass(eq=False)
class Wish:
    """An attach that waits for the owner's answer."""

    client: Client | None  # None: it has gone
    serial: int
    owner: Client
    pid: int
    rows: list[tuple[int, ...]] = field(default_factory=list)


class Broker:
    """Serves one device. ``name``: ``"cuda:0"`` or ``"cpu"``; ``linger_s``: None stays for ever."""

    def __init__(self, memory: Device, name: str, capacity: int, listener: Listener, linger_s: float | None) -> None:
        self.name = name
        self.uuid = memory.uuid()
        self.pool = Pool(memory, capacity)
        self._listener = listener
        self._linger_s = linger_s
        self._lonely_since = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._connections: dict[Connection, Client | None] = {}
        self._writing: set[Connection] = set()  # to be told when their socket takes more
        self._clients: dict[int, Client] = {}  # by their own number
        self._watches: dict[int, int] = {}  # pid -> pidfd
        self._questions: list[Question] = []
        self._wishes: dict[int, Wish] = {}  # by the number that the owner answers with
        self._wish_numbers = itertools.count(1)
        self._early_detaches: OrderedDict[int, None] = OrderedDict()  # of leases not yet owed
        self._failure: str | None = None
        self._stopping = False
        self._why = "nobody needs it"
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)  # to turn a client away when there is no other
        self._handlers: dict[str, Callable[[Client, Message], None]] = {
            kind: getattr(self, f"_on_{kind}") for kind in _WORDS if kind != "hello"
        }

    # The loop

    def run(self) -> None:
        """Until SIGTERM, SIGINT or SIGHUP, or until nobody has been there for ``linger_s``."""
        bell, rope = socket.socketpair()
        bell.setblocking(False)
        rope.setblocking(False)
        signal.set_wakeup_fd(rope.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        self._selector.register(bell, selectors.EVENT_READ, lambda _: bell.recv(64))
        self._selector.register(self._listener.channel, selectors.EVENT_READ, self._accept)
        log.info("serving %s (%s), %s, at %s", self.name, self.uuid, gib(self.pool.capacity), self._listener.path)
        try:
            pause: float | None = 0.0
            while not self._stopping:
                for key, mask in self._selector.select(pause):
                    key.data(mask)
                pause = self._turn()
        finally:
            self._listener.close()
            for connection in self._connections:
                connection.close()
            self.pool.close_all()
        log.info("stopped serving %s: %s", self.name, self._why)

    def _stop(self, number: int, _: object) -> None:
        self._stopping = True
        self._why = signal.Signals(number).name

    def _turn(self) -> float | None:
        """What follows after all was read. Returns for how long there is nothing to do; None: until a client speaks."""
        again, retry = self._serve()
        now = time.monotonic()
        for question in [each for each in self._questions if not each.awaited or each.deadline <= now]:
            self._questions.remove(question)
            self._answer(question)
        self._flush()
        waits = [0.0] if again else []
        if retry or self._writing:
            waits.append(RETRY_S)
        waits += [question.deadline - now for question in self._questions]
        if self._linger_s is not None and not self._has_users():
            waits.append(self._lonely_since + self._linger_s - now)
            if waits[-1] <= 0 and not self._listener_has_guests():
                self._stopping = True
        return max(0.0, min(waits)) if waits else None

    def _listener_has_guests(self) -> bool:
        """Whether somebody came at the last moment. Who comes after that finds no socket, and starts a broker."""
        self._listener.hide()
        self._accept(0)
        if self._has_users():
            self._listener.show()
        return self._has_users()

    def _serve(self) -> tuple[bool, bool]:
        served = self.pool.serve()
        self._grant(served.grants)
        for demand in (*served.done, *served.stalled):
            self._client_of(demand.member).send(Message("stalled", (demand.request, demand.count, demand.left)))
        self._drop(served.drops)
        if self.pool.failure != self._failure:
            self._failure = self.pool.failure
            log.info("the driver gives memory again" if self._failure is None else f"no memory now: {self._failure}")
        return served.again, served.retry

    def _grant(self, grants: list[tuple[Demand, Chunk, int]]) -> None:
        for demand, group in itertools.groupby(grants, key=lambda grant: grant[0]):
            chunks = list(group)
            for at in range(0, len(chunks), MOST_CHUNKS):
                words = [demand.request]
                files = []
                for _, chunk, flags in chunks[at : at + MOST_CHUNKS]:
                    words += (chunk.id, chunk.size, flags, chunk.limit)
                    if flags & protocol.HAS_DESCRIPTOR:
                        files.append(chunk.file)
                self._client_of(demand.member).send(Message("grant", words), files)

    def _drop(self, drops: list[tuple[Member, Chunk]]) -> None:
        by_member: dict[Member, list[int]] = {}
        for member, chunk in drops:
            by_member.setdefault(member, []).append(chunk.id)
        for member, ids in by_member.items():
            for at in range(0, len(ids), MOST_CHUNKS):
                self._client_of(member).send(Message("drop", ids[at : at + MOST_CHUNKS]))

    def _client_of(self, member: Member) -> Client:
        return self._clients[member.id]

    def _flush(self) -> None:
        """Asks to be told about sockets with unsent packets, and no longer about the others."""
        for connection in self._connections:
            if connection.has_unsent != (connection in self._writing):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_unsent else 0)
                self._selector.modify(connection.channel, events, self._selector.get_key(connection.channel).data)
                (self._writing.add if connection.has_unsent else self._writing.discard)(connection)

    # Connections

    def _accept(self, _: int) -> None:
        while True:
            try:
                channel, _address = self._listener.channel.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._turn_away()
                    return
                if error.errno != errno.ECONNABORTED:
                    log.warning("accept failed: %s", error)
                    return
                continue
            connection = Connection(channel)
            try:
                self._watch(connection.pid)
            except ProcessLookupError:
                connection.close()
                continue
            except OSError as error:
                code = "exhausted" if error.errno in (errno.EMFILE, errno.ENFILE) else "user"
                connection.refuse(code, f"the broker cannot watch process {connection.pid}: {error.strerror}")
                connection.close()
                continue
            self._connections[connection] = None
            self._selector.register(channel, selectors.EVENT_READ, lambda mask, c=connection: self._ready(c, mask))

    def _turn_away(self) -> None:
        """Out of descriptors: tells one that waits so, and keeps serving the others."""
        os.close(self._spare)
        try:
            connection = Connection(self._listener.channel.accept()[0])
            connection.refuse("exhausted", "the broker is out of file descriptors")
            connection.close()
        except OSError as error:
            log.warning("out of descriptors: %s", error)
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _ready(self, connection: Connection, mask: int) -> None:
        if connection not in self._connections:
            return  # closed earlier in this turn
        if mask & selectors.EVENT_WRITE:
            connection.flush()
        if not mask & selectors.EVENT_READ:
            return
        for _ in range(MOST_MESSAGES):
            if connection not in self._connections or not self._read(connection):
                return

    def _read(self, connection: Connection) -> bool:
        """Takes one message; whether there may be another."""
        kind = "message"
        try:
            message = connection.receive()
            if message is None:
                self._hang_up(connection)
                return False
            kind = message.kind
            try:
                self._handle(connection, message)
            finally:
                message.close()
        except (BlockingIOError, InterruptedError):
            return False
        except MalformedError as error:
            self._refuse(connection, "malformed", str(error))
        except ExhaustedError as error:
            self._refuse(connection, "exhausted", str(error))
        except ConnectionError:
            self._hang_up(connection)
        except Exception as error:  # one client's message must not end all others' broker
            log.exception("%r of process %d failed", kind, connection.pid)
            self._refuse(connection, "malformed", f"{kind!r} failed in the broker: {error!r}")
        return True

    def _handle(self, connection: Connection, message: Message) -> None:
        client = self._connections[connection]
        if client is None:
            self._meet(connection, message)
            return
        handler = self._handlers.get(message.kind)
        if handler is None:
            raise MalformedError(f"{message.kind!r} is not what a client sends now")
        _check_shape(message)
        handler(client, message)

    def _meet(self, connection: Connection, message: Message) -> None:
        """The first message of a connection."""
        if connection.uid != os.getuid():
            text = f"this broker serves user {os.getuid()}, not {connection.uid}"
            self._refuse(connection, "user", text)
            return
        if message.kind != "hello" or not message.words:
            raise MalformedError(f"the first message is {message.kind!r}, expected 'hello' with its words")
        if message.words[0] != protocol.VERSION:
            text = (
                f"this broker speaks version {protocol.VERSION} of the protocol, the client version "
                f"{message.words[0]}: both must run the same memsaver"
            )
            self._refuse(connection, "version", text)
            return
        _check_shape(message)
        _, number, scrub = message.words
        if message.text != self.uuid:
            self._refuse(connection, "device", f"this broker serves device {self.uuid}, not {message.text}")
            return
        if scrub not in (0, 1):
            raise MalformedError(f"scrub is {scrub}, expected 0 or 1")
        known = self._clients.get(number)
        if known is not None and known.pid != connection.pid:
            raise MalformedError(f"client {number} is process {known.pid}, not {connection.pid}")
        if known is not None and known.connection is not None:
            self._hang_up(known.connection)  # which may forget it
            known = self._clients.get(number)
        member = self.pool.join(number, bool(scrub))
        if known is None:
            known = self._clients[number] = Client(member, connection.pid, connection)
        known.connection = connection
        known.bringing = set()
        known.asked_at = None
        self._connections[connection] = known
        known.send(Message("welcome", (protocol.VERSION, self.pool.capacity)))

    def _refuse(self, connection: Connection, code: str, text: str) -> None:
        log.warning("process %d is refused (%s): %s", connection.pid, code, text)
        connection.refuse(code, text)
        self._hang_up(connection)

    def _hang_up(self, connection: Connection) -> None:
        """The socket is gone. What the client held stays its: its process may be there still."""
        client = self._connections.pop(connection)
        self._writing.discard(connection)
        self._selector.unregister(connection.channel)
        connection.close()
        if client is not None:
            client.connection = None
            client.asked_at = None
            client.leases = None
            self.pool.disconnect(client.member)
            self._end_talks(client, f"process {client.pid} lost its connection to the broker")
            if client.member.id not in self.pool.members:
                del self._clients[client.member.id]
        self._unwatch(connection.pid)
        if client is None or client.is_user:
            self._lonely_since = time.monotonic()

    def _has_users(self) -> bool:
        """Whether anybody needs this broker, unlike a tool that looks at it; who has not said hello yet may."""
        return None in self._connections.values() or any(client.is_user for client in self._clients.values())

    def _end_talks(self, client: Client, why: str) -> None:
        self._questions = [question for question in self._questions if question.client is not client]
        for question in self._questions:
            question.awaited.discard(client)
        for number, wish in list(self._wishes.items()):
            if wish.client is client:
                wish.client = None
            if wish.owner is client:
                del self._wishes[number]
                self._refuse_lease(wish, why)

    # Processes

    def _watch(self, pid: int) -> None:
        """Raises OSError where that process is gone, or cannot be watched."""
        known = self._watches.get(pid)
        if known is not None:
            poll = select.poll()
            poll.register(known, select.POLLIN)
            if not poll.poll(0):
                return
            self._exited(pid)  # and its number is another's
        file = os.pidfd_open(pid)
        self._watches[pid] = file

        def ready(_: int) -> None:
            if self._watches.get(pid) == file:  # else it was closed earlier in this turn
                self._exited(pid)

        self._selector.register(file, selectors.EVENT_READ, ready)

    def _unwatch(self, pid: int) -> None:
        """Ends the watch, if nobody needs it any more."""
        if pid not in self._watches or (
            any(connection.pid == pid for connection in self._connections)
            or any(client.pid == pid for client in self._clients.values())
            or any(lease.pid == pid for lease in self.pool.leases.values())
        ):
            return
        file = self._watches.pop(pid)
        self._selector.unregister(file)
        os.close(file)

    def _exited(self, pid: int) -> None:
        """The kernel says that a process is no more: nothing of it can write to memory."""
        for lease in [lease for lease in self.pool.leases.values() if lease.pid == pid]:
            self._end_lease(lease.id)
        for client in [client for client in self._clients.values() if client.pid == pid]:
            if client.member.held:
                held = gib(self.pool.held_bytes(client.member))
                log.info("process %d has exited, %s are free", pid, held)
            self._end_talks(client, f"process {pid} has exited")
            self.pool.leave(client.member)
            del self._clients[client.member.id]
        for connection in [connection for connection in self._connections if connection.pid == pid]:
            self._connections[connection] = None
            self._hang_up(connection)
        self._unwatch(pid)
        self._lonely_since = time.monotonic()
        if not self._has_users():
            _, drops = self.pool.trim(0)  # who comes next may not be of this pool
            self._drop(drops)

    # Messages: chunks

    def _settle(self, client: Client) -> None:
        """Before it asks for anything, a client has said what it uses."""
        client.is_user = True
        if client.bringing is not None:
            brought, client.bringing = client.bringing, None
            self.pool.keep_only(client.member, brought)

    def _on_bring(self, client: Client, message: Message) -> None:
        words = message.words
        if client.bringing is None:
            raise MalformedError("'bring' comes right after 'welcome'")
        if len(words) != 2 * len(message.files) or len(message.files) > MOST_CHUNKS:
            raise MalformedError(
                f"'bring' has {len(words) // 2} chunks and {len(message.files)} descriptors, expected one of each, "
                f"at most {MOST_CHUNKS}"
            )
        files, message.files = message.files, []
        try:
            for chunk, size in zip(words[::2], words[1::2]):
                if chunk in client.bringing:
                    raise MalformedError(f"chunk {chunk} is brought twice")
                if self.pool.bring(client.member, chunk, size, files[0]):
                    files.pop(0)
                else:
                    os.close(files.pop(0))
                client.bringing.add(chunk)
        finally:
            message.files = files
        client.is_user = True
        if len(words) // 2 < MOST_CHUNKS:  # a full packet may be followed by another
            self._settle(client)

    def _on_want(self, client: Client, message: Message) -> None:
        self._settle(client)
        self._ask(client, message, self.pool.want)

    def _on_more(self, client: Client, message: Message) -> None:
        self._settle(client)
        self._ask(client, message, self.pool.more)

    def _ask(self, client: Client, message: Message, ask: Callable[[Member, int, Sequence[int]], None]) -> None:
        request = message.words[0]
        try:
            ask(client.member, request, message.words[1:])
        except NoRoomError as error:
            client.send(protocol.refusal("no_room", request, str(error)))

    def _on_close(self, client: Client, message: Message) -> None:
        self.pool.close(client.member, message.words[0])

    def _on_give(self, client: Client, message: Message) -> None:
        self._settle(client)
        self.pool.give(client.member, message.words)

    def _on_dropped(self, client: Client, message: Message) -> None:
        self._settle(client)
        self.pool.dropped(client.member, message.words)

    def _on_scrub(self, client: Client, message: Message) -> None:
        if message.words[0] not in (0, 1):
            raise MalformedError(f"scrub is {message.words[0]}, expected 0 or 1")
        client.member.scrub = bool(message.words[0])

    def _on_trim(self, client: Client, message: Message) -> None:
        serial, keep = message.words
        gone, drops = self.pool.trim(keep)
        self._drop(drops)
        client.send(Message("trimmed", (serial, gone)))

    # Messages: leases

    def _on_attach(self, client: Client, message: Message) -> None:
        serial, number, pid, residence = message.words
        owner = self._clients.get(number)
        if owner is None or owner.connection is None or owner.pid != pid:
            text = f"process {pid} has exited, or is no client of the broker of {self.name} now"
            client.send(protocol.refusal("no_lease", serial, text))
            return
        wish = next(self._wish_numbers)
        self._wishes[wish] = Wish(client, serial, owner, client.pid)
        owner.send(Message("lease", (wish, client.pid, residence), message.text))

    def _on_leased(self, client: Client, message: Message) -> None:
        number, lease, more = message.words[:3]
        wish = self._wishes.get(number)
        if wish is None or wish.owner is not client:
            raise MalformedError(f"there is no lease {number} to answer")
        rows = [tuple(message.words[at : at + 3]) for at in range(3, len(message.words), 3)]
        if len(rows) > MOST_CHUNKS or more not in (0, 1):
            raise MalformedError(f"'leased' has {len(rows)} chunks, more {more}, expected {MOST_CHUNKS}, and 0 or 1")
        for _, chunk, size in rows:
            if chunk not in client.member.held or size != client.member.held[chunk].size:
                raise MalformedError(f"chunk {chunk} of {size} bytes is not one that this client holds")
        wish.rows += rows
        if more:
            return
        del self._wishes[number]
        if lease == 0:
            self._refuse_lease(wish, message.text)
            return
        try:
            self.pool.lend(lease, client.member, wish.pid, [chunk for _, chunk, _ in wish.rows])
        except MalformedError:
            self._refuse_lease(wish, f"process {client.pid} did not answer as it should")
            raise
        if wish.client is None:  # it left before it could be told
            self._end_lease(lease)
            return
        self._hand_out(wish, wish.client, client, lease)

    def _hand_out(self, wish: Wish, client: Client, owner: Client, lease: int) -> None:
        for at in range(0, max(1, len(wish.rows)), MOST_CHUNKS):
            rows = wish.rows[at : at + MOST_CHUNKS]
            more = int(at + MOST_CHUNKS < len(wish.rows))
            words = (wish.serial, lease, more, *itertools.chain.from_iterable(rows))
            client.send(Message("attached", words), [owner.member.held[chunk].file for _, chunk, _ in rows])

    def _refuse_lease(self, wish: Wish, text: str) -> None:
        if wish.client is not None:
            wish.client.send(protocol.refusal("no_lease", wish.serial, text))

    def _on_detach(self, client: Client, message: Message) -> None:
        lease = message.words[0]
        known = self.pool.leases.get(lease)
        if known is None:
            self._early_detaches[lease] = None
            if len(self._early_detaches) > _EARLY_DETACHES:
                self._early_detaches.popitem(last=False)
            return
        if known.pid != client.pid:
            raise MalformedError(f"lease {lease} is not one of process {client.pid}")
        self._end_lease(lease)

    def _on_owed(self, client: Client, message: Message) -> None:
        self._settle(client)
        lease, pid, *chunks = message.words
        self.pool.lend(lease, client.member, pid, chunks).owed = True
        try:
            self._watch(pid)
        except (ProcessLookupError, OverflowError):
            self._early_detaches[lease] = None
        except OSError as error:
            self.pool.end_lease(lease)
            raise ExhaustedError(f"the broker cannot watch process {pid}: {error.strerror}") from None
        if lease in self._early_detaches:
            del self._early_detaches[lease]
            self._end_lease(lease)

        else:
            self._end_forgotten(pid)

    def _on_holds(self, client: Client, message: Message) -> None:
        self._settle(client)
        client.leases = set(message.words)
        self._end_forgotten(client.pid)

    def _end_forgotten(self, pid: int) -> None:
        """Leases that an earlier broker made, and whose holder never heard of."""
        for held in [each.leases for each in self._clients.values() if each.pid == pid and each.leases is not None]:
            for lease in [each for each in self.pool.leases.values() if each.pid == pid and each.owed]:
                if lease.id not in held:
                    self._end_lease(lease.id)

    def _end_lease(self, lease: int) -> None:
        ended = self.pool.end_lease(lease)
        if ended is None:
            return
        owner = self._clients.get(ended.owner.id)
        if owner is not None and owner.member is ended.owner:
            owner.send(Message("unlease", (lease,)))
        self._unwatch(ended.pid)

    # Messages: figures

    def _on_look(self, client: Client, message: Message) -> None:
        rows = [(each.pid, self.pool.kept_bytes(each.member)) for each in self._clients.values()]
        rows = [(pid, kept) for pid, kept in rows if kept]
        figures = itertools.chain.from_iterable(rows[: protocol.LONGEST_PACKET // 32])
        client.send(Message("figures", (message.words[0], self.pool.available_bytes(), self.pool.capacity, *figures)))

    def _on_report(self, client: Client, message: Message) -> None:
        words = message.words
        tags = message.text.split("\n") if words else []
        if len(words) != 5 * len(tags):
            raise MalformedError(f"a report has {len(words) // 5} rows and {len(tags)} tags")
        rows = []
        for at, tag in enumerate(tags):
            allocated, mapped, backed_up, state, backup = words[5 * at : 5 * at + 5]
            if state >= len(STATES) or backup >= len(BACKUPS):
                raise MalformedError(f"a report has state {state} and policy {backup}")
            rows.append({
                "tag": tag, "allocated_bytes": allocated, "mapped_bytes": mapped, "backup_bytes": backed_up,
                "state": STATES[state], "backup": BACKUPS[backup],
            })  # fmt: skip
        client.report = rows
        client.reported_at = time.monotonic()
        client.asked_at = None
        for question in self._questions:
            question.awaited.discard(client)

    def _on_status(self, client: Client, message: Message) -> None:
        now = time.monotonic()
        awaited = set()
        for each in self._clients.values():
            if not each.is_user or each.connection is None:
                continue
            if each.asked_at is None:
                each.asked_at = now
                each.send(Message("query"))
            if now < each.asked_at + REPORTS_S:  # who did not answer the last time is not waited for again
                awaited.add(each)
        self._questions.append(Question(client, message.words[0], now + REPORTS_S, awaited))

    def _answer(self, question: Question) -> None:
        rows = [self._row(client) for client in self._clients.values() if client.is_user]
        rows.sort(key=lambda row: row["pid"])
        status = {"device": self.name, "uuid": self.uuid, **self.pool.describe(), "clients": rows}
        # One packet has to hold it: where it is too long the longest lists of regions go.
        while len(text := json.dumps(status, separators=(",", ":"))) > protocol.LONGEST_PACKET - 64:
            longest = max(rows, key=lambda row: len(row["regions"]))
            if longest["regions"]:
                longest["regions"] = []
            else:
                rows.pop()
        question.client.send(Message("status", (question.serial,), text))

    def _row(self, client: Client) -> dict[str, Any]:
        heard = client.reported_at
        return {
            "pid": client.pid,
            "name": _name(client.pid),
            "held_bytes": self.pool.held_bytes(client.member),
            "attached_bytes": self.pool.attached_bytes(client.pid),
            "connected": client.connection is not None,
            "waiting": self.pool.waiting(client.member),
            "report_age_s": None if heard is None else round(time.monotonic() - heard, 3),
            "regions": client.report,
        }


def raise_descriptor_limit() -> None:
    """A chunk is a descriptor here, so as many as the system allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _check_shape(message: Message) -> None:
    kind, count = message.kind, len(message.words)
    first, group, least = _WORDS[kind]
    groups, rest = divmod(count - first, group) if group else (0, count - first)
    if rest or groups < least:
        expected = f"{first} words" + (f" and {least} or more groups of {group}" if group else "")
        raise MalformedError(f"{kind!r} has {count} words, expected {expected}")
    if message.text and kind not in _WITH_TEXT:
        raise MalformedError(f"{kind!r} has {len(message.text)} characters of text, expected none")
    if message.files and kind != "bring":
        raise MalformedError(f"{kind!r} has {len(message.files)} descriptors, expected none")


def _name(pid: int) -> str:
    """Ray gives its actors a title, which says more than their program's name."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            title = file.read(200).split(b"\0")[0].decode(errors="replace").split(" ")[0]
    except OSError:
        title = ""
    return title if title.startswith("ray::") else process_name(pid)
