"""Starts brokers in the background, and stops them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from memsaver.broker import discovery, protocol
from memsaver.errors import BrokerError, ConfigError

LINGER_S = 30.0  # time without clients after which a broker ends that a client started
_START_S = 30.0
_STOP_S = 10.0
_LOG_BYTES = 1 << 20  # a longer log is truncated at the next start
_TAIL_BYTES = 2000
_POLL_S = 0.01


def mps_error(device: str) -> ConfigError:
    return ConfigError(
        f"the memory of {device} cannot be in a shared pool under MPS: one server process runs the kernels of all "
        "processes, so the end of a process is not the end of its kernels",
        option="pool",
        value="shared",
    )


def ensure(uuid: str, device: str, capacity: int | None = None, timeout_s: float = _START_S) -> Path:
    """Starts the broker of a device unless it runs, and returns its socket.

    - ``uuid``: of the device, as its driver reports it; ``device``: ``"cuda:0"``, or ``"cpu"`` for the host driver's.
    - ``capacity``: bytes, for a broker that is started; by default 90 % of a GPU.

    Processes that call it at the same time get the same broker. Raises BrokerError, with the last lines of the broker's
    log, and ConfigError.
    """
    path = discovery.socket_path(uuid)
    deadline = time.monotonic() + timeout_s
    if discovery.accepts(path):
        return path
    log = path.with_suffix(".log")
    began = _open_log(log)
    starter = _spawn(uuid, device, capacity, log)
    while not discovery.accepts(path):
        # The starter exits with 0 when the broker accepts clients, and with another status if it failed. Of several
        # processes that start a broker at once, the first one's gets the lock.
        failed = starter.poll() not in (None, 0) and not discovery.is_locked(path)
        if failed or time.monotonic() > deadline:
            if starter.poll() is None:
                starter.kill()
                starter.wait()
            text = _tail(log, began)
            reason = "could not be started" if failed else f"does not accept clients after {timeout_s:g} s"
            raise BrokerError(f"a broker for device {uuid} {reason}; its log, {log}: {text}", path=str(path))
        time.sleep(_POLL_S)
    starter.wait()
    return path


def detach(serve: Callable[[Callable[[Path], None]], int], timeout_s: float = _START_S) -> int:
    """Runs ``serve`` in a child process in the background. Returns the exit status of this process.

    ``serve`` gets a function, and calls it with the path of the broker's socket when clients are accepted. Then the
    child replaces the caller's stdout and stderr by a log beside the socket, and this process returns. Errors of
    ``serve`` before that go to the caller's stderr. If no clients are accepted after ``timeout_s``, as with a call of
    the driver that hangs, the child is killed, and BrokerError raised.

    Call it before the core is in use: a fork copies neither its threads nor the state of a driver.
    """
    ready, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        if not select.select([ready], [], [], timeout_s)[0]:
            os.kill(child, signal.SIGKILL)  # not waited for: the driver may keep it
            text = f"the broker (pid {child}) does not accept clients after {timeout_s:g} s, and was killed"
            raise BrokerError(text, path="")
        if os.read(ready, 1):
            return 0
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.setsid()
    os.chdir("/")
    _close_inherited({writer})

    def on_ready(path: Path) -> None:
        log = path.with_suffix(".log")
        _open_log(log)
        _redirect(log)
        os.write(writer, b"1")
        os.close(writer)

    return serve(on_ready)


def stop(path: Path, timeout_s: float = _STOP_S) -> int:
    """Stops the broker at this socket, and waits for its end. Returns its pid. Raises BrokerError."""
    with discovery.connect(path) as channel:
        pid = protocol.peer(channel)[0]
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return pid  # it has ended meanwhile
    try:
        # A process with a lock on the path is the broker, and not a later process with its pid.
        if discovery.is_locked(path):
            signal.pidfd_send_signal(file, signal.SIGTERM)
            poll = select.poll()
            poll.register(file, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                text = f"the broker at {path} (pid {pid}) does not end within {timeout_s:g} s of SIGTERM"
                raise BrokerError(text, path=str(path))
    finally:
        os.close(file)
    return pid


def _close_inherited(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in keep:
            with contextlib.suppress(OSError):  # the descriptor of the directory itself
                os.close(int(name))


def _redirect(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    null = os.open(os.devnull, os.O_RDONLY)
    file = _opener(str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(null, 0)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(null)
    os.close(file)


def _open_log(log: Path) -> int:
    """Truncates a log that is too long. Returns the position of the next line."""
    with open(log, "a", opener=_opener) as file:
        if file.tell() > _LOG_BYTES:
            file.truncate(0)
        return file.tell()


def _opener(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _tail(log: Path, began: int) -> str:
    with open(log, "rb") as file:
        file.seek(max(began, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read().decode(errors="replace").strip() or "(empty)"


def _spawn(uuid: str, device: str, capacity: int | None, log: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "MEMSAVER_POOL_DIR": str(discovery.root())}
    environment.pop("MEMSAVER_POOL", None)  # a broker is not a client
    # The same modules as here, independent of the working directory.
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(map(os.path.abspath, sys.path)))
    if device == "cpu":
        # The size identifies a device of the host driver. It is the last group of the UUID.
        environment["MEMSAVER_HOST_DEVICE"] = str(int(uuid.rpartition("-")[2], 16))
    named = "cpu" if device == "cpu" else uuid
    arguments = [sys.executable, "-m", "memsaver", "broker", "--detach", "--device", named, "--linger", str(LINGER_S)]
    if capacity is not None:
        arguments += ["--capacity", str(capacity)]
    with open(log, "ab", opener=_opener) as errors:
        return subprocess.Popen(
            arguments,
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
