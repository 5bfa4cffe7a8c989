"""vLLM's HTTP server in processes of its own: the front end, the engine, and a worker for each GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import psutil

from support.processes import search_path
from support.servers.engine_server import EngineServer, free_port
from support.servers.vllm_models import UNCOMPILED, prompt

EXTENSION = "support.servers.vllm_updates.Updated"
PROMPTS, TOKENS = 4, 24


class Server(EngineServer):
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
        port = free_port()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", directory,
            "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model",
            "--load-format", load_format, "--dtype", "bfloat16", "--seed", "0",
            "--tensor-parallel-size", str(ranks), "--gpu-memory-utilization", str(share),
            "--max-model-len", "1024", "--max-num-seqs", "8", "--attention-backend", "TRITON_ATTN",
            "--compilation-config", json.dumps(UNCOMPILED), "--worker-extension-cls", EXTENSION, *options,
        ]  # fmt: skip
        own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "PYTHONPATH": search_path()}
        super().__init__(name, command, port, logs, {**own, **variables})

    def tokens(self) -> list[list[int]]:
        """Greedy tokens of each prompt, without cached prefixes."""
        self.post("/reset_prefix_cache")
        found = []
        for i in range(PROMPTS):  # one after the other: other batches have other near-ties
            body = {"model": "model", "prompt": prompt(i), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
                    "return_token_ids": True}  # fmt: skip
            text = self.ask("/v1/completions", body)
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
