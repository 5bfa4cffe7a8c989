"""Attachments to other clients' memory: asked for here, granted by the owner, ended by whoever ends first."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from memsaver import protocol
from memsaver.clients import Client, Clients, Handler
from memsaver.pool import Pool
from memsaver.protocol import MOST_CHUNKS, ExhaustedError, MalformedError, Message
from memsaver.watches import Watches

_EARLY_DETACHES = 10_000


@dataclass(eq=False)
class Wish:
    """An attach that waits for the owner's answer."""

    client: Client | None  # None: it has gone
    serial: int
    owner: Client
    pid: int
    rows: list[tuple[int, ...]] = field(default_factory=list)


class Leases:
    """The leases of a pool. ``device``: its name, for messages."""

    def __init__(self, pool: Pool, clients: Clients, watches: Watches, device: str) -> None:
        self._pool = pool
        self._clients = clients
        self._watches = watches
        self._device = device
        self._wishes: dict[int, Wish] = {}  # by the number that the owner answers with
        self._wish_numbers = itertools.count(1)
        self._early_detaches: OrderedDict[int, None] = OrderedDict()  # of leases not yet owed
        self.handlers: dict[str, Handler] = {
            "attach": self._attach,
            "leased": self._leased,
            "detach": self._detach,
            "owed": self._owed,
            "holds": self._holds,
        }

    def has_holder(self, pid: int) -> bool:
        return any(lease.pid == pid for lease in self._pool.leases.values())

    def exited(self, pid: int) -> None:
        """Ends what a process had."""
        for lease in [lease for lease in self._pool.leases.values() if lease.pid == pid]:
            self._end(lease.id)

    def left(self, client: Client, why: str) -> None:
        """A client does not speak any more: it gets no answer, and gives none."""
        for number, wish in list(self._wishes.items()):
            if wish.client is client:
                wish.client = None
            if wish.owner is client:
                del self._wishes[number]
                _refuse(wish, why)

    def _end(self, lease: int) -> None:
        ended = self._pool.end_lease(lease)
        if ended is None:
            return
        owner = self._clients.get(ended.owner.id)
        if owner is not None and owner.member is ended.owner:
            owner.send(Message("unlease", (lease,)))
        self._watches.end(ended.pid)

    def _end_forgotten(self, pid: int) -> None:
        """Leases that an earlier broker made, and whose holder never heard of."""
        for held in [each.leases for each in self._clients.values() if each.pid == pid and each.leases is not None]:
            for lease in [each for each in self._pool.leases.values() if each.pid == pid and each.owed]:
                if lease.id not in held:
                    self._end(lease.id)

    # What clients say

    def _attach(self, client: Client, message: Message) -> None:
        serial, number, pid, residence = message.words
        owner = self._clients.get(number)
        if owner is None or owner.connection is None or owner.pid != pid:
            text = f"process {pid} has exited, or is no client of the broker of {self._device} now"
            client.send(protocol.refusal("no_lease", serial, text))
            return
        wish = next(self._wish_numbers)
        self._wishes[wish] = Wish(client, serial, owner, client.pid)
        owner.send(Message("lease", (wish, client.pid, residence), message.text))

    def _leased(self, client: Client, message: Message) -> None:
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
            _refuse(wish, message.text)
            return
        try:
            self._pool.lend(lease, client.member, wish.pid, [chunk for _, chunk, _ in wish.rows])
        except MalformedError:
            _refuse(wish, f"process {client.pid} did not answer as it should")
            raise
        if wish.client is None:  # it left before it could be told
            self._end(lease)
            return
        _hand_out(wish, wish.client, client, lease)

    def _detach(self, client: Client, message: Message) -> None:
        lease = message.words[0]
        known = self._pool.leases.get(lease)
        if known is None:
            self._early_detaches[lease] = None
            if len(self._early_detaches) > _EARLY_DETACHES:
                self._early_detaches.popitem(last=False)
            return
        if known.pid != client.pid:
            raise MalformedError(f"lease {lease} is not one of process {client.pid}")
        self._end(lease)

    def _owed(self, client: Client, message: Message) -> None:
        client.settle(self._pool)
        lease, pid, *chunks = message.words
        self._pool.lend(lease, client.member, pid, chunks).owed = True
        try:
            self._watches.begin(pid)
        except (ProcessLookupError, OverflowError):
            self._early_detaches[lease] = None
        except OSError as error:
            self._pool.end_lease(lease)
            raise ExhaustedError(f"the broker cannot watch process {pid}: {error.strerror}") from None
        if lease in self._early_detaches:
            del self._early_detaches[lease]
            self._end(lease)
        else:
            self._end_forgotten(pid)

    def _holds(self, client: Client, message: Message) -> None:
        client.settle(self._pool)
        client.leases = set(message.words)
        self._end_forgotten(client.pid)


def _hand_out(wish: Wish, client: Client, owner: Client, lease: int) -> None:
    for at in range(0, max(1, len(wish.rows)), MOST_CHUNKS):
        rows = wish.rows[at : at + MOST_CHUNKS]
        more = int(at + MOST_CHUNKS < len(wish.rows))
        words = (wish.serial, lease, more, *itertools.chain.from_iterable(rows))
        client.send(Message("attached", words), [owner.member.held[chunk].file for _, chunk, _ in rows])


def _refuse(wish: Wish, text: str) -> None:
    if wish.client is not None:
        wish.client.send(protocol.refusal("no_lease", wish.serial, text))
