"""Finds the brokers of this user's devices: the directory of their sockets and locks."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import socket
import stat
import time
from pathlib import Path

from memsaver.broker import protocol
from memsaver.errors import BrokerError, ConfigError, checked, is_utf8

_LONGEST_PATH = 107  # bytes in the address of a Unix socket
_POLL_S = 0.01
_LOCK_TRIES = 10
_DIGITS = 32  # of the digest of a name
_OF_JOB = "job-"
_VARIABLE = "MEMSAVER_POOL_DIR"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")  # short, since it is part of a socket's path


def job() -> str | None:
    """The name of this process's job, ``MEMSAVER_JOB``. None: it has none. Raises ConfigError for another text."""
    name = os.environ.get("MEMSAVER_JOB")
    if name is not None and not _JOB.fullmatch(name):
        raise ConfigError(
            f"MEMSAVER_JOB is {name!r}, expected a name of 1 to 32 letters, digits and '_.-', no sign first",
            option="job",
            value=name,
        )
    return name


def root() -> Path:
    """The directory of the sockets without a job: ``MEMSAVER_POOL_DIR``, else one in /tmp.

    Creates it if it does not exist. Raises ConfigError if another user could create a socket in it, or if the variable
    has a relative path: processes in different directories would start a broker each, and each would lend all.
    """
    named = os.environ.get(_VARIABLE)
    if named and not (os.path.isabs(named) and is_utf8(named)):
        text = f"{_VARIABLE} is {named!r}, expected an absolute path in UTF-8"
        raise ConfigError(text, option="pool_dir", value=named)
    return _own(Path(os.path.abspath(named or f"/tmp/memsaver-{os.getuid()}")))


def directory() -> Path:
    """The directory of the sockets for this process: of its job, if it has one. As ``root()``."""
    own = job()
    return root() if own is None else _own(root() / f"{_OF_JOB}{own}")


def elsewhere() -> list[Path]:
    """The sockets of the brokers of this user that serve other jobs, or none while this process has one."""
    own, top = directory(), root()
    paths = [path for pattern in ("*.sock", f"{_OF_JOB}*/*.sock") for path in sorted(top.glob(pattern))]
    return [path for path in paths if path.parent != own and accepts(path)]


def _own(path: Path) -> Path:
    wrong = ""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            wrong = "is no directory"
        elif status.st_uid != os.getuid():
            wrong = f"belongs to user {status.st_uid}, not {os.getuid()}"
        elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            wrong = f"can be written by others (mode {stat.S_IMODE(status.st_mode):o}, expected 700)"
    except FileExistsError:
        wrong = "is no directory"
    except OSError as error:
        wrong = f"cannot be used: {error.strerror}"
    if wrong:
        named = os.environ.get(_VARIABLE)
        source = f"; it comes from {_VARIABLE} in the environment" if named else ""
        text = f"the directory of shared pools' sockets, {path}, {wrong}{source}"
        raise ConfigError(checked(text), option="pool_dir", value=named)
    return path


def socket_path(uuid: str) -> Path:
    """The socket of a device's broker. Raises ConfigError."""
    return _checked(directory() / f"{uuid}.sock")


def common_path(name: str) -> Path:
    """The lock file of the memory that processes of a job and host have in common under a name. Raises ConfigError."""
    host = Path("/proc/sys/kernel/random/boot_id").read_text()  # several hosts may share the directory
    return directory() / f"same-{hashlib.sha256((host + name).encode()).hexdigest()[:_DIGITS]}"


def found() -> list[Path]:
    """The sockets of the brokers that accept clients now."""
    return [path for path in sorted(directory().glob("*.sock")) if accepts(path)]


def connect(path: Path) -> socket.socket:
    """Connects to a broker, without a wait. Raises BrokerError if none accepts."""
    tried = _tried(path)
    if isinstance(tried, BlockingIOError):
        text = f"the broker at {path} does not accept connections: its queue of them is full"
        raise BrokerError(text, path=str(path))
    if isinstance(tried, OSError):
        raise BrokerError(f"there is no broker at {path}: {tried.strerror}", path=str(path))
    return tried


def accepts(path: Path) -> bool:
    """Whether a broker listens at this path. It may hang, also with so many callers that its queue is full."""
    tried = _tried(path)
    if isinstance(tried, OSError):
        return isinstance(tried, BlockingIOError)
    tried.close()
    return True


def listening_pid(path: Path) -> int | None:
    """The pid of the broker that accepts connections at this path. None: none does, or its queue is full."""
    tried = _tried(path)
    if isinstance(tried, OSError):
        return None
    with tried:
        return protocol.peer(tried)[0]


def _tried(path: Path) -> socket.socket | OSError:
    """A connection, or the error. BlockingIOError: the queue is full, and connect() would wait without a bound."""
    channel = protocol.new_socket()
    channel.setblocking(False)
    try:
        channel.connect(str(path))
    except OSError as error:
        channel.close()
        return error
    channel.setblocking(True)
    return channel


class Listener:
    """A broker's listening socket, and the lock that allows one broker for each device.

    The process holds the lock until its end. Raises BrokerError if another broker holds it.
    """

    def __init__(self, uuid: str) -> None:
        self.path = socket_path(uuid)
        hidden = _checked(self.path.parent / f"new-{os.getpid()}")
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(self.path.with_suffix(".lock"), flags, 0o600)
        other = "" if _lock(self._lock) else os.read(self._lock, 32).decode(errors="replace").strip() or "?"
        if not other and _is_served(self.path):  # its lock file has been removed, as by a cleaner of /tmp
            other = str(listening_pid(self.path) or "?")
        if other:
            os.close(self._lock)
            raise BrokerError(f"device {uuid} has a broker already (pid {other}, {self.path})", path=str(self.path))
        os.ftruncate(self._lock, 0)
        with contextlib.suppress(OSError):  # a full disk: the pid is for errors alone
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        self.channel = protocol.new_socket()
        hidden.unlink(missing_ok=True)
        # Renamed when it listens, so that no caller finds a socket that refuses. Replaces that of an ended broker.
        self.channel.bind(str(hidden))
        hidden.chmod(0o600)
        self.channel.listen(4096)
        hidden.rename(self.path)
        self._inode = self.path.lstat().st_ino

    def close(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            # The files here may have been removed while it ran: then the socket is that of another broker.
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()
        self.channel.close()
        os.close(self._lock)


def _checked(path: Path) -> Path:
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise ConfigError(
            f"the path {path} has {len(os.fsencode(path))} bytes, and a socket's may have {_LONGEST_PATH}: "
            "MEMSAVER_POOL_DIR can name a shorter directory",
            option="pool_dir",
            value=str(path.parent),
        )
    return path


def _lock(file: int) -> bool:
    for _ in range(_LOCK_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(_POLL_S)  # is_locked() of another process holds it for a moment
    return False


def _is_served(path: Path) -> bool:
    for _ in range(_LOCK_TRIES):
        if not accepts(path):
            return False
        time.sleep(_POLL_S)  # the end of a killed broker closes its lock before its socket
    return True


def is_locked(path: Path) -> bool:
    """Whether a broker runs at this path, also if it does not accept clients yet."""
    try:
        file = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
