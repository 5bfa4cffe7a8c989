"""Processes that are forks of one that has imported torch: a fiftieth of the time of a new interpreter with torch."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import memsaver
from tests.support import MIB, Remote, environment, random_bytes, until


class Fork(Remote):
    """Another process. Statements see the names of ``module``, which is imported before the fork."""

    def __init__(self, settings: dict[str, str], module: str = "tests.nursery", timeout: float | None = None) -> None:
        """``settings``: changes of the environment. ``timeout``: of each answer."""
        self.pid, self._channel = _nursery().bear(settings, module)
        self._channel.settimeout(timeout)
        self._to = self._from = self._channel.makefile("rw")

    def start(self, function: Callable[..., object], *arguments: object) -> None:
        """Calls a function there. Its end is an answer."""
        call = pickle.dumps(functools.partial(function, *arguments))
        self.send(f"import pickle; pickle.loads(bytes.fromhex({call.hex()!r}))()")

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        until(self.is_stopped)

    def is_stopped(self) -> bool:
        """Whether all its threads are."""
        states = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(each.read_text().rpartition(")")[2].split()[0] == "T" for each in states)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        if self.is_there():
            os.kill(self.pid, signal.SIGKILL)
        until(lambda: not self.is_there())

    def is_there(self) -> bool:
        return os.path.exists(f"/proc/{self.pid}")

    def close(self) -> None:
        self.kill()
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        self._channel.close()

    def __exit__(self, *_: object) -> None:
        self.close()


class Nursery:
    """Forks processes."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair()
        code = f"from tests.nursery import nurse; nurse({theirs.fileno()})"
        settings = environment(MEMSAVER_JOB="")  # each process has its own
        self._process = subprocess.Popen([sys.executable, "-c", code], env=settings, pass_fds=[theirs.fileno()])
        theirs.close()

    def bear(self, settings: dict[str, str], module: str) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        socket.send_fds(self._channel, [json.dumps([settings, module]).encode()], [theirs.fileno()])
        theirs.close()
        return int(self._channel.recv(100)), ours

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


@functools.cache
def _nursery() -> Nursery:
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


def nurse(file: int) -> None:
    """The process that is forked."""
    import memsaver._torch.ipc.patches  # noqa: F401
    import tests.preloaded  # noqa: F401

    random_bytes(207 * MIB)  # which a fork then need not make
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no test reads their exit status
    channel = socket.socket(fileno=file)
    while True:
        words, files, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not words:
            return
        settings, module = json.loads(words)
        if module not in sys.modules:
            importlib.import_module(module)
            gc.collect()
            gc.freeze()  # a collection in a fork would copy the pages of all of torch's objects
        child = os.fork()
        if not child:
            channel.close()
            _live(files[0], settings, vars(sys.modules[module]))
        os.close(files[0])
        channel.send(str(child).encode())


def _live(file: int, settings: dict[str, str], names: dict[str, object]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.enable(2)  # a process that ends by a signal says where
    os.environ.update(settings)
    memsaver.config.from_environment()
    scope = dict(names)
    lines = os.fdopen(file, "r")
    sys.stdout = os.fdopen(os.dup(file), "w")
    for line in lines:
        try:
            exec(line, scope)
        except BaseException:
            traceback.print_exc(file=sys.stdout)  # answer() has it
            sys.stdout.flush()
            os._exit(1)
        print("<done>", flush=True)
    os._exit(0)
