"""A broker in a process of its own, and clients that speak its protocol word by word."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memsaver import protocol, sockets
from memsaver.protocol import Message
from memsaver.visitor import Visitor
from tests.support import GIB, environment, fresh_device

PATIENCE_S = 60.0
_requests = itertools.count(1)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Client:
    """One client. ``number``: the same again joins as the same client."""

    def __init__(self, path: Path | str, number: int | None = None, scrub: int = 0, bring: bool = True) -> None:
        self.path = Path(path)
        self.number = number or random.getrandbits(62) + 1
        self.channel = sockets.connect(self.path)
        self.channel.settimeout(PATIENCE_S)
        self.files: dict[int, int] = {}  # of chunks that it was lent
        self.say("hello", protocol.VERSION, self.number, text=self.path.stem)
        self.capacity = self.hear("welcome").words[1]
        if bring:
            self.say("bring")
        if scrub:
            self.say("scrub", scrub)

    def say(self, kind: str, *words: int, text: str = "", files: tuple[int, ...] = ()) -> None:
        self.say_raw(Message(kind, words, text).encode(), files)

    def say_raw(self, packet: bytes, files: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(BrokenPipeError):  # what it said before it hung up can still be read
            protocol.send(self.channel, packet, files)

    def hear(self, *kinds: str) -> Message:
        """The next message, but for queries, which come with each status, and for news that a demand is served."""
        message = protocol.receive(self.channel)
        while message is not None and (
            (message.kind == "query" and "query" not in kinds) or (message.kind == "stalled" and message.words[2] == 0)
        ):
            message = protocol.receive(self.channel)
        assert message is not None, f"the broker hung up instead of {kinds}"
        assert message.kind in kinds, message
        return message

    def hears_nothing(self) -> bool:
        """Once the broker has answered a question, what it had to say before was said."""
        self.say("look", 4711)
        return self.hear("figures").words[0] == 4711

    def want(self, nbytes: int, limit: int = GIB, fresh: int | None = None) -> int:
        request = next(_requests)
        self.say("want", request, limit, fresh or limit, nbytes)
        return request

    def take(self, nbytes: int) -> list[tuple[int, int, int]]:
        """What is granted next, of so many bytes in all: (chunk, size, flags)."""
        chunks: list[tuple[int, int, int]] = []
        while sum(size for _, size, _ in chunks) < nbytes:
            message = self.hear("grant")
            words, files = message.words[1:], list(message.files)
            for at in range(0, len(words), 4):
                chunks.append((words[at], words[at + 1], words[at + 2]))
                if words[at + 2] & protocol.HAS_DESCRIPTOR:
                    self.files[words[at]] = files.pop(0)
            assert not files
        assert sum(size for _, size, _ in chunks) == nbytes
        return chunks

    def borrow(self, nbytes: int, limit: int = GIB, fresh: int | None = None) -> list[int]:
        self.want(nbytes, limit, fresh)
        return [chunk for chunk, *_ in self.take(nbytes)]

    def give(self, chunks: list[int]) -> None:
        self.say("give", *chunks)

    def drop(self, *chunks: int) -> None:
        for chunk in chunks:
            os.close(self.files.pop(chunk))
        self.say("dropped", *chunks)

    def bring(self, *chunks: tuple[int, int]) -> None:
        words = itertools.chain.from_iterable(chunks)
        self.say("bring", *words, files=tuple(self.files[chunk] for chunk, _ in chunks))

    def look(self) -> tuple[int, int, dict[int, int]]:
        self.say("look", 7)
        serial, available, capacity, *rows = self.hear("figures").words
        assert serial == 7
        return available, capacity, dict(zip(rows[::2], rows[1::2]))

    def refusal(self) -> tuple[str, int, str]:
        message = self.hear("refused")
        return protocol.refusal_name(message.words[0]), message.words[1], message.text

    def is_refused(self) -> tuple[str, str]:
        """Refused for good: (code, text), and nothing comes after."""
        code, _, text = self.refusal()
        assert protocol.receive(self.channel) is None
        return code, text

    def is_left(self) -> bool:
        """Whether the broker hangs up next, with no more than news that demands are served before it."""
        message = protocol.receive(self.channel)
        while message is not None and message.kind == "stalled" and message.words[2] == 0:
            message = protocol.receive(self.channel)
        return message is None

    def hang_up(self) -> None:
        self.channel.close()

    def close(self) -> None:
        self.channel.close()
        while self.files:
            os.close(self.files.popitem()[1])


class Running:
    """A broker of a fresh host device, and its clients in this process."""

    def __init__(self, capacity: str = "1GiB", *arguments: str, limit_files: int | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ms"))  # short: a socket's path may have 107 bytes
        self.environment = environment(
            MEMSAVER_HOST_DEVICE=str(int(fresh_device()) + GIB), MEMSAVER_POOL_DIR=str(self.directory)
        )
        self.arguments = ("--device", "cpu", "--capacity", capacity, *arguments)
        self.limit_files = limit_files
        self.clients: list[Client] = []
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command("broker", *self.arguments), env=self.environment)
        until(lambda: self.sockets() or self.process.poll() is not None)
        assert self.process.poll() is None
        [self.path] = self.sockets()
        self.uuid = self.path.stem

    def command(self, *arguments: str) -> list[str]:
        limit = ["prlimit", f"--nofile={self.limit_files}"] if self.limit_files else []
        return [*limit, sys.executable, "-m", "memsaver", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command beside it."""
        return subprocess.run(
            [sys.executable, "-m", "memsaver", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def sockets(self) -> list[Path]:
        return [path for path in self.directory.glob("*.sock") if sockets.accepts(path)]

    def client(self, number: int | None = None, scrub: int = 0, bring: bool = True) -> Client:
        self.clients.append(Client(self.path, number, scrub, bring))
        return self.clients[-1]

    def status(self) -> dict[str, Any]:
        with Visitor(self.path) as visitor:
            return visitor.status()

    def row(self, pid: int) -> dict[str, Any]:
        return next(row for row in self.status()["clients"] if row["pid"] == pid)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        if self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.directory)
