"""Measurements in processes of their own: the failure of one, or the memory that it leaves, does not affect others."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

# Children come from a server that has loaded torch and has not used CUDA: a new process costs no import.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch"])
# A process with variables of its own starts a new interpreter, since some variables act when it starts.
_FRESH = multiprocessing.get_context("spawn")
TIMEOUT_S = 300.0  # of one answer

Sample = dict[str, Any]


class Failed(Exception):
    """A process that has raised, ended or not answered. ``details``: the traceback, or the end of its output."""

    def __init__(self, text: str, details: str = "") -> None:
        super().__init__(text)
        self.details = details


def _serve(connection: Connection, log: str, make: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """In the child: one answer for each request, until the parent hangs up."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 0
    made: Any = None
    try:
        while True:
            method, given = connection.recv()
            if made is None:
                made = make(**arguments)
            found = next(made) if isinstance(made, Iterator) else made
            connection.send((True, getattr(made, method)(**given) if method else found))
    except EOFError:
        getattr(made, "close", lambda: None)()
    except BaseException as error:
        code = 1
        if "barrier" in arguments:
            arguments["barrier"].abort()  # the others need not wait
        said = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
        with suppress(OSError):
            connection.send((False, (said, traceback.format_exc())))
    os._exit(code)  # torch_memory_saver ends a process that ends in order with an error of its own


class Process:
    """A new process that calls ``make(**arguments)`` at the first request.

    ``make`` returns one answer, an iterator whose items are the answers to :meth:`ask`, or an object whose methods are
    called by ``ask("name", ...)``. ``variables``: of its environment; an empty one is unset. An argument ``barrier`` is
    aborted if the process raises.
    """

    def __init__(
        self, make: Callable[..., Any], timeout_s: float = TIMEOUT_S, variables: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:  # fmt: skip
        self._timeout_s = timeout_s
        self._log = tempfile.NamedTemporaryFile(prefix="memsaver-benchmark-")  # noqa: SIM115  (until close())
        context: Any = CONTEXT if variables is None else _FRESH
        self._connection, theirs = context.Pipe()
        given = (theirs, self._log.name, make, arguments)
        self._process = context.Process(target=_serve, args=given, daemon=variables is None)  # a daemon has no children
        with _environment(variables or {}):
            self._process.start()
        theirs.close()
        self.pid: int = self._process.pid

    def send(self, method: str = "", **given: Any) -> None:
        with suppress(OSError):  # it has ended: answer() raises
            self._connection.send((method, given))

    def answer(self) -> Any:
        """Raises Failed."""
        try:
            if self._connection.poll(self._timeout_s):
                fine, found = self._connection.recv()
                if not fine:
                    raise Failed(*found)
                return found
        except (EOFError, OSError):
            self._process.join(10)
            raise Failed(f"the process ended with status {self._process.exitcode}", self.output()) from None
        self.kill()
        raise Failed(f"no answer within {self._timeout_s:g} s", self.output())

    def ask(self, method: str = "", **given: Any) -> Any:
        """The next sample, or the result of a method. Raises Failed."""
        self.send(method, **given)
        return self.answer()

    def output(self) -> str:
        """The end of what it has printed."""
        with open(self._log.name, errors="replace") as log:
            return log.read()[-8000:]

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Waits until the process has ended, and its memory is free."""
        self._connection.close()
        self._process.join(20)
        if self._process.exitcode is None:
            self.kill()
        self._log.close()


@contextmanager
def processes(*every: Process) -> Iterator[None]:
    """Closes them at the end."""
    try:
        yield
    finally:
        for each in every:
            each.close()


def ask_all(every: Sequence[Process], method: str = "", **given: Any) -> list[Any]:
    """One answer of each, all at once. When all have answered or failed, raises an error if there is one."""
    for each in every:
        each.send(method, **given)
    found, errors = [], []
    for each in every:
        try:
            found.append(each.answer())
        except Failed as error:
            errors.append(error)
    if errors:  # a broken barrier is a consequence of another error
        raise min(errors, key=lambda error: "BrokenBarrier" in str(error))
    return found


def in_process(make: Callable[..., Any], **arguments: Any) -> Any:
    """The answer of a new process."""
    process = Process(make, **arguments)
    with processes(process):
        return process.ask()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    for name in [name for name, value in variables.items() if not value]:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
