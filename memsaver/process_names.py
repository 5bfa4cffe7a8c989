"""The names of processes for readers, the same in all tables and errors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence

UNKNOWN = "?"
_LONGEST = 100  # bytes
_PYTHON = re.compile(r"(python|pypy)[0-9.]*[a-z]*")


def process_name(pid: int) -> str:
    """The name of a process for readers: ``given_name()``, else its program, else ``UNKNOWN``."""
    return given_name(pid) or _program(pid)


def given_name(pid: int) -> str | None:
    """The name by the environment and the arguments of a process. None: they cannot be read, as while it exits.

    The value of ``MEMSAVER_NAME`` with which it started, else Ray's title of an actor, else the script or module that
    Python runs, else the program. No other argument, since arguments may hold secrets.
    """
    import psutil  # which takes long to import

    unreadable = (psutil.Error, OSError, ValueError)  # ValueError: the number of no process
    with contextlib.suppress(*unreadable):
        process = psutil.Process(pid)
        with contextlib.suppress(*unreadable):  # its environment may be hidden, or gone before it exits
            if name := process.environ().get("MEMSAVER_NAME"):
                return _printable(name)
        if arguments := process.cmdline():
            title = arguments[0].split(" ")[0]
            found = title if title.startswith("ray::") else _python_program(arguments)
            return _printable(found) if found else _program(pid)
    return None


def _program(pid: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error, OSError, ValueError):
        return _printable(str(psutil.Process(pid).name()))
    return UNKNOWN


def _printable(name: str) -> str:
    """A name of bounded length that can be encoded."""
    return name.encode(errors="replace")[:_LONGEST].decode(errors="replace")


def _python_program(arguments: Sequence[str]) -> str | None:
    """The file name of the script, or the module, of a command line of Python. None: it has neither."""
    if not _PYTHON.fullmatch(os.path.basename(arguments[0])):
        return None
    rest = iter(arguments[1:])
    for each in rest:
        if not each.startswith("-") or each == "--":
            script = next(rest, "") if each == "--" else each
            return os.path.basename(script.rstrip("/")) or None
        if each == "--check-hash-based-pycs":
            next(rest, None)
        # Letters may share a word: -um is -u -m. These take the rest of the word, or the next word.
        elif not each.startswith("--") and (found := re.search("[cmWX]", each)):
            value = each[found.end() :] or next(rest, "")
            if found[0] in "cm":
                return value or None if found[0] == "m" else None
        elif each == "-":
            return None
    return None
