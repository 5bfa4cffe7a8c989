"""Measurements in new processes: a failure or a rest of one does not affect the others."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# Children come from a server that has loaded torch and never used CUDA: a new process costs no import.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch"])

Sample = dict[str, Any]


def search_path() -> str:
    """A value for PYTHONPATH: with it another program's process finds the modules of this package, too."""
    benchmarks = Path(__file__).resolve().parent.parent
    return os.pathsep.join([str(benchmarks), *filter(None, [os.environ.get("PYTHONPATH")])])


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1].strip()


def _serve(connection: Connection, log: str, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """In the child: one reply for each question, until the parent hangs up."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    replies: Iterator[Sample] | None = None
    code = 0
    try:
        while connection.recv():
            if replies is None:
                made = function(**arguments)
                replies = iter([made]) if isinstance(made, dict) else made
            connection.send(next(replies))
    except EOFError:
        pass
    except BaseException as error:
        traceback.print_exc()
        code = 1
        said = last_line("".join(traceback.format_exception_only(error)))
        connection.send({"error": said, "traceback": traceback.format_exc()})
    connection.close()
    os._exit(code)  # torch_memory_saver ends a process that goes down in order with an error of its own


class Process:
    """Runs ``function(**arguments)`` in a new process: it returns one sample, or yields one for each :meth:`ask`.

    A sample of a failure has its last line as ``"error"``, and in full a ``"traceback"`` where it was an exception.
    """

    def __init__(self, function: Callable[..., Any], timeout_s: float = 180.0, **arguments: Any) -> None:
        self._timeout_s = timeout_s
        self._log = tempfile.NamedTemporaryFile(prefix="memsaver-benchmark-")  # noqa: SIM115  (until close())
        self._connection, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_serve, args=(theirs, self._log.name, function, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self) -> Sample:
        with suppress(OSError):  # it has ended: its exit status follows
            self._connection.send(True)
        try:
            if self._connection.poll(self._timeout_s):
                sample: Sample = self._connection.recv()
                return sample
        except (EOFError, OSError):
            self._process.join(10)
            with open(self._log.name, errors="replace") as log:
                return {"error": f"ended with code {self._process.exitcode}: {last_line(log.read())}"}
        self._process.kill()
        return {"error": f"no answer within {self._timeout_s:.0f} s"}

    def close(self) -> None:
        """Waits for the process to go, and its memory with it."""
        self._connection.close()
        self._process.join(20)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._log.close()


def side_by_side(processes: Sequence[Process], failed: Callable[[], object] = lambda: None) -> list[Sample]:
    """One sample from each, all at once; ``failed`` is called when one has an error, to end the waits of others."""

    def ask(process: Process) -> Sample:
        sample = process.ask()
        if "error" in sample:
            failed()
        return sample

    with ThreadPoolExecutor(len(processes)) as threads:
        return list(threads.map(ask, processes))


def ask_all(processes: Sequence[Process]) -> list[Sample]:
    """One sample from each, all at once. Ends the program at an error."""
    found = side_by_side(processes)
    for each in found:
        if "error" in each:
            raise SystemExit(f"{each['error']}\n{each.get('traceback', '')}")
    return found


def in_process(function: Callable[..., Any], **arguments: Any) -> Sample:
    """One sample from a new process."""
    process = Process(function, **arguments)
    try:
        return process.ask()
    finally:
        process.close()
