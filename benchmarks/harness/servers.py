"""vLLM and SGLang as HTTP servers in processes of their own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.models import UNCOMPILED, prompt
from benchmarks.harness.processes import Failed

START_S = 240.0
PROMPTS, TOKENS = 3, 16


class Server:
    """A command that serves ``port``, with a log of its own. Empty variables are unset. Calls raise Failed.

    ``RELEASE`` and ``RESUME``: paths and bodies. ``WORKER``: the name of the process of a rank, with the rank.
    """

    RELEASE: tuple[str, Any]
    RESUME: tuple[str, Any]
    WORKER: str

    def __init__(self, name: str, command: Sequence[str], port: int, logs: str, variables: Mapping[str, str]) -> None:
        self.name, self.port = name, port
        environ = {key: value for key, value in {**os.environ, **variables}.items() if value}
        self._log = Path(logs, f"{name.replace(', ', '-').replace(' ', '-')}.log")
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, env=environ, stdout=log, stderr=log, start_new_session=True)
        self._began = time.monotonic()

    def release(self) -> float:
        """Releases all that the server can. Milliseconds."""
        return self.post(*self.RELEASE)

    def resume(self) -> float:
        return self.post(*self.RESUME)

    def begin_resume(self, timeout: float) -> tuple[int, str]:
        """Status and text of a resume that may fail."""
        return self.call("POST", *self.RESUME, timeout)

    def tokens(self) -> list[list[int]]:
        """Greedy tokens of each prompt, without cached prefixes. One after the other: batches have other near-ties."""
        return [self._generate(prompt(number)) for number in range(PROMPTS)]

    def _generate(self, tokens: list[int]) -> list[int]:
        raise NotImplementedError

    def wait_ready(self) -> float:
        """Returns the seconds since the start."""
        while time.monotonic() < self._began + START_S:
            if self._process.poll() is not None:
                raise Failed(f"the server {self.name} ended with {self._process.returncode}", self.log()[-6000:])
            if self.healthy():
                return time.monotonic() - self._began
            time.sleep(0.2)
        raise Failed(f"the server {self.name} was not ready after {START_S:g} s", self.log()[-6000:])

    def call(self, method: str, path: str, body: Any = None, timeout: float = 60.0) -> tuple[int, str]:
        """Status and text of the answer. Status 0: no answer."""
        url = f"http://127.0.0.1:{self.port}{path}"
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except OSError as error:
            return 0, str(error)

    def ask(self, path: str, body: Any = None, timeout: float = 60.0) -> str:
        """The answer to a call that has to succeed."""
        code, text = self.call("POST", path, body, timeout)
        if code != 200:
            raise Failed(f"{self.name}: {path} answered {code}: {text[:500]}", self.log()[-6000:])
        return text

    def post(self, path: str, body: Any = None, timeout: float = 60.0) -> float:
        """Milliseconds of a call that has to succeed."""
        began = time.perf_counter()
        self.ask(path, body, timeout)
        return (time.perf_counter() - began) * 1e3

    def healthy(self) -> bool:
        return self.call("GET", "/health", timeout=2)[0] == 200

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self._process.pid)
        return [own, *own.children(recursive=True)]

    def worker(self, rank: int) -> psutil.Process:
        for each in self.processes():
            if self.WORKER.format(rank) in " ".join(each.cmdline()):
                return each
        raise Failed(f"{self.name} has no worker of rank {rank}", self.log()[-6000:])

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        with suppress(psutil.NoSuchProcess):
            members = self.processes()
            for each in members:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(members, timeout=10)
        self._process.wait()


class VllmServer(Server):
    """``vllm serve`` of a model's directory: graphs of decode steps, nothing compiled, a KV cache of a fixed size."""

    RELEASE, RESUME, WORKER = ("/sleep?level=1", None), ("/wake_up", None), "Worker_TP{}"

    def __init__(
        self, name: str, directory: str, logs: str, variables: Mapping[str, str], kv_bytes: int, ranks: int
    ) -> None:
        port = free_port()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", directory,
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model",
            "--load-format", "dummy", "--dtype", "bfloat16", "--seed", "0", "--enable-sleep-mode",
            "--tensor-parallel-size", str(ranks), "--gpu-memory-utilization", "0.3",
            "--kv-cache-memory-bytes", str(kv_bytes), "--max-model-len", "1024", "--max-num-seqs", "8",
            "--attention-backend", "TRITON_ATTN", "--compilation-config", json.dumps(UNCOMPILED),
        ]  # fmt: skip
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        own["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # starts sooner
        super().__init__(name, command, port, logs, {**own, **variables})

    def _generate(self, tokens: list[int]) -> list[int]:
        self.post("/reset_prefix_cache")
        body = {"model": "model", "prompt": tokens, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        [choice] = json.loads(self.ask("/v1/completions", body))["choices"]
        found: list[int] = choice["token_ids"]
        return found


class SglangServer(Server):
    """``sglang.launch_server`` of the model in a directory. Captures graphs of decode steps."""

    RELEASE, RESUME = ("/release_memory_occupation", {"tags": None}), ("/resume_memory_occupation", {"tags": None})

    def __init__(
        self, name: str, directory: str, logs: str, variables: Mapping[str, str], kv_tokens: int, ranks: int,
        *options: str,
    ) -> None:  # fmt: skip
        port = free_port()
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", directory, "--host", "127.0.0.1",
            "--port", str(port), "--nccl-port", str(free_port()), "--load-format", "dummy",
            "--dtype", "bfloat16", "--random-seed", "0", "--tp-size", str(ranks),
            # The number of tokens decides the size of the KV cache. The share is too large on purpose.
            "--max-total-tokens", str(kv_tokens), "--mem-fraction-static", "0.85",
            "--context-length", "2048", "--max-running-requests", "8",
            "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
            "--cuda-graph-bs-decode", "1", "2", "4", "8", "--cuda-graph-backend-prefill", "disabled",
            "--skip-tokenizer-init", "--skip-server-warmup", "--disable-flashinfer-autotune",
            "--disable-custom-all-reduce", *options,
        ]  # fmt: skip
        # A check of the health that generates would need the memory.
        super().__init__(name, command, port, logs, {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false", **variables})
        self.WORKER = "sglang::scheduler" + ("_TP{}" if ranks > 1 else "")

    def release(self) -> float:
        self.flush()  # a scheduler that is not idle does not survive a release
        return super().release()

    def _generate(self, tokens: list[int]) -> list[int]:
        self.flush()
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        answer = self.ask("/generate", {"input_ids": tokens, "sampling_params": sampling}, 180.0)  # the first compiles
        found: list[int] = json.loads(answer)["output_ids"]
        return found

    def flush(self) -> None:
        """Empties the cache of prefixes, which a scheduler refuses until it is idle."""
        deadline = time.monotonic() + 10
        while self.call("POST", "/flush_cache")[0] != 200:
            if time.monotonic() > deadline:
                raise Failed(f"{self.name} did not become idle", self.log()[-6000:])
            time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
