"""The two loops of docs/your-loop.md, with one rank and a package in the place of vLLM, on the host driver."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest

from tests.drop_in import fake_vllm
from tests.examples.model_support import save_model, save_tokenizer
from tests.nursery import Fork
from tests.support import ROOT, fresh_device

if importlib.util.find_spec("transformers") is None:  # an import of it takes long, and is not needed here
    pytest.skip("its model is one of transformers", allow_module_level=True)
PAGE = (ROOT / "docs/your-loop.md").read_text()
# Arguments, attributes and what is awake are as in vLLM; the model is transformers'.
VLLM = """
import gc
from contextlib import nullcontext
from importlib.metadata import entry_points
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

for each in entry_points(group="vllm.general_plugins"):
    each.load()()
from vllm.device_allocator.cumem import CuMemAllocator

torch.cuda.set_device = lambda device: None


class SamplingParams(SimpleNamespace):
    def __init__(self, n=1, max_tokens=16):
        super().__init__(n=n, max_tokens=max_tokens)


class LLM:
    def __init__(self, model, *, distributed_executor_backend, enable_sleep_mode, gpu_memory_utilization, seed):
        assert distributed_executor_backend == "external_launcher" and enable_sleep_mode
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).requires_grad_(False)
        self.model.load_weights = self.load_weights
        self.awake, self.random = {"weights", "kv_cache"}, torch.Generator().manual_seed(seed)
        with CuMemAllocator.get_instance().use_memory_pool("weights") or nullcontext():
            for each in self.model.parameters():
                each.data = torch.zeros_like(each).copy_(each)
        with CuMemAllocator.get_instance().use_memory_pool("kv_cache") or nullcontext():
            self.cache = torch.zeros(1 << 20)
        gc.freeze()  # else the collections of each sleep read the million objects of the libraries

    def sleep(self, level=1):
        CuMemAllocator.get_instance().sleep(("weights",) if level == 1 else ())
        self.awake.clear()

    def wake_up(self, tags=None):
        CuMemAllocator.get_instance().wake_up(tags)
        self.awake |= set(tags or ("weights", "kv_cache"))

    def apply_model(self, function):
        assert "weights" in self.awake
        return [function(self.model)]

    def load_weights(self, weights):
        own = dict(self.model.named_parameters())
        for name, weight in weights:
            own.pop(name).copy_(weight)
        assert not own

    def generate(self, prompts, sampling_params, *, use_tqdm):
        assert self.awake == {"weights", "kv_cache"}
        self.cache.fill_(1.0)
        found = []
        for prompt in prompts:
            first = self.tokenizer(prompt, add_special_tokens=False).input_ids
            ids = torch.tensor([first] * sampling_params.n)
            for _ in range(min(sampling_params.max_tokens, 6)):
                shares = self.model(ids).logits[:, -1].float().softmax(-1)
                ids = torch.cat([ids, shares.multinomial(1, generator=self.random)], 1)
            rows = ids[:, len(first) :].tolist()
            outputs = [SimpleNamespace(token_ids=row, text=self.tokenizer.decode(row)) for row in rows]
            found.append(SimpleNamespace(prompt_token_ids=first, outputs=outputs))
        return found
"""
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
# No GPU; and a rate at which two steps show in the rewards.
CHANGES = {'torch.device("cuda", int(os.environ["LOCAL_RANK"]))': 'torch.device("cpu")', "lr=1e-6": "lr=3e-2"}
# At the end of the loop with memsaver, which it proves to use.
PROOF = """
    assert {each.tag for each in memsaver.stats().devices["cpu"].regions} >= {"params", "vllm.weights", "vllm.kv_cache"}
    assert all(params.owns(each.to_local().data_ptr()) for each in model.parameters())
    assert len([each for each in memsaver.history() if "params" in each.pause]) == STEPS
"""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def changed(program: str, difference: str) -> str:
    """The program after the page's difference."""
    for hunk in re.split(r"^@@\n", difference, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] or line for line in lines if not line.startswith("+"))
        new = "".join(line[1:] or line for line in lines if not line.startswith("-"))
        assert program.count(old) == 1, f"not once in the program:\n{old}"
        program = program.replace(old, new)
    return program


def prepare(folder: str) -> None:
    """Write the model, and import the libraries of both loops. Both loops are forks of the process that calls this."""
    save_model(Path(folder, "model"), "Qwen3", vocab_size=12, head_dim=8)
    save_tokenizer(Path(folder, "model"), list("e0123456789?"))
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv[1:] = ["model", "prompts"]
    import torch.distributed.fsdp  # noqa: F401


def run_loop(program: str, variables: dict[str, str]) -> None:
    child = os.fork()
    if not child:
        os.environ.update(variables)
        exec(program, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def rewards(process: Fork, program: str, **variables: str) -> list[str]:
    for text, other in CHANGES.items():
        assert program.count(text) == 1, text
        program = program.replace(text, other)
    process.start(run_loop, program, variables)
    return re.findall(r"step \d: reward [\d.]+", process.answer())


def test_the_loop_with_memsaver_gives_the_rewards_of_the_stock_loop(tmp_path: Path) -> None:
    fake_vllm.write(tmp_path)
    (tmp_path / "vllm/__init__.py").write_text(VLLM)
    (tmp_path / "prompts").write_text("12\n34\n567\n")
    (stock,), (difference,) = blocks("python"), blocks("diff")
    assert len(difference.splitlines()) < 100
    end = "    dist.destroy_process_group()\n"
    program = changed(stock, difference)
    assert program.count(end) == 1
    with Fork({**RANK, "MEMSAVER_HOST_DEVICE": fresh_device()}, __name__, timeout=240) as process:
        process.start(prepare, str(tmp_path))
        process.answer()
        expected = rewards(process, stock)
        assert len(expected) == 3 and len({each.split()[-1] for each in expected}) > 1
        assert rewards(process, program.replace(end, PROOF + end), MEMSAVER_DROP_IN="vllm") == expected
