"""Brokers, and clients that send single messages of their protocol."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Self, cast

import pytest

from memsaver import _core
from memsaver.broker import caller, discovery, protocol
from memsaver.broker import clients as pool_clients
from memsaver.broker.loop import BrokerLoop
from memsaver.broker.monitor import Process
from memsaver.broker.protocol import Message
from memsaver.broker.server import Connection
from memsaver.errors import DriverError
from tests.support import GIB, environment, fresh_device, run_program, until

PATIENCE_S = 60.0
PLENTY = 1 << 40
_requests = itertools.count(1)
APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]  # a pid namespace of its own


def is_possible(command: list[str]) -> bool:
    return run_program(["sh", "-c", f"{' '.join(command)} true"]).returncode == 0


@functools.cache
def sentinel() -> int:
    """The read end of this process's sentinel."""
    read, _ = os.pipe()
    return read


class Client:
    """One client. ``number``: the same again joins as the same client."""

    def __init__(self, path: Path | str, number: int | None = None, bring: bool = True, proves: bool = True) -> None:
        self.path = Path(path)
        self.number = number or random.getrandbits(62) + 1
        self.channel = discovery.connect(self.path)
        self.channel.settimeout(PATIENCE_S)
        self.files: dict[int, int] = {}  # of chunks that it was lent
        files = (sentinel(),) if proves else ()
        self.say("hello", protocol.VERSION, self.number, os.getpid(), text=self.path.stem, files=files)
        self.capacity = self.hear("welcome").words[1]
        if bring:
            self.say("inventory")

    def say(self, kind: str, *words: int, text: str = "", files: tuple[int, ...] = ()) -> None:
        self.say_raw(Message(kind, words, text).encode(), files)

    def say_raw(self, packet: bytes, files: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(BrokenPipeError):  # messages from before the hang-up can still be read
            protocol.send(self.channel, packet, files)

    def hear(self, *kinds: str) -> Message:
        """The next message, but for those that come at any time: with each status, or while any demand waits."""
        message = protocol.receive(self.channel)
        while message is not None and message.kind in {"query", "reclaim", "holders"} - set(kinds):
            message = protocol.receive(self.channel)
        assert message is not None, f"the broker hung up instead of {kinds}"
        assert message.kind in kinds, message
        return message

    def want(self, nbytes: int, limit: int = GIB, fresh: int | None = None) -> int:
        request = next(_requests)
        self.say("demand", request, limit, fresh or limit, nbytes)
        return request

    def take(self, nbytes: int) -> list[tuple[int, int, int]]:
        """The next grants, until they have so many bytes in all: (chunk, size, flags)."""
        chunks: list[tuple[int, int, int]] = []
        while sum(size for _, size, _ in chunks) < nbytes:
            message = self.hear("grant")
            files = list(message.files)
            for chunk, size, flags in granted(message):
                chunks.append((chunk, size, flags))
                if flags & protocol.HAS_DESCRIPTOR:
                    self.files[chunk] = files.pop(0)
            assert not files
        assert sum(size for _, size, _ in chunks) == nbytes
        return chunks

    def borrow(self, nbytes: int, limit: int = GIB, fresh: int | None = None) -> list[int]:
        self.want(nbytes, limit, fresh)
        return [chunk for chunk, *_ in self.take(nbytes)]

    def give(self, chunks: list[int], foreign: int = 0) -> None:
        self.say("give_back", *(word for chunk in chunks for word in (chunk, foreign)))

    def drop(self, *chunks: int) -> None:
        for chunk in chunks:
            os.close(self.files.pop(chunk))
        self.say("dropped", *chunks)

    def bring(self, *chunks: tuple[int, int]) -> None:
        words = itertools.chain.from_iterable(chunks)
        self.say("inventory", *words)

    def look(self) -> tuple[int, int]:
        self.say("usage", 7)
        serial, available, capacity = self.hear("usage").words
        assert serial == 7
        return available, capacity

    def refusal(self) -> tuple[str, int, str]:
        message = self.hear("refused")
        return protocol.refusal_name(message.words[0]), message.words[1], message.text

    def is_refused(self) -> tuple[str, str]:
        """Refused for good: (code, text), and nothing comes after."""
        code, _, text = self.refusal()
        assert protocol.receive(self.channel) is None
        return code, text

    def is_left(self) -> bool:
        """Whether the broker hangs up next."""
        return protocol.receive(self.channel) is None

    def hang_up(self) -> None:
        self.channel.close()

    def close(self) -> None:
        self.channel.close()
        while self.files:
            os.close(self.files.popitem()[1])


def granted(message: Message) -> list[tuple[int, ...]]:
    """(chunk, size, flags) of each chunk in a grant."""
    words = message.words[3 + 2 * message.words[2] :]
    return list(zip(*[iter(words)] * 3))


class CountedMemory:
    """A device's memory as the pool uses it. Descriptors are numbers; ``room`` is left by other programs."""

    def __init__(self, capacity: int) -> None:
        self.room = PLENTY
        self.capacity = capacity
        self.sizes: dict[int, int] = {}
        self._files = itertools.count(100)

    def create(self, size: int) -> int:
        if size > self.free_bytes():
            raise DriverError("create failed with code 2: full", call="create", code=2, message="full")
        assert sum(self.sizes.values()) + size <= self.capacity, "more was made than the capacity"
        file = next(self._files)
        self.sizes[file] = size
        return file

    def close(self, file: int) -> None:
        del self.sizes[file]

    def free_bytes(self) -> int:
        return max(0, self.room - sum(self.sizes.values()))


def made(number: int) -> pool_clients.Client:
    """A connected client of a pool, which does not use its connection."""
    return pool_clients.Client(number, Process(number, -1), cast(Connection, object()))


class Broker:
    """A broker of a fresh host device, and its clients in this process."""

    path: Path

    def __init__(self) -> None:
        self.clients: list[Client] = []

    @property
    def uuid(self) -> str:
        return self.path.stem

    def client(self, number: int | None = None, bring: bool = True, proves: bool = True) -> Client:
        self.clients.append(Client(self.path, number, bring, proves))
        return self.clients[-1]

    def status(self) -> dict[str, Any]:
        return caller.status(self.path)

    def row(self, pid: int) -> dict[str, Any]:
        return next(row for row in self.status()["clients"] if row["pid"] == pid)


class Local(Broker):
    """A broker in a thread of this process, over this process's host device. ``environment``: of its clients."""

    def __init__(self, capacity: int = GIB, linger_s: float | None = None) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="ms"))  # short: a socket's path may have 107 bytes
        self.memory = _core.open_host_memory()
        self.environment = environment(
            MEMSAVER_HOST_DEVICE=str(self.memory.total_bytes()), MEMSAVER_POOL_DIR=str(self.directory)
        )
        self.capacity = capacity
        self.linger_s = linger_s
        self.start()

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MEMSAVER_POOL_DIR", str(self.directory))
            listener = discovery.Listener(self.memory.uuid())
        self.path = listener.path
        self.loop = BrokerLoop(self.memory, "cpu", self.capacity, listener, self.linger_s)
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def stop(self) -> None:
        self.loop.stop("the test ends")
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        self.stop()
        shutil.rmtree(self.directory)


class Running(Broker):
    """A broker in a process of its own."""

    def __init__(self, capacity: str = "1GiB", *arguments: str, limit_files: int | None = None) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="ms"))  # short: a socket's path may have 107 bytes
        self.environment = environment(
            MEMSAVER_HOST_DEVICE=str(int(fresh_device()) + GIB), MEMSAVER_POOL_DIR=str(self.directory)
        )  # of the job of this process
        self.arguments = ("--device", "cpu", "--capacity", capacity, *arguments)
        self.prefix = ["prlimit", f"--nofile={limit_files}"] if limit_files else []  # of its command
        self.start()

    def start(self) -> None:
        command = [*self.prefix, sys.executable, "-m", "memsaver", "broker", *self.arguments]
        self.process = subprocess.Popen(command, env=self.environment)
        until(lambda: self.sockets() or self.process.poll() is not None)
        assert self.process.poll() is None
        [self.path] = self.sockets()

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Another command beside it."""
        command = [sys.executable, "-m", "memsaver", *arguments]
        return run_program(command, env=self.environment, timeout=PATIENCE_S, **options)

    def sockets(self) -> list[Path]:
        return [path for path in self.directory.rglob("*.sock") if discovery.accepts(path)]

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(PATIENCE_S)

    @property
    def pid(self) -> int:
        return self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.clients:
            client.close()
        self.kill()
        shutil.rmtree(self.directory)
