"""SGLang's HTTP server in processes of its own: the front end, a scheduler for each GPU, and the detokenizer."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence

import psutil

from support.servers.engine_server import EngineServer, free_port
from support.servers.vllm_models import prompt

PROMPTS, TOKENS = 3, 16
GRAPHS = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
"""Variables with which a release of the tag cuda_graph releases the memory of graphs."""

WAYS = {
    "tms": {"MEMSAVER_DROP_IN": ""},
    "tms, retained": {"MEMSAVER_DROP_IN": "", "TMS_RETAIN_CPU_BACKUP": "1"},
    "memsaver": {"MEMSAVER_DROP_IN": "tms"},
}
"""Variables of torch_memory_saver, of the same with host memory that is kept, and of the drop-in."""

FLUSH_S = 10.0
COMPILE_S = 180.0  # of a first generation


class Server(EngineServer):
    """``sglang.launch_server`` of the model in a directory. Captures graphs of decode steps."""

    def __init__(
        self,
        name: str,
        directory: str,
        logs: str,
        variables: Mapping[str, str],
        *options: str,
        kv_tokens: int,
        ranks: int = 1,
        load_format: str = "dummy",
    ) -> None:
        port = free_port()
        command = [
            sys.executable, "-m", "sglang.launch_server", "--model-path", directory, "--host", "127.0.0.1",
            "--port", str(port), "--nccl-port", str(free_port()), "--load-format", load_format,
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
        own = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
        super().__init__(name, command, port, logs, {**own, **variables})
        self.ranks = ranks

    def release(self, *tags: str) -> float:
        """Milliseconds of the call. No tag: all."""
        return self.post("/release_memory_occupation", {"tags": tags or None})

    def resume(self, *tags: str) -> float:
        """Milliseconds of the call. No tag: all."""
        return self.post("/resume_memory_occupation", {"tags": tags or None})

    def update(self, payloads: Sequence[str]) -> float:
        """Writes weights: one payload of ``update_weights_from_tensor`` for each rank. Milliseconds of the call."""
        return self.post(
            "/update_weights_from_tensor", {"serialized_named_tensors": list(payloads), "flush_cache": False}
        )

    def flush(self) -> None:
        """Empties the cache of prefixes. A scheduler that is not idle yet refuses this, and does not survive a release.

        Raises:
            SystemExit: The scheduler is not idle after some seconds.
        """
        deadline = time.monotonic() + FLUSH_S
        while self.call("POST", "/flush_cache")[0] != 200:
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.name} did not become idle:\n{self.log()[-6000:]}")
            time.sleep(0.02)

    def tokens(self) -> list[list[int]]:
        """Greedy tokens of each prompt, without cached prefixes."""
        self.flush()
        found = []
        for i in range(PROMPTS):  # one after the other: other batches have other near-ties
            sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
            body = {"input_ids": prompt(i), "sampling_params": sampling}
            answer = json.loads(self.ask("/generate", body, COMPILE_S))
            found.append(answer["output_ids"])
            assert len(found[-1]) == TOKENS, answer
        self.flush()
        return found

    def worker(self, rank: int) -> psutil.Process:
        """The scheduler of a rank. SGLang names its processes."""
        name = "sglang::scheduler" + (f"_TP{rank}" if self.ranks > 1 else "")
        for each in self.processes():
            if name in " ".join(each.cmdline()):
                return each
        raise SystemExit(f"{self.name} has no scheduler of rank {rank}")

    def preloaded(self) -> str:
        """Whose library the scheduler of rank 0 has loaded: ``"tms"``, ``"memsaver"`` or ``""``."""
        paths = {each.path for each in self.worker(0).memory_maps()}
        found = {
            "tms": any("torch_memory_saver_hook_mode_preload" in path and "/memsaver/" not in path for path in paths),
            "memsaver": any("/memsaver/drop_in/tms/" in path for path in paths),
        }
        return ", ".join(name for name, loaded in found.items() if loaded)
