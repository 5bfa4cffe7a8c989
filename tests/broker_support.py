"""A broker in a process of its own, and clients that send single messages of its protocol."""

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
from pathlib import Path
from typing import Any

from memsaver.broker import discovery, protocol
from memsaver.broker.admin import AdminClient
from memsaver.broker.protocol import Message
from tests.support import GIB, environment, fresh_device, until

PATIENCE_S = 60.0
_requests = itertools.count(1)


@functools.cache
def sentinel() -> int:
    """The read end of this process's sentinel."""
    read, _ = os.pipe()
    return read


class Client:
    """One client. ``number``: the same again joins as the same client."""

    def __init__(
        self,
        path: Path | str,
        number: int | None = None,
        bring: bool = True,
        proves: bool = True,
        version: int = protocol.VERSION,
    ) -> None:
        self.path = Path(path)
        self.number = number or random.getrandbits(62) + 1
        self.channel = discovery.connect(self.path)
        self.channel.settimeout(PATIENCE_S)
        self.files: dict[int, int] = {}  # of chunks that it was lent
        self.say_raw(Message("hello", (version, self.number, os.getpid()), self.path.stem).encode())
        self.welcome = self.hear("welcome")
        self.capacity = self.welcome.words[1]
        if proves:
            self.say("sentinel", files=(sentinel(),))
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

    def hears_nothing(self) -> bool:
        """Whether no message comes. A question is answered last, so all earlier messages have arrived by then."""
        self.say("usage", 4711)
        return self.hear("usage").words[0] == 4711

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
        self.say("inventory", *words, files=tuple(self.files[chunk] for chunk, _ in chunks))

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


# The command, with a device whose figures come from files in the directory of sockets.
TOLD = """
import os, sys
from pathlib import Path
from memsaver import _core, cli

class Told:
    def __init__(self, memory):
        self._memory = memory

    def __getattr__(self, name):
        return getattr(self._memory, name)

    def compute_pids(self):
        return [int(pid) for pid in self._read("pids").split()]

    def under_mps(self):
        return bool(self._read("mps"))

    def _read(self, name):
        path = Path(os.environ["MEMSAVER_POOL_DIR"], name)
        return path.read_text() if path.exists() else ""

open_host_memory = _core.open_host_memory
_core.open_host_memory = lambda: Told(open_host_memory())
sys.exit(cli.main())
"""


class Running:
    """A broker of a fresh host device, and its clients in this process."""

    def __init__(self, capacity: str = "1GiB", *arguments: str, limit_files: int | None = None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ms"))  # short: a socket's path may have 107 bytes
        self.environment = environment(
            MEMSAVER_HOST_DEVICE=str(int(fresh_device()) + GIB), MEMSAVER_POOL_DIR=str(self.directory)
        )  # of the job of this process
        self.arguments = ("--device", "cpu", "--capacity", capacity, *arguments)
        self.limit_files = limit_files
        self.prefix: list[str] = []  # of its command
        self.program = ["-m", "memsaver"]
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
        return [*self.prefix, *limit, sys.executable, *self.program, *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command beside it."""
        return subprocess.run(
            [sys.executable, *self.program, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def sockets(self) -> list[Path]:
        return [path for path in self.directory.rglob("*.sock") if discovery.accepts(path)]

    def client(self, number: int | None = None, bring: bool = True, proves: bool = True) -> Client:
        self.clients.append(Client(self.path, number, bring, proves))
        return self.clients[-1]

    def status(self) -> dict[str, Any]:
        with AdminClient(self.path) as admin:
            return admin.status()

    def row(self, pid: int) -> dict[str, Any]:
        return next(row for row in self.status()["clients"] if row["pid"] == pid)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def idle_descriptors(self, within_s: float = PATIENCE_S) -> int:
        """The number of its descriptors while it runs and watches no process."""
        self.status()  # its socket accepts before its loop runs

        def is_watching() -> bool:
            folder = f"/proc/{self.process.pid}/fd"
            for name in os.listdir(folder):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if "pidfd" in os.readlink(f"{folder}/{name}"):
                        return True
            return False

        until(lambda: not is_watching(), within_s)
        return self.descriptors()

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
