"""Clients of a shared pool that are killed while their kernels run, with a child that keeps the driver's descriptors.

Half of them fork that child before they import memsaver. Hence nothing here imports it at the top.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

FORKS = ("before the import", "after the import")
MOMENTS = ("running", "stopped", "capturing")  # the client when it is killed
WORK_S = 8.0  # of kernels queued: more than passes until the next owner has looked
CHILD_S = 180.0  # the child of a client ends after this long where no test has ended it


class Victim:
    """The test's handle of such a client. The client has CUDA and memsaver after this, and memory after begin()."""

    def __init__(self, environment: dict[str, str], nbytes: int, fork: str, moment: str) -> None:
        self.fork = fork
        self.moment = moment
        self.child: int | None = None
        code = f"from tests.gpu.victims import live; live({nbytes}, {fork!r}, {moment!r})"
        settings = {**environment, "MEMSAVER_POOL": "shared"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], env=settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the client ended with {self.process.wait()}"
        return line.strip()

    def begin(self) -> int:
        """The client allocates, forks, and queues its kernels. Returns the child's pid."""
        assert self.hear() == "ready"
        assert self.process.stdin is not None
        self.process.stdin.write("begin\n")
        self.process.stdin.flush()
        self.child = int(self.hear())
        return self.child

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end_child(self) -> None:
        child, self.child = self.child, None
        if child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.end_child()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def live(nbytes: int, fork: str, moment: str) -> None:
    """The client."""
    import torch

    torch.zeros(1, device="cuda")
    assert "memsaver" not in sys.modules
    child = sleeping_child() if fork == "before the import" else None
    from tests.gpu.pool_clients import Numbers, is_busy, write_for_long

    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    numbers = Numbers("victim", nbytes)
    counter = torch.zeros(1, device="cuda")
    side = torch.cuda.Stream()
    child = sleeping_child() if child is None else child
    write_for_long(numbers, WORK_S)
    assert is_busy()
    if moment == "capturing":
        with torch.cuda.stream(side):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            counter.add_(1)
    print(child, flush=True)
    time.sleep(CHILD_S)


def sleeping_child() -> int:
    """A child that has every descriptor of this process but its pipes, and does nothing."""
    child = os.fork()
    if not child:
        os.close(0)
        os.close(1)
        time.sleep(CHILD_S)
        os._exit(0)
    return child
