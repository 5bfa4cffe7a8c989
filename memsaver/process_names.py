"""The names of processes for readers, the same in all tables and errors."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence

UNKNOWN = "?"
_LONGEST = 100  # bytes
_PYTHON = re.compile(r"(python|pypy)[0-9.]*[a-z]*")
_FLAGS = re.compile(r"-(?!$)[bBdEiIOPqsSuvx]*(m?)")  # options of Python without values, and that of a module


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
                return printable(name)
        if arguments := process.cmdline():
            title = arguments[0].split(" ")[0]
            found = title if title.startswith("ray::") else _python_program(arguments)
            return printable(found) if found else _program(pid)
    return None


def _program(pid: int) -> str:
    import psutil

    with contextlib.suppress(psutil.Error, OSError, ValueError):
        return printable(str(psutil.Process(pid).name()))
    return UNKNOWN


def printable(name: str) -> str:
    """A name of bounded length that can be encoded, and that fits into a line."""
    text = name.encode(errors="replace")[:_LONGEST].decode(errors="replace")
    return "".join(each if each.isprintable() else "?" for each in text)


def _python_program(arguments: Sequence[str]) -> str | None:
    """The file name of the script, or the module, of a command line of Python. None: there is none, or -c, -W or -X."""
    if not _PYTHON.fullmatch(os.path.basename(arguments[0])):
        return None
    rest = iter(arguments[1:])
    for each in rest:
        if not each.startswith("-"):
            return os.path.basename(each.rstrip("/")) or None
        if (flags := _FLAGS.fullmatch(each)) is None:
            return None
        if flags[1]:
            return next(rest, None)
    return None
