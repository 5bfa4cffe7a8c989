"""Two Ray actors take turns on one GPU: an engine samples from a model of transformers, a trainer improves it.

    python -m examples.two_actors                              # a small random model, also without a GPU
    python -m examples.two_actors --model path/to/Qwen3-1.7B   # a folder in the form of Hugging Face

The reward is a placeholder: the share of sampled tokens with an even number. The parts to copy are the regions, the
phases, and the way of the weights: the trainer writes into the engine's own tensors.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import ray
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, StaticCache

import memsaver
from memsaver.ray import Colocated, Group

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT, COMPLETION, SAMPLES = 8, 24, 32  # tokens, tokens, completions of a step
PHASES = {
    "rollout": {"engine": ["weights", "kv_cache"]},
    "train": {"trainer": ["params", "optimizer"]},
    "sync": {"trainer": ["params"], "engine": ["weights"]},
}
BACKUP = {"train": {"engine": {"weights": "none"}}}  # the sync overwrites the weights: no copy out,
RESTORE = {"sync": {"engine": {"weights": False}}}  # and no copy in


def load(path: str | None, dtype: torch.dtype, region: memsaver.Region) -> Any:
    """A model of transformers with its parameters in a region. Its constants are not: no sync writes them."""
    if path is None:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
        config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    for parameter in model.parameters():  # tied ones come once
        parameter.data = region.empty(tuple(parameter.shape), parameter.dtype).copy_(parameter.detach())
    for buffer in model.buffers():
        buffer.data = buffer.to(DEVICE)
    return model


class Worker(Colocated):
    def __init__(self) -> None:
        # Sent tensors keep their memory: torch.multiprocessing passes the engine's weights without a copy.
        memsaver.configure(pool="shared", memory_timeout=60, patches="multiprocessing")

    def colocated_drain(self, tags: Sequence[str]) -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # gradients and activations


class Engine(Worker):
    def setup(self, path: str | None) -> None:
        self.model = load(path, torch.bfloat16, memsaver.region("weights", backup="host")).requires_grad_(False)
        config = self.model.config
        cache = StaticCache(config, max_cache_len=PROMPT + COMPLETION)
        with memsaver.region("kv_cache"):
            heads = {"num_heads": config.num_key_value_heads, "head_dim": config.head_dim}
            cache.early_initialization(SAMPLES, **heads, dtype=torch.bfloat16, device=DEVICE)
        self.cache = cache

    def generate(self, prompts: Tensor) -> Tensor:
        """Prompts with completions: tokens [SAMPLES, PROMPT + COMPLETION]."""
        self.cache.reset()
        tokens: Tensor = self.model.generate(
            prompts.to(DEVICE), past_key_values=self.cache, max_new_tokens=COMPLETION, min_new_tokens=COMPLETION,
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, disable_compile=True,  # the model's own distribution
        )  # fmt: skip
        return tokens.cpu()

    def share_weights(self) -> bytes:
        """The weights by name, for a process that writes new ones. Valid until the weights are paused."""
        return bytes(ForkingPickler.dumps(dict(self.model.named_parameters())))


class Trainer(Worker):
    def setup(self, path: str | None) -> None:
        self.model = load(path, torch.float32, memsaver.region("params", backup="host"))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.0)
        moments = memsaver.region("optimizer", backup="host")
        for parameter in self.model.parameters():
            shape = tuple(parameter.shape)
            first, second = (moments.empty(shape, torch.float32).zero_() for _ in range(2))
            self.optimizer.state[parameter] = {"step": torch.zeros(()), "exp_avg": first, "exp_avg_sq": second}

    def train(self, tokens: Tensor) -> float:
        """A policy-gradient step. Returns the mean reward."""
        tokens = tokens.to(DEVICE)
        rewards = (tokens[:, PROMPT:] % 2 == 0).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        logits = self.model(tokens[:, :-1]).logits[:, PROMPT - 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)
        (-(logprobs * advantages[:, None]).mean()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return rewards.mean().item()

    def write_weights(self, shared: bytes) -> None:
        """Casts the parameters into the engine's tensors."""
        targets = pickle.loads(shared)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                targets[name].copy_(parameter)
        if DEVICE == "cuda":
            torch.cuda.synchronize()  # the engine reads them next


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="DIR", help="a folder with config.json and safetensors")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.manual_seed(0)
    vocabulary = 128 if options.model is None else AutoConfig.from_pretrained(options.model).vocab_size
    share = {"num_gpus": 0.5 if DEVICE == "cuda" else 0}
    engine, trainer = (ray.remote(kind).options(**share).remote() for kind in (Engine, Trainer))
    ray.get(engine.setup.remote(options.model))
    ray.get(engine.pause.remote())  # the trainer's regions need the memory
    ray.get(trainer.setup.remote(options.model))

    group = Group(engine=[engine], trainer=[trainer], phases=PHASES, backup=BACKUP, restore=RESTORE)
    for step in range(options.steps):
        with group.enter("sync", memory_timeout=60):
            ray.get(trainer.write_weights.remote(ray.get(engine.share_weights.remote())))
        group.enter("rollout", memory_timeout=60)
        prompts = torch.randint(vocabulary, (SAMPLES, PROMPT))
        tokens = ray.get(engine.generate.remote(prompts))
        group.enter("train", memory_timeout=60)
        print(f"step {step + 1}: reward {ray.get(trainer.train.remote(tokens)):.3f}", flush=True)


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    main()
