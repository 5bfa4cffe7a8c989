"""Starts brokers in the background, and stops them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from memsaver import trace
from memsaver.broker import discovery, procfs, protocol
from memsaver.errors import BrokerError, ConfigError, checked

LINGER_S = 30.0  # time without clients after which a broker ends that a client started
_START_S = 30.0
_STOP_S = 10.0
_LOG_BYTES = 1 << 20  # a longer log is truncated at the next start
_TAIL_BYTES = 2000
_POLL_S = 0.01
# Exits at once, so that the broker is no child of this process.
_IN_BACKGROUND = """
import subprocess, sys
with open(sys.argv[1], "ab") as log:
    print(subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, stdout=log, stderr=log).pid)
"""


def mps_error(device: str) -> ConfigError:
    text = (
        f"the memory of {device} cannot be in a shared pool under MPS: one server process runs the kernels of all "
        "processes, so the end of a process is not the end of its kernels"
    )
    return ConfigError(checked(text), option="pool", value="shared")


def ensure(uuid: str, device: str, capacity: int | None = None, timeout_s: float = _START_S) -> Path:
    """Starts the broker of a device unless it runs, and returns its socket. It ends ``LINGER_S`` after its clients.

    The arguments and errors are those of ``start()``. Processes that call it at the same time get the same broker.
    """
    path = discovery.socket_path(uuid)
    if not discovery.accepts(path):
        start(uuid, device, capacity, LINGER_S, timeout_s)
    return path


def start(
    uuid: str, device: str, capacity: int | None, linger_s: float | None, timeout_s: float = _START_S
) -> tuple[int, Path]:
    """Starts a broker in the background. Returns its pid and its log, when it accepts clients.

    - ``uuid``: of the device, as its driver reports it; ``device``: ``"cuda:0"``, or ``"cpu"`` for the host driver's.
    - ``capacity``: bytes; by default 90 % of a GPU, or all of the host device.
    - ``linger_s``: time without clients after which it ends. None: it runs until it is stopped.

    If another broker of the device starts at the same time, this one exits. Raises BrokerError, with the last lines of
    the broker's log, and ConfigError. A broker that accepts no clients after ``timeout_s`` is killed.
    """
    path = discovery.socket_path(uuid)
    deadline = time.monotonic() + timeout_s
    log = path.with_suffix(".log")
    try:
        began = _open_log(log)
    except OSError as error:
        text = f"the log of a broker, {log}, cannot be opened: {error.strerror}, expected a file to write"
        raise BrokerError(text, path=str(path)) from None
    try:
        pid = _spawn(uuid, device, capacity, linger_s, log)
    except (OSError, subprocess.CalledProcessError) as error:  # such as for lack of memory
        reason = error if isinstance(error, OSError) else f"{sys.executable} ended with status {error.returncode}"
        raise BrokerError(f"a broker for device {uuid} could not be started: {reason}", path=str(path)) from None
    while not discovery.accepts(path):
        failed = not procfs.is_alive(pid) and not discovery.is_locked(path)
        if failed or time.monotonic() > deadline:
            if not failed and procfs.is_alive(pid):
                os.kill(pid, signal.SIGKILL)  # not waited for: a call of the driver may keep it
            reason = "could not be started" if failed else f"does not accept clients after {timeout_s:g} s"
            text = f"a broker for device {uuid} {reason}; its log, {log}: {_tail(log, began)}"
            raise BrokerError(text, path=str(path))
        time.sleep(_POLL_S)
    return pid, log


def stop(path: Path, timeout_s: float = _STOP_S) -> int:
    """Stops the broker at this socket, and waits for its end. Returns its pid. Raises BrokerError."""
    with discovery.connect(path) as channel:
        pid = protocol.peer(channel)[0]
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return pid  # it has ended meanwhile
    try:
        # A process that accepts at the path, or has a lock there, is the broker, and not a later process with its pid.
        if discovery.listening_pid(path) == pid or discovery.is_locked(path):
            signal.pidfd_send_signal(file, signal.SIGTERM)
            poll = select.poll()
            poll.register(file, select.POLLIN)
            if not poll.poll(timeout_s * 1000):
                text = f"the broker at {path} (pid {pid}) does not end within {timeout_s:g} s of SIGTERM"
                raise BrokerError(text, path=str(path))
    finally:
        os.close(file)
    return pid


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


def _folders() -> Iterator[str]:
    """The absolute paths of ``sys.path``, without a working directory that was removed."""
    for each in sys.path:
        with suppress(FileNotFoundError):
            yield os.path.abspath(each)


def _spawn(uuid: str, device: str, capacity: int | None, linger_s: float | None, log: Path) -> int:
    environment = {**os.environ, "MEMSAVER_POOL_DIR": str(discovery.root())}
    environment.pop("MEMSAVER_POOL", None)  # a broker is not a client
    environment.pop("MEMSAVER_TRACE", None)
    if trace.active is not None:
        environment["MEMSAVER_TRACE"] = trace.active.path
    # The same modules as here, independent of the working directory.
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(_folders()))
    if device == "cpu":
        # The size identifies a device of the host driver. It is the last group of the UUID.
        environment["MEMSAVER_HOST_DEVICE"] = str(int(uuid.rpartition("-")[2], 16))
    command = [sys.executable, "-m", "memsaver", "broker", "--device", "cpu" if device == "cpu" else uuid]
    for option, value in (("--capacity", capacity), ("--linger", linger_s)):
        command += [] if value is None else [option, str(value)]
    started = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _IN_BACKGROUND, str(log), *command],
        env=environment, cwd="/", stdout=subprocess.PIPE, start_new_session=True, check=True,
    )  # fmt: skip
    return int(started.stdout)
