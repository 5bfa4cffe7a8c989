"""Workers of Ray as forks of one process that has imported torch, which takes 3 CPU seconds and more.

Ray starts this file in the place of its program that sets up a worker. The file hands its command line, environment and
files over to the process of `forked_workers`, and ends with the worker.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ADDRESS = "MEMSAVER_TEST_NURSERY"  # of a socket


@contextmanager
def forked_workers(*modules: str) -> Iterator[None]:
    """A cluster that starts here has such workers. `modules`: which they have imported; Ray cannot be one of them."""
    import pytest
    from ray._private import ray_constants

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv(_ADDRESS, f"{folder}/nursery")
        patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", __file__)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{folder}/nursery")
            listener.listen(100)
            file = listener.fileno()
            command = [sys.executable, "-c", f"from tests.ray_nursery import nurse; nurse({file}, {modules})"]
            root = Path(__file__).parents[1]
            nursery = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[file], cwd=root)
        with nursery:  # its end closes the pipe, which ends the process
            yield


def nurse(file: int, modules: tuple[str, ...]) -> None:
    """The process that workers are forked from."""
    import importlib
    import select
    import signal

    for module in ("memsaver", *modules, "tests.preloaded"):
        importlib.import_module(module)
    assert "ray" not in sys.modules  # its import reads the environment
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(fileno=file)
    while 0 not in select.select([0, file], [], [])[0]:
        channel, _ = listener.accept()
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _work(channel)
        channel.close()


def _work(channel: socket.socket) -> None:
    """Become the worker. The channel is open until it ends."""
    import runpy

    import memsaver

    _, files, _, _ = socket.recv_fds(channel, 1, 3)
    with channel.makefile() as lines:
        arguments, environment, folder = json.loads(lines.readline())
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    os.setpgrp()  # Ray ends the group
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    from ray._private.workers.setup_worker import RuntimeEnvContext, parser

    known, sys.argv = parser.parse_known_args(arguments)
    os.environ.update(RuntimeEnvContext.deserialize(known.serialized_runtime_env_context or "{}").env_vars)
    memsaver.config.from_environment()
    runpy.run_path(sys.argv[0], run_name="__main__")
    os._exit(0)


if __name__ == "__main__":
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[_ADDRESS])
        socket.send_fds(server, [b"-"], [0, 1, 2])
        server.sendall(json.dumps([sys.argv[1:], dict(os.environ), os.getcwd()]).encode() + b"\n")
        server.recv(1)
