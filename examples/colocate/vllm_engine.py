"""vLLM in the place of the example's engine: the calls of `Engine` that the loop makes, in the process of the actor."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import memsaver

from .engine import Completion, EngineConfig, SamplingParams
from .engine.scheduler import Counts
from .engine.sequence import Sequence
from .model import ModelConfig, WeightPart, checksums, fused_shapes, weight_layout

_BLOCK = 16  # tokens of a KV block
_METRICS = {"vllm:prefix_cache_hits": "prefix_hit_tokens", "vllm:num_preemptions": "preemptions"}


class Asleep(memsaver.Guest):
    """One of the two tags of vLLM's own sleep mode, level 1. One call of vLLM puts both tags to sleep."""

    keeps_addresses = True

    def __init__(self, llm: Any, tag: str) -> None:
        super().__init__(tag, tag)
        self._llm, self._tag = llm, tag.removeprefix("vllm.")
        memsaver.register(self)

    def leave(self) -> None:
        if self._tag == "kv_cache":
            self._llm.sleep(level=1)

    def come_back(self) -> None:
        self._llm.wake_up([self._tag])


class VllmEngine:
    """Generates completions with vLLM. Its weights have any values until the first sync, in bf16.

    Its sleep mode is memsaver's drop-in, so that the group pauses and resumes its regions as all others. A pause of
    the weights may lose their contents: `share_weights` writes the constants again that lie among them.
    """

    tags = ("vllm.weights", "vllm.kv_cache")

    def __init__(self, model: ModelConfig, config: EngineConfig, folder: Path | None, drop_in: bool = True) -> None:
        """`config`: sizes, of which blocks of KV are counted in tokens. `folder`: with the model's config.json.

        `drop_in`: False keeps vLLM's own sleep mode, whose tags are guests.
        """
        os.environ["MEMSAVER_DROP_IN"] = "vllm" if drop_in else ""  # read when vLLM is imported
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm

        self.model_config, self.config, self._vllm = model, config, vllm
        token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2
        self._llm = vllm.LLM(
            str(folder),
            skip_tokenizer_init=True,
            load_format="dummy",  # the first sync writes the weights
            dtype="bfloat16",
            max_model_len=model.max_position,
            max_num_seqs=config.max_batch_size,
            block_size=_BLOCK,
            kv_cache_memory_bytes=config.num_blocks * config.block_size * token_bytes,
            gpu_memory_utilization=0.05,  # of the driver's free memory; the pool's idle memory does not count there
            logprobs_mode="processed_logprobs",  # of the distribution that is sampled
            enable_sleep_mode=True,
            disable_log_stats=False,
            seed=config.seed % (1 << 32),
        )
        self._number, self._running, self._put_back, self._was_drained = 0, dict[str, Sequence](), 0, False
        self.weight_layout: dict[str, WeightPart] = weight_layout(model)
        (self._model,) = self._llm.apply_model(lambda model: model)
        self._constants = {name: each.clone() for name, each in self._model.named_buffers()}
        self._parameters, self._padding = _places(self._model, self.weight_layout)
        for tag in () if drop_in else self.tags:
            Asleep(self._llm, tag)

    def generate(self, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
        """Complete prompts of token ids, in their order."""
        self._wake()
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = [self._request(prompt, sampling) for prompt in prompts]
        for request, output in zip(found, self._llm.generate(given, self._sampling(sampling), use_tqdm=False)):
            _take(request, output)
        return [request.completion() for request in found]

    def submit(self, prompt: list[int], sampling: SamplingParams) -> Sequence:
        """Queue one request; `step` works on it until its `finish_reason` is set."""
        self._number += 1
        self._llm.llm_engine.add_request(f"own-{self._number}", {"prompt_token_ids": prompt}, self._sampling(sampling))
        return self._running.setdefault(f"own-{self._number}", self._request(prompt, sampling))

    def step(self) -> None:
        self._wake()
        for output in self._llm.llm_engine.step():
            request = self._running[output.request_id]
            _take(request, output)
            if request.finish_reason is not None:
                del self._running[output.request_id]

    def drain(self) -> None:
        """Before a pause: drop the prefix cache, and put running requests back, to be computed anew later."""
        self._put_back += len(self._running)
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._was_drained = True

    def capture(self) -> None:
        """vLLM has captured its graphs."""

    def share_weights(self) -> bytes:
        """Offer the weights to a process that writes new ones, as `Engine.share_weights` does."""
        for name, buffer in self._model.named_buffers():
            buffer.copy_(self._constants[name])
        for rows in self._padding:
            rows.zero_()
        return bytes(ForkingPickler.dumps(self._parameters))

    def take_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._llm.reset_prefix_cache()
        for name, weight in weights.items():
            self._parameters[name].copy_(weight)

    def checksums(self) -> dict[str, int]:
        """Of each parameter, by Hugging Face name."""
        return checksums(self._parameters)

    def addresses(self) -> dict[str, int]:
        """Of all parameters and constants."""
        named = (*self._model.named_parameters(), *self._model.named_buffers())
        return {name: tensor.data_ptr() for name, tensor in named}

    @property
    def counts(self) -> Counts:
        """Since the start, as vLLM's metrics have them."""
        found = Counter[str]()
        for each in self._llm.get_metrics():
            if each.name in _METRICS:
                found[_METRICS[each.name]] += each.value
        recomputed, put_back = found.pop("preemptions", 0), self._put_back  # vLLM counts both as preemptions
        return Counts(**found, recomputed=recomputed, preemptions=recomputed - put_back)

    def _wake(self) -> None:
        """After a pause: tables of the addresses of blocks lie among the KV cache, which has lost its contents."""
        if self._was_drained:
            self._llm.collective_rpc(lambda worker: worker.model_runner.post_kv_cache_wake_up())
        self._was_drained = False

    def _request(self, prompt: list[int], sampling: SamplingParams) -> Sequence:
        return Sequence(prompt, sampling, len(prompt) + sampling.max_new_tokens)

    def _sampling(self, sampling: SamplingParams) -> Any:
        return self._vllm.SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_tokens),
            ignore_eos=True,
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )


def _places(model: nn.Module, layout: Mapping[str, WeightPart]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The rows of vLLM's parameters by Hugging Face name, and their rows of padding. Without tensor parallel.

    vLLM pads vocabularies. Raises ValueError for other parameters, as those of quantized models.
    """
    own = {name: parameter.data for name, parameter in model.named_parameters()}
    used = {name: rows for name, (rows, *_) in fused_shapes(layout).items()}
    if differing := sorted(own.keys() ^ used.keys()):
        raise ValueError(f"vLLM's parameters differ in {differing[0]!r}; expected those of a dense model in bf16")
    padded = [name for name, rows in used.items() if rows < len(own[name])]
    if layers := [name for name in padded if "layers" in name]:
        raise ValueError(f"vLLM's {layers[0]!r} has {len(own[layers[0]])} rows; expected {used[layers[0]]}")
    return {name: part.within(own) for name, part in layout.items()}, [own[name][used[name] :] for name in padded]


def _take(request: Sequence, output: Any) -> None:
    """All tokens so far. vLLM's outputs are cumulative."""
    found = output.outputs[0]
    request.tokens, request.finish_reason = [*request.prompt, *found.token_ids], found.finish_reason
    request.logprobs = [each[token].logprob for token, each in zip(found.token_ids, found.logprobs)]
