"""Where the brokers of this user's devices are found, and how one is started."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from memsaver.errors import BrokerError, ConfigError

LINGER_S = 30.0  # how long a broker that was started by need stays without clients
_LONGEST_PATH = 107  # bytes: what a Unix socket's address holds
_LOG_BYTES = 1 << 20  # a log is begun anew beyond that
_TAIL_BYTES = 2000
_POLL_S = 0.01
_LOCK_TRIES = 10
_starting = threading.Lock()


def directory() -> Path:
    """The directory of the sockets, made where it is missing: ``MEMSAVER_POOL_DIR``, or one in /tmp.

    Raises ConfigError where others could put a socket of theirs into it.
    """
    named = os.environ.get("MEMSAVER_POOL_DIR")
    path = Path(os.path.abspath(named or f"/tmp/memsaver-{os.getuid()}"))

    def complain(text: str) -> ConfigError:
        return ConfigError(f"the directory of shared pools' sockets, {path}, {text}", option="pool_dir", value=named)

    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except FileExistsError:
        raise complain("is no directory") from None
    except OSError as error:
        raise complain(f"cannot be used: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise complain("is no directory")
    if status.st_uid != os.getuid():
        raise complain(f"belongs to user {status.st_uid}, not {os.getuid()}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise complain(f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}, expected 700)")
    return path


def socket_path(uuid: str) -> Path:
    """The socket of a device's broker. Raises ConfigError."""
    return _checked(directory() / f"{uuid}.sock")


def found() -> list[Path]:
    """The sockets of brokers that accept clients now."""
    return [path for path in sorted(directory().glob("*.sock")) if accepts(path)]


def connect(path: Path) -> socket.socket:
    """Raises BrokerError where no broker accepts."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        channel.connect(str(path))
    except OSError as error:
        channel.close()
        raise BrokerError(f"there is no broker at {path}: {error.strerror}", path=str(path)) from None
    return channel


def accepts(path: Path) -> bool:
    try:
        connect(path).close()
    except BrokerError:
        return False
    return True


class Listener:
    """A broker's listening socket, and the lock that makes it the device's only one.

    The lock lasts as long as the process. Raises BrokerError where another broker has it.
    """

    def __init__(self, uuid: str) -> None:
        self.path = socket_path(uuid)
        self._hidden = _checked(self.path.parent / f"new-{os.getpid()}")
        self._lock = os.open(_lock_path(self.path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not _lock(self._lock):
            pid = os.read(self._lock, 32).decode(errors="replace").strip() or "?"
            os.close(self._lock)
            raise BrokerError(f"device {uuid} has a broker already (pid {pid}, {self.path})", path=str(self.path))
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._hidden.unlink(missing_ok=True)
        # Under its name only when it listens; what a dead broker left there is replaced.
        self.channel.bind(str(self._hidden))
        self._hidden.chmod(0o600)
        self.channel.listen(4096)
        self.channel.setblocking(False)
        self._hidden.rename(self.path)

    def hide(self) -> None:
        """No new client finds it."""
        with contextlib.suppress(OSError):
            self.path.rename(self._hidden)

    def show(self) -> None:
        with contextlib.suppress(OSError):
            self._hidden.rename(self.path)

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self._hidden.unlink(missing_ok=True)
        self.channel.close()
        os.close(self._lock)


def ensure(uuid: str, device: str, capacity: int | None = None, timeout_s: float = 30.0) -> Path:
    """Starts a broker of a device, unless there is one, and returns its socket.

    - ``uuid``: of the device, as its driver says it; ``device``: ``"cuda:0"``, or ``"cpu"`` for the host driver's.
    - ``capacity``: bytes, for a broker that has to be started; by default 90 % of a GPU.

    When several processes ask at once they get the same one. Raises BrokerError, with the last lines of the broker's
    log, and ConfigError.
    """
    path = socket_path(uuid)
    deadline = time.monotonic() + timeout_s
    if accepts(path):
        return path
    with _turn(path, deadline):
        if accepts(path):
            return path
        log = path.with_suffix(".log")
        began = _begin(log)
        starter = _spawn(uuid, device, capacity, log)
        while not accepts(path):
            # Ends with 0 when its broker accepts, with another status where there cannot be one.
            failed = starter.poll() not in (None, 0) and not _is_locked(path)
            if failed or time.monotonic() > deadline:
                if starter.poll() is None:
                    starter.kill()
                    starter.wait()
                said = _tail(log, began)
                why = "could not be started" if failed else f"does not accept clients after {timeout_s:g} s"
                raise BrokerError(f"a broker for device {uuid} {why}; its log, {log}: {said}", path=str(path))
            time.sleep(_POLL_S)
        starter.wait()
    return path


def _checked(path: Path) -> Path:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(
            f"the path {path} has {len(os.fsencode(path))} bytes, and a socket's may have {_LONGEST_PATH}: "
            "MEMSAVER_POOL_DIR can name a shorter directory",
            option="pool_dir",
            value=str(path.parent),
        )
    return path


def _lock_path(path: Path) -> Path:
    return path.with_suffix(".lock")


def _lock(file: int) -> bool:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(_POLL_S)  # _is_locked() of another process holds it for a moment
    return False


def _is_locked(path: Path) -> bool:
    """Whether a broker lives, accepting or not yet."""
    try:
        file = os.open(_lock_path(path), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


@contextlib.contextmanager
def _turn(path: Path, deadline: float) -> Iterator[None]:
    """Those who start a broker go one after the other.

    Not flock(): its locks belong to the open file, which a forked child would hold on to.
    """
    if not _starting.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise BrokerError(f"another thread is still starting a broker at {path}", path=str(path))
    try:
        file = os.open(path.with_suffix(".start"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            while True:
                try:
                    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        text = f"another process is still starting a broker at {path}"
                        raise BrokerError(text, path=str(path)) from None
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(file)
    finally:
        _starting.release()


def _begin(log: Path) -> int:
    """Where in the log the next broker's words begin."""
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
    environment = {**os.environ, "MEMSAVER_POOL_DIR": str(log.parent)}
    environment.pop("MEMSAVER_POOL", None)  # a broker is nobody's client
    # Finds what this process finds, wherever it stands.
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(map(os.path.abspath, sys.path)))
    if device == "cpu":
        environment["MEMSAVER_HOST_DEVICE"] = uuid.rpartition("-")[2]  # a device of the host driver is its size
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
