"""A client that sends random messages to a broker: valid ones, changed ones, and random bytes.

It is a process of its own (``python -m tests.broker_fuzz SOCKET SEED PACKETS``). It never names some of its
chunks, so they stay its own. It writes to them and reads them again: bytes that differ mean that a chunk was lent
twice.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
import sys
from pathlib import Path

from memsaver.broker import discovery, protocol
from memsaver.broker.clients import CLASSES, PAGE
from memsaver.broker.protocol import Message

_HEAD = struct.Struct("<II")
_ANY_WORDS = (0, 1, 2, 7, 250, PAGE - 1, PAGE, PAGE + 1, *CLASSES, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)
_CLIENTS = sorted(number for number in protocol.KINDS.values() if number < 100)
_WITH_TEXT = {protocol.KINDS[kind] for kind in protocol._WITH_TEXT}
_BYTES = b"fuzz"


class Fuzzer:
    """One client after the other on the same socket's path."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path = path
        self.draw = random.Random(seed)
        self.sentinel, self.sentinel_end = os.pipe()
        self.spoken: list[int] = []  # chunks that its messages may name: granted, given back, or made up
        self.secret: dict[int, mmap.mmap] = {}  # chunks that its messages never name, with its mappings
        self.refused = 0
        self.requests = list(range(1, 6))
        self.dead = _dead()
        self.connect()

    def connect(self) -> None:
        self.channel = discovery.connect(self.path)
        self.channel.settimeout(5.0)
        self.number = self.draw.getrandbits(62)
        if self.draw.random() < 0.9:
            hello = Message("hello", (protocol.VERSION, self.number, os.getpid()), self.path.stem)
            self._send(hello.encode())
            if self.draw.random() < 0.9:
                self._send(Message("sentinel").encode(), [self.sentinel])
            if self.draw.random() < 0.9:
                self._send(Message("inventory").encode())

    def step(self) -> None:
        """Sends one packet, reads the answers, and checks the chunks that no other client may have."""
        packet, files = self._packet()
        try:
            self._send(packet, files)
        finally:
            for file in files:
                os.close(file)
        if self.draw.random() < 0.02:
            self.channel.close()
            self.connect()
        self._read(waits=self.draw.random() < 0.8)
        for chunk, memory in self.secret.items():
            found = memory[:4]
            assert found == _BYTES, f"chunk {chunk} was this process's, and holds {found!r}"

    def _send(self, packet: bytes, files: list[int] | None = None) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            protocol.send(self.channel, packet, files or ())

    def _read(self, waits: bool) -> None:
        """The messages that have arrived. ``waits``: until the broker has read all that was sent."""
        serial = self.draw.getrandbits(60)
        if waits:
            self._send(Message("usage", (serial,)).encode())
        self.channel.settimeout(10.0 if waits else 0.0)
        try:
            while True:
                message = protocol.receive(self.channel)
                if message is None:
                    raise ConnectionResetError
                self._hear(message)
                message.close()
                if waits and message.kind == "usage" and message.words[0] == serial:
                    break
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self.refused += 1
            self.channel.close()
            self.connect()

    def _hear(self, message: Message) -> None:
        if message.kind != "grant":
            return
        words = message.words[3 + 2 * message.words[2] :]
        for chunk, size, flags in zip(*[iter(words)] * 3):
            file = message.files.pop(0) if flags & protocol.HAS_DESCRIPTOR else None
            if file is not None and len(self.secret) < 3 and size == PAGE and self.draw.random() < 0.3:
                memory = self.secret[chunk] = mmap.mmap(file, size)
                memory[:] = _BYTES * (size // len(_BYTES))
            else:
                self.spoken.append(chunk)
            if file is not None:
                os.close(file)

    # Packets

    def _packet(self) -> tuple[bytes, list[int]]:
        draw = self.draw
        if draw.random() < 0.05:
            return draw.randbytes(draw.randint(1, 64)), self._files(draw.choice([0, 0, 2]))
        kind = draw.choice(_CLIENTS) if draw.random() < 0.9 else draw.choice([*protocol.KINDS.values(), 77, 1 << 31])
        words = self._words(kind)
        if draw.random() < 0.1:
            words = words[: draw.randint(0, len(words))] + [self._word() for _ in range(draw.randint(0, 3))]
        count = len(words) if draw.random() < 0.95 else draw.choice([0, len(words) + 1, 1 << 13, (1 << 32) - 1])
        has_text = kind in _WITH_TEXT or draw.random() < 0.05
        packet = _HEAD.pack(kind, count) + struct.pack(f"<{len(words)}Q", *words)
        packet += self._text() if has_text else b""
        if draw.random() < 0.05:
            packet = packet[: draw.randint(1, len(packet))]
        if draw.random() < 0.01:
            packet += bytes(protocol.LONGEST_PACKET)
        name = next((name for name, number in protocol.KINDS.items() if number == kind), "")
        likely = {"inventory": len(words) // 2, "sentinel": 2}
        files = likely.get(name, 0) if draw.random() < 0.9 else draw.choice([0, 1, 3, 250, 253])
        return packet, self._files(files)

    def _words(self, kind: int) -> list[int]:
        """As many words as the kind has, and often valid ones."""
        name = next((name for name, number in protocol.KINDS.items() if number == kind), "")
        first, group, least = protocol._SHAPES.get(name, (self.draw.randint(0, 4), 0, 0))
        words = [self._word() for _ in range(first)]
        groups = self.draw.choice([least, 1, 2, 5, 250]) if group else 0
        for _ in range(groups):
            if name in ("demand", "exchange"):
                limit = self.draw.choice(CLASSES[2:])
                words += (limit, self.draw.choice([limit, PAGE]), PAGE * self.draw.randint(1, 3))
            elif name == "dropped":
                words.append(self._chunk())
            elif name == "give_back":
                words += (self._chunk(), self.draw.choice([0, 1]))
            elif name == "inventory":
                words += (self._chunk(), PAGE)
            else:
                words += (self._word() for _ in range(group))
        if words and name in ("demand", "exchange", "close"):
            words[0] = self.draw.choice(self.requests)
        return words[: (protocol.LONGEST_PACKET - 100) // 8]

    def _word(self) -> int:
        draw = self.draw
        others = (draw.choice(_ANY_WORDS), draw.getrandbits(64), self._chunk(), os.getpid(), self.number)
        return draw.choice((*others, draw.choice(self.requests)))

    def _chunk(self) -> int:
        return self.draw.choice(self.spoken) if self.spoken else self.draw.getrandbits(63)

    def _text(self) -> bytes:
        device = self.path.stem.encode()
        report = b'{"imported_bytes": null, "rows": [], "regions": [["a", "", "", 1, 2, 3]]}'
        return self.draw.choice([b"", device, b"a", b"a\nb", report, b"\xff\xfe", b"x" * 5000])

    def _files(self, count: int) -> list[int]:
        return [self._file() for _ in range(count)]

    def _file(self) -> int:
        kind = self.draw.randint(0, 6)
        if kind == 0:
            return os.dup(self.sentinel)
        if kind == 1:
            return os.dup(self.sentinel_end)
        if kind == 2:
            return os.pidfd_open(os.getpid())
        if kind == 3:
            return os.dup(self.dead)
        if kind == 4:
            read, write = os.pipe()
            os.close(write)
            return read
        if kind == 5:
            file = os.memfd_create("memsaver-fuzz")
            os.ftruncate(file, self.draw.choice([0, PAGE, PAGE + 1]))
            return file
        return os.dup(self.channel.fileno())


def _dead() -> int:
    """A pidfd of a process that has ended."""
    child = os.fork()
    if not child:
        os._exit(0)
    file = os.pidfd_open(child)
    os.waitpid(child, 0)
    return file


def main(path: str, seed: str, packets: str) -> None:
    fuzzer = Fuzzer(Path(path), int(seed))
    for _ in range(int(packets)):
        fuzzer.step()
    print("said", packets, "refused", fuzzer.refused)


if __name__ == "__main__":
    main(*sys.argv[1:])
