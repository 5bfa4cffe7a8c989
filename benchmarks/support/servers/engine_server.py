"""The HTTP server of an inference engine in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

START_S = 240.0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


class EngineServer:
    """Runs a command that serves ``port``. Its log is ``{logs}/{name}.log``. Empty variables are unset."""

    def __init__(self, name: str, command: Sequence[str], port: int, logs: str, variables: Mapping[str, str]) -> None:
        self.name, self.port = name, port
        environ = {key: value for key, value in {**os.environ, **variables}.items() if value}
        self._log = open(f"{logs}/{name}.log", "w+", errors="replace")  # noqa: SIM115  (until close())
        self._process = subprocess.Popen(
            command, env=environ, stdout=self._log, stderr=self._log, start_new_session=True
        )
        self._began = time.monotonic()

    def wait_ready(self) -> float:
        """Returns the seconds since the start."""
        while time.monotonic() < self._began + START_S:
            if self._process.poll() is not None:
                raise SystemExit(
                    f"the server {self.name} has ended ({self._process.returncode}):\n{self.log()[-6000:]}"
                )
            if self.healthy():
                return time.monotonic() - self._began
            time.sleep(0.2)
        raise SystemExit(f"the server {self.name} was not ready after {START_S} s:\n{self.log()[-6000:]}")

    def call(self, method: str, path: str, body: Any = None, timeout: float = 60.0, **query: Any) -> tuple[int, str]:
        """Status and text of the answer. Status 0: no answer."""
        url = f"http://127.0.0.1:{self.port}{path}?{urllib.parse.urlencode(query, doseq=True)}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except OSError as error:
            return 0, str(error)

    def ask(self, path: str, body: Any = None, timeout: float = 60.0, **query: Any) -> str:
        """The answer to a call that has to succeed."""
        status, text = self.call("POST", path, body, timeout, **query)
        if status != 200:
            raise SystemExit(f"{self.name}: {path} {query} answered {status}: {text[:500]}\n{self.log()[-6000:]}")
        return text

    def post(self, path: str, body: Any = None, timeout: float = 60.0, **query: Any) -> float:
        """Milliseconds of a call that has to succeed."""
        began = time.perf_counter()
        self.ask(path, body, timeout, **query)
        return (time.perf_counter() - began) * 1e3

    def healthy(self) -> bool:
        return self.call("GET", "/health", timeout=2)[0] == 200

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def close(self, wait_s: float = 10.0) -> None:
        """Ends the processes: by SIGTERM, and by SIGKILL after ``wait_s`` seconds."""
        if self._process.poll() is None:
            try:
                members = self.processes()
            except psutil.NoSuchProcess:
                members = []
            if wait_s:
                self._process.terminate()
            _, left = psutil.wait_procs(members, timeout=wait_s)
            for each in left:
                each.kill()
            psutil.wait_procs(left, timeout=10)
        self._process.wait()
        self._log.close()
