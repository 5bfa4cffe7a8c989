"""A client that sends random messages to a broker: valid ones, changed ones, and random bytes.

It is a process of its own. It never names some of its chunks, so they stay its own. It writes to them and reads them
again: bytes that differ mean that a chunk was lent twice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
from pathlib import Path

from memsaver.broker import discovery, protocol
from memsaver.broker.clients import CLASSES, PAGE
from memsaver.broker.protocol import Message
from tests.broker_support import granted

_ANY_WORDS = (0, 1, 2, 7, PAGE - 1, PAGE, PAGE + 1, *CLASSES, 1 << 32, 1 << 63, (1 << 64) - 1)
_KINDS = [*protocol._SHAPES, *4 * ["demand", "close", "give_back", "dropped", "reclaimed", "usage"]]
_REQUESTS = range(1, 20)
_BYTES = b"fuzz"


class Fuzzer:
    """One client after the other on the same socket's path."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.draw = random.Random(seed)
        self.sentinel, self.sentinel_end = os.pipe()
        self.spoken: list[int] = []  # chunks that its messages may name
        # Chunks that its messages never name, with its mappings. By the number of a client, which comes again.
        self.secret: dict[int, dict[int, mmap.mmap]] = {self.draw.getrandbits(62): {} for _ in range(3)}
        self.connect()

    def is_likely(self) -> bool:
        return self.draw.random() < 0.9

    def connect(self) -> None:
        self.own: list[int] = []  # of these, granted on this connection
        self.channel = discovery.connect(self.path)
        self.number = self.draw.choice(list(self.secret))
        self.secret[self.number] = {}  # its inventory has none of them
        if self.is_likely():
            files = [self.sentinel] if self.is_likely() else []
            self._send(Message("hello", (protocol.VERSION, self.number, os.getpid()), self.path.stem), files)
        if self.is_likely():
            self._send(Message("inventory"))

    def step(self) -> None:
        """Sends one packet, reads the answers, and checks the chunks that no other client may have."""
        kind = self.draw.choice(_KINDS)
        message = Message(kind, self._words(kind), self._text() if kind in protocol._WITH_TEXT else "")
        count = 1 if kind == "hello" else 0
        files = [self._file() for _ in range(count if self.is_likely() else self.draw.choice([0, 1, 3, 253]))]
        packet = message.encode()
        if not self.is_likely():
            cut = self.draw.randint(1, len(packet))
            head = struct.pack("<II", self.draw.choice([77, 1 << 31]), self.draw.choice([0, 1 << 13, (1 << 32) - 1]))
            random_bytes, too_long = self.draw.randbytes(cut), packet + bytes(protocol.LONGEST_PACKET)
            packet = self.draw.choice([packet[:cut], packet[:8] + random_bytes, head + packet[8:], too_long])
        try:
            self._send(packet, files)
        finally:
            for file in files:
                os.close(file)
        self._read(waits=self.draw.random() < 0.8)
        for chunk, memory in (each for chunks in self.secret.values() for each in chunks.items()):
            assert memory[:4] == _BYTES, f"chunk {chunk} was this process's, and holds {memory[:4]!r}"

    def _send(self, packet: bytes | Message, files: list[int] | None = None) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            protocol.send(self.channel, packet if isinstance(packet, bytes) else packet.encode(), files or ())

    def _read(self, waits: bool) -> None:
        """The messages that have arrived. ``waits``: until the broker has read all that was sent."""
        serial = self.draw.getrandbits(60)
        if waits:
            self._send(Message("usage", (serial,)))
        self.channel.settimeout(10.0 if waits else 0.0)
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    message = protocol.receive(self.channel)
                except ConnectionResetError:
                    message = None
                if message is None:
                    self.channel.close()
                    self.connect()
                    return
                self._hear(message)
                message.close()
                if waits and message.kind == "usage" and message.words[0] == serial:
                    return

    def _hear(self, message: Message) -> None:
        for chunk, size, flags in granted(message) if message.kind == "grant" else ():
            file = message.files.pop(0) if flags & protocol.HAS_DESCRIPTOR else None
            secret = self.secret[self.number]
            if file is not None and len(secret) < 3 and size == PAGE and self.draw.random() < 0.3:
                memory = secret[chunk] = mmap.mmap(file, size)
                memory[:] = _BYTES * (size // len(_BYTES))
            else:
                self.spoken.append(chunk)
                self.own.append(chunk)
            if file is not None:
                os.close(file)

    def _words(self, kind: str) -> list[int]:
        """As many words as the kind has, and often valid ones."""
        first, group, least = protocol._SHAPES[kind]
        words = [self._word() for _ in range(first)]
        if first and kind in ("demand", "exchange", "close"):
            words[0] = self.draw.choice(_REQUESTS)
        groups = self.draw.choice([least, 1, 2, 5, 250]) if group else 0
        for _ in range(min(groups, max(1, len(self.own))) if kind == "give_back" and self.is_likely() else groups):
            if kind in ("demand", "exchange"):
                limit = self.draw.choice(CLASSES[2:])
                words += (limit, self.draw.choice([limit, PAGE]), PAGE * self.draw.randint(1, 3))
            else:
                words += (self._chunk(), PAGE if kind == "inventory" else self.draw.choice([0, 1]))[:group]
        return words if self.is_likely() else words[: self.draw.randint(0, len(words))] + [self._word()]

    def _word(self) -> int:
        return self.draw.choice((*_ANY_WORDS, self.draw.getrandbits(64), self._chunk(), os.getpid(), *_REQUESTS))

    def _chunk(self) -> int:
        if self.own and self.is_likely():
            return self.own.pop(self.draw.randrange(len(self.own)))
        return self.draw.choice(self.spoken) if self.spoken else self.draw.getrandbits(63)

    def _text(self) -> str:
        report = '{"imported_bytes": null, "host_held_bytes": 0, "rows": [], "regions": [["a", "", "", 1, 2, 3, 4]]}'
        return self.draw.choice(["", self.path.stem, "a", "a\nb", report, "x" * 5000])

    def _file(self) -> int:
        kind = self.draw.randint(0, 4)
        if kind < 3:
            return os.dup((self.sentinel, self.sentinel_end, self.channel.fileno())[kind])
        if kind == 3:
            return os.pidfd_open(os.getpid())
        file = os.memfd_create("memsaver-fuzz")
        os.ftruncate(file, self.draw.choice([0, PAGE, PAGE + 1]))
        return file


def say(path: Path, seed: int, packets: int) -> None:
    fuzzer = Fuzzer(path, seed)
    for _ in range(packets):
        fuzzer.step()
