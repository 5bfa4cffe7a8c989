"""vLLM's HTTP server in processes of its own: the front end, the engine, and a worker for each GPU."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from vllm_models import UNCOMPILED, prompt

EXTENSION = "vllm_updates.Updated"
PROMPTS, TOKENS = 4, 24
START_S = 240.0


class Server:
    """``vllm serve`` of the model in a directory. Its log is ``{logs}/{name}.log``.

    Captures graphs of decode steps, and compiles nothing.
    """

    def __init__(
        self,
        name: str,
        directory: str,
        logs: str,
        variables: Mapping[str, str],
        *options: str,
        share: float = 0.3,
        ranks: int = 2,
        load_format: str = "dummy",
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.name = name
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", directory,
            "--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "model",
            "--load-format", load_format, "--dtype", "bfloat16", "--seed", "0",
            "--tensor-parallel-size", str(ranks), "--gpu-memory-utilization", str(share),
            "--max-model-len", "1024", "--max-num-seqs", "8", "--attention-backend", "TRITON_ATTN",
            "--compilation-config", json.dumps(UNCOMPILED), "--worker-extension-cls", EXTENSION, *options,
        ]  # fmt: skip
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": path}
        environ = {key: value for key, value in {**os.environ, **own, **variables}.items() if value}
        self._log = open(f"{logs}/{name}.log", "w+", errors="replace")  # noqa: SIM115
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

    def post(self, path: str, body: Any = None, timeout: float = 60.0, **query: Any) -> float:
        """Milliseconds of a call that has to succeed."""
        began = time.perf_counter()
        status, text = self.call("POST", path, body, timeout, **query)
        if status != 200:
            raise SystemExit(f"{self.name}: {path} {query} answered {status}: {text[:500]}\n{self.log()[-6000:]}")
        return (time.perf_counter() - began) * 1e3

    def healthy(self) -> bool:
        return self.call("GET", "/health", timeout=2)[0] == 200

    def tokens(self) -> list[list[int]]:
        """Greedy tokens of each prompt, without cached prefixes."""
        self.post("/reset_prefix_cache")
        found = []
        for i in range(PROMPTS):  # one after the other: other batches have other near-ties
            body = {"model": "model", "prompt": prompt(i), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True}  # fmt: skip
            status, text = self.call("POST", "/v1/completions", body)
            if status != 200:
                raise SystemExit(f"{self.name}: a completion answered {status}: {text[:500]}\n{self.log()[-6000:]}")
            [choice] = json.loads(text)["choices"]
            found.append(choice["token_ids"])
            assert len(found[-1]) == TOKENS, text[:500]
        return found

    def worker(self, rank: int) -> psutil.Process:
        """The worker of a rank. vLLM names its processes."""
        for each in psutil.Process(self._process.pid).children(recursive=True):
            if f"Worker_TP{rank}" in " ".join(each.cmdline()):
                return each
        raise SystemExit(f"{self.name} has no worker of rank {rank}")

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def close(self) -> None:
        if self._process.poll() is None:
            try:
                members = self.processes()
            except psutil.NoSuchProcess:
                members = []
            self._process.terminate()
            _, left = psutil.wait_procs(members, timeout=10)
            for each in left:
                each.kill()
            psutil.wait_procs(left, timeout=10)
        self._process.wait()
        self._log.close()
