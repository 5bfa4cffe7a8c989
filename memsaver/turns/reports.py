"""Reports of a turn that exceeds its deadline: the parts of all processes, and the file with them.

A thread of each process looks for requests in a key-value store, so its part arrives while its main thread hangs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import stat
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from memsaver import _core, _results, config, ledger
from memsaver._results import TransitionRecord, daemon
from memsaver.errors import Error

log = logging.getLogger("memsaver")

_T = TypeVar("_T")
_PARTS_S = 4.0  # bound of the wait for the parts: a process looks for requests once a second
_POLL_S = 0.05
_KEPT = 50  # reports in the directory
_LAST = 20  # transitions in a part that have ended
_LONGEST = 200_000  # characters of a part
_files = threading.Lock()


def directory() -> Path:
    """The directory of the reports of this user. Made with mode 0700 if it is missing.

    Raises memsaver.Error if it cannot be made, or if others can write to it.
    """
    chosen = config.report_dir()
    path = Path(chosen) if chosen is not None else Path(tempfile.gettempdir()) / f"memsaver-reports-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=chosen is not None, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise Error(f"the directory {path} for reports cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise Error(f"{path} is not a directory that this user alone can write to, expected one for reports")
    return path


def write(text: str) -> Path:
    """Writes a report to a file of its own. Removes the oldest files. Raises memsaver.Error."""
    with _files:
        folder = directory()
        name = f"turn-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        try:
            for number in range(1000):
                path = folder / f"{name}-{number}.txt"
                with contextlib.suppress(FileExistsError):
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                    break
            else:
                raise Error(f"there are 1,000 files {name}-*.txt in {folder}, expected fewer reports in a second")
            with open(file, "w", encoding="utf-8", errors="replace") as opened:
                opened.write(text)
            _remove_oldest(folder)
        except OSError as error:
            raise Error(f"no report could be written to {folder}: {error.strerror}") from error
        return path


class Mail(Protocol):
    """A key-value store that all processes of a group reach. Its methods may raise any error."""

    def set(self, key: str, value: str) -> None: ...

    def get_all(self, keys: Sequence[str]) -> Sequence[str | bytes | None]: ...


class Responder:
    """Answers requests for the part of this process.

    ``call``: returns the present call of the process in words, None if there is none.
    """

    def __init__(self, mail: Mail, name: str, call: Callable[[], str | None]) -> None:
        self._mail, self._name, self._call = mail, name, call
        self._seen: str | bytes | None = None

    def look(self) -> None:
        """If there is a new request, a thread sends the part. This one may have heartbeats to send."""
        (request,) = self._mail.get_all(["report"])
        if request is not None and request != self._seen:
            self._seen = request
            try:
                daemon(partial(self._send, json.loads(request)), "memsaver report")
            except RuntimeError as error:
                log.warning("no part of a report was sent: %s", error)

    def _send(self, request: str) -> None:
        sent = {"request": request, "doing": described(self._call()), "text": part()}
        try:
            self._mail.set(f"part/{self._name}", json.dumps(sent))
        except Exception as error:  # of the store
            log.warning("no part of a report was sent: %s", error)


def collect(
    mail: Mail, title: str, author: str, names: Mapping[_T, str], own: Sequence[str] = ()
) -> tuple[str | None, dict[_T, str]]:
    """Asks processes for their parts, and writes the file.

    ``names``: by process, its name in the store. ``own``: lines before the parts.

    Returns:
        The path of the file, or None if it cannot be written, which is logged. And by process with a part, its call.
    """
    parts: dict[_T, dict[str, str]] = {}
    began, request = time.monotonic(), f"{author} {time.time_ns()}"
    try:
        if names:
            mail.set("report", json.dumps(request))
        while len(parts) < len(names) and time.monotonic() < began + _PARTS_S:
            time.sleep(_POLL_S)
            for each, found in zip(names, mail.get_all([f"part/{name}" for name in names.values()])):
                sent = json.loads(found) if found is not None else {}
                if sent.get("request") == request:
                    parts[each] = sent
    except Exception as error:  # of the store: the report has the parts so far
        log.warning("no more parts of a report came: %s: %s", type(error).__name__, error)
    lines = [title, f"written at {time.strftime('%Y-%m-%d %H:%M:%S %z')} by {author}", *own]
    for each in names:
        lines += ["", f"== {each} =="]
        if each in parts:
            lines += [f"it {parts[each]['doing']}", parts[each]["text"]]
        else:
            why = "it starts, is stopped, has ended, or a native call holds the GIL"
            lines.append(f"it has sent no part within {time.monotonic() - began:.1f} s: {why}")
    doing = {each: sent["doing"] for each, sent in parts.items()}
    try:
        return str(write("\n".join([*lines, ""]))), doing
    except Error as error:
        log.error("the report of a turn that exceeded its deadline is lost: %s", error)
        return None, doing


def _remove_oldest(folder: Path) -> None:
    ages: list[tuple[float, Path]] = []
    for each in folder.glob("turn-*.txt"):
        with contextlib.suppress(FileNotFoundError):  # another process removes files too
            ages.append((each.stat().st_mtime, each))
    for _, each in sorted(ages)[:-_KEPT]:
        each.unlink(missing_ok=True)


def part() -> str:
    """The part of this process: its transitions under way, the stacks of its threads, and its last transitions.

    Raises nothing: an error takes the place of a part that cannot be read.
    """
    try:
        return _part()
    except Exception as error:  # a report is written when something is wrong already
        return f"no part could be made: {type(error).__name__}: {error}"


def _part() -> str:
    found = _results.history()
    running = [each for each in found if each.outcome == "running"]
    ended = [each for each in found if each.outcome != "running"][-_LAST:]
    lines = [f"pid {os.getpid()} on {socket.gethostname()}", "transitions under way:"]
    lines += [f"  {_line(each)}" for each in running] or ["  none"]
    if any(_waits_for_memory(each) for each in running):
        lines += ["memory:", *(f"  {each}" for each in _holders())]
    lines += ["threads:", *_stacks()]
    lines += [f"last {len(ended)} transitions:", *(f"  {_line(each)}" for each in ended)]
    return "\n".join(lines)[:_LONGEST]


def stage() -> str | None:
    """The stages of the transitions under way, in words. None: there is none."""
    running = [each for each in _results.history() if each.outcome == "running"]
    return "; ".join(map(_stage, running)) or None


def described(call: str | None) -> str:
    """A call of this process, None if there is none, and the stages of its transitions."""
    stages = stage()
    if call is None:
        return f"answers: {stages or 'no transition is under way'}"
    return call if stages is None else f"{call}; {stages}"


def call_of(member: object, methods: Collection[str]) -> str | None:
    """The call of one of these methods of a member that is under way, and the place that it has reached, in words.

    None: no thread is in such a call. A coroutine that waits is in no thread.
    """
    for ident, innermost in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        for frame in [each for each, _ in traceback.walk_stack(innermost)][::-1]:
            if frame.f_code.co_name not in methods:
                continue
            caller = frame.f_locals.get("self")
            if caller is member or getattr(caller, "actor", None) is member:  # that of an async member has a thread
                code = innermost.f_code
                place = f"{code.co_name}() at {os.path.basename(code.co_filename)}:{innermost.f_lineno}"
                return f"is in {frame.f_code.co_name}(): {place}"
    return None


def _stage(record: TransitionRecord) -> str:
    what = [
        f"the {verb} of {', '.join(map(repr, tags))}"
        for verb, tags in (("pause", record.pause), ("resume", record.resume))
        if tags
    ]
    if not record.stages:
        return f"{' with '.join(what)} has not begun"
    last = record.stages[-1]
    guest = f" of {last.guest!r}" if last.guest is not None else ""
    return f"{' with '.join(what)} is in the stage {last.name!r}{guest} since {last.seconds:.1f} s"


def _line(record: TransitionRecord) -> str:
    stages = ", ".join(
        f"{each.name}{'' if each.guest is None else f' ({each.guest})'} {each.seconds:.3f} s" for each in record.stages
    )
    began = time.strftime("%H:%M:%S", time.localtime(record.began))
    if record.outcome == "running":
        return f"{record.number}: {_stage(record)}; began at {began} in thread {record.thread!r}; stages: {stages}"
    tags = [
        f"{verb} {', '.join(map(repr, given))}"
        for verb, given in (("pause", record.pause), ("resume", record.resume))
        if given
    ]
    error = f": {record.error}" if record.error is not None else ""
    took = f"{record.outcome} at {began} in {record.seconds:.3f} s"
    return f"{record.number}: {'; '.join(tags)}: {took}{error}; stages: {stages}"


def _waits_for_memory(record: TransitionRecord) -> bool:
    return bool(record.stages) and record.stages[-1].name == "memory"


def _holders() -> list[str]:
    """The ledger of each device."""
    lines: list[str] = []
    for device in _core.device_names():
        try:
            lines += [f"{device}: {line}" for line in ledger.lines(ledger.read(device))]
        except Exception as error:  # such as a call of the driver that fails
            lines.append(f"{device}: {type(error).__name__}: {error}")
    return lines


def _stacks() -> list[str]:
    names = {each.ident: each.name for each in threading.enumerate()}
    main = threading.main_thread().ident
    lines: list[str] = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] != main):
        if ident == threading.get_ident():
            continue
        lines.append(f"  thread {names.get(ident, '?')!r}:")
        lines += [f"    {line}" for each in traceback.format_stack(frame) for line in each.rstrip().splitlines()]
    return lines
