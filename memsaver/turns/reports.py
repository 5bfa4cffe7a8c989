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

from memsaver import _results, config
from memsaver._results import TransitionRecord, daemon
from memsaver.errors import Error

log = logging.getLogger("memsaver")

_T = TypeVar("_T")
_PARTS_S = 4.0  # bound of the wait for the parts: a process looks for requests once a second
_POLL_S = 0.05
_KEPT = 50  # reports in the directory
_LAST = 20  # transitions in a part that have ended
_LONGEST = 200_000  # characters of a part
_WHY = "it starts, is stopped, has ended, or a native call holds the GIL"  # a process sends no part


def folder() -> Path:
    """The directory of reports, which need not exist."""
    chosen = config.options().get("report_dir")
    return Path(chosen) if chosen is not None else Path(tempfile.gettempdir()) / f"memsaver-reports-{os.getuid()}"


def written() -> list[Path]:
    """The reports in the directory, the newest last."""
    found = []
    for path in folder().glob("turn-*.txt"):
        with contextlib.suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found)]


def write(text: str) -> Path:
    """Writes a report to a file of its own, in a directory of this user alone. Removes the oldest files.

    Raises memsaver.Error.
    """
    into = folder()
    try:
        into.mkdir(mode=0o700, parents=config.options().get("report_dir") is not None, exist_ok=True)
        status = into.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise Error(f"{into} is not a directory that this user alone can write to, expected one for reports")
        name = f"turn-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-"
        file, path = tempfile.mkstemp(".txt", name, into)
        try:
            with open(file, "w", encoding="utf-8", errors="replace") as opened:
                opened.write(text)
        except OSError:
            os.unlink(path)  # else the doctor would show a part of a report
            raise
        # If the clock was put back, this report is not the last one by name.
        others = [each for each in written() if each != Path(path)]
        for each in others[: 1 - _KEPT]:
            each.unlink(missing_ok=True)  # another process removes files too
    except OSError as error:
        raise Error(f"no report could be written to {into}: {error.strerror}") from error
    return Path(path)


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
            daemon(partial(self._send, json.loads(request)), "memsaver report")

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
    none = {"doing": f"has sent no part within {time.monotonic() - began:.1f} s", "text": _WHY}
    for each in names:
        sent = parts.get(each, none)
        lines += ["", f"== {each} ==", f"it {sent['doing']}", sent["text"]]
    doing = {each: sent["doing"] for each, sent in parts.items()}
    try:
        return str(write("\n".join([*lines, ""]))), doing
    except Error as error:
        log.error("the report of a turn that exceeded its deadline is lost: %s", error)
        return None, doing


def part() -> str:
    """The part of this process: its transitions under way, the stacks of its threads, and its last transitions.

    Raises nothing: an error takes the place of a part that cannot be read.
    """
    try:
        found = _results.history()
        running = [each for each in found if each.outcome == "running"]
        ended = [each for each in found if each.outcome != "running"][-_LAST:]
        lines = [f"pid {os.getpid()} on {socket.gethostname()}", "transitions under way:"]
        lines += [f"  {_line(each)}" for each in running] or ["  none"]
        lines += ["threads:", *_stacks()]
        lines += [f"last {len(ended)} transitions:", *(f"  {_line(each)}" for each in ended)]
        return "\n".join(lines)[:_LONGEST]
    except Exception as error:  # a report is written when something is wrong already
        return f"no part could be made: {type(error).__name__}: {error}"


def described(call: str | None) -> str:
    """A call of this process, None if there is none, and the stages of its transitions."""
    stages = "; ".join(_stage(each) for each in _results.history() if each.outcome == "running")
    if call is None:
        return f"answers: {stages or 'no transition is under way'}"
    return f"{call}; {stages}" if stages else call


def call_of(member: object, methods: Collection[str]) -> str | None:
    """The call of one of these methods of a member that is under way, and the place that it has reached, in words.

    None: no thread is in such a call. A coroutine that waits is in no thread.
    """
    for ident, innermost in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        for frame in [each for each, _ in traceback.walk_stack(innermost)][::-1]:
            if frame.f_code.co_name in methods and frame.f_locals.get("self") is member:
                code = innermost.f_code
                place = f"{code.co_name}() at {os.path.basename(code.co_filename)}:{innermost.f_lineno}"
                return f"is in {frame.f_code.co_name}(): {place}"
    return None


def _moves(record: TransitionRecord, form: str, joint: str) -> str:
    moves = (("pause", record.pause), ("resume", record.resume))
    return joint.join(form.format(verb, ", ".join(map(repr, tags))) for verb, tags in moves if tags)


def _stage(record: TransitionRecord) -> str:
    moves = _moves(record, "the {} of {}", " with ")
    if not record.stages:
        return f"{moves} has not begun"
    last = record.stages[-1]
    guest = f" of {last.guest!r}" if last.guest is not None else ""
    return f"{moves} has been in the stage {last.name!r}{guest} for {last.seconds:.1f} s"


def _line(record: TransitionRecord) -> str:
    began = time.strftime("%H:%M:%S", time.localtime(record.began))
    error = f": {record.error}" if record.error is not None else ""
    took = f"{record.outcome} at {began} in {record.seconds:.3f} s in thread {record.thread!r}{error}"
    stages = ", ".join(
        f"{each.name}{'' if each.guest is None else f' ({each.guest})'} {each.seconds:.3f} s" for each in record.stages
    )
    return f"{record.number}: {_moves(record, '{} {}', '; ')}: {took}; stages: {stages}"


def _stacks() -> list[str]:
    names = {each.ident: each.name for each in threading.enumerate()}
    main = threading.main_thread().ident
    lines: list[str] = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda each: each[0] != main):
        if ident != threading.get_ident():
            lines.append(f"  thread {names.get(ident, '?')!r}:")
            lines += [f"    {line}" for each in traceback.format_stack(frame) for line in each.rstrip().splitlines()]
    return lines
