"""The same loads by `transformers`, its eager decode and its compiled `generate`, and by vLLM."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.engine.loads import Load, shape_of
from benchmarks.harness.models import MODELS
from benchmarks.harness.processes import Sample
from benchmarks.harness.work import synchronize


def build(load: Load, device: str, small: bool) -> Any:
    """The load's model with random weights, of the engine's shape and dtype, and torch's attention."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    shape: Any = shape_of(load.model, small)
    config: Any = Qwen3Config(
        vocab_size=shape.vocab_size, bos_token_id=None, eos_token_id=None, hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, head_dim=shape.head_dim,
        num_key_value_heads=shape.num_kv_heads, intermediate_size=shape.intermediate_size,
        max_position_embeddings=shape.max_position, tie_word_embeddings=shape.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )  # fmt: skip
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=shape.dtype, attn_implementation="sdpa")
    return model.eval()


@torch.no_grad()
def eager_rate(model: Any, load: Load) -> float:
    """Tokens per second of a bare greedy loop with the dynamic cache: nothing in it that `generate` adds."""
    from transformers import DynamicCache

    cache, tokens = DynamicCache(config=model.config), _prompts(model, load)
    for at in range(load.new_tokens):
        logits_BTV = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens = logits_BTV[:, -1].argmax(-1, keepdim=True)
        if at == 0:  # the decode begins
            synchronize(model.device.type)
            begin = time.perf_counter()
    synchronize(model.device.type)
    return load.batch * (load.new_tokens - 1) / (time.perf_counter() - begin)


def compiled(load: Load, device: str, small: bool) -> Iterator[Sample]:
    """First compiles; then the milliseconds of a decode step of `generate`, with the static cache.

    `generate` itself decides how to compile for a static cache: by default with CUDA graphs ("reduce-overhead").
    """
    begin = time.perf_counter()
    model = build(load, device, small)
    for _ in range(2):  # the first one compiles, the second finds a cache elsewhere, and may record once more
        _generate_ms(model, load)
    if device != "cpu":
        torch.cuda.empty_cache()
    counters = torch._dynamo.utils.counters
    if not counters["stats"]["unique_graphs"]:  # `generate` only logs that it does not compile
        raise RuntimeError("generate compiled nothing")
    yield {"compile, s": time.perf_counter() - begin, "graph breaks": sum(counters["graph_break"].values())}
    yield {"step_ms": statistics.median(_generate_ms(model, load))}


def _generate_ms(model: Any, load: Load) -> list[float]:
    from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList

    marks: list[float] = []

    class Marks(LogitsProcessor):  # type: ignore[misc]  # transformers is read without types
        """Called for every token. `generate` waits for the device before the next one."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            marks.append(time.perf_counter())
            return scores

    config: Any = CompileConfig()
    config._compile_all_devices = True  # the CPU too, for a trial
    prompts = _prompts(model, load)
    made = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=load.new_tokens, do_sample=False,
        pad_token_id=0, cache_implementation="static", compile_config=config,
        logits_processor=LogitsProcessorList([Marks()]),
    )  # fmt: skip
    assert made.shape == (load.batch, load.length)
    return [1e3 * (after - before) for before, after in zip(marks, marks[1:])]


def _prompts(model: Any, load: Load) -> Tensor:
    return torch.tensor(load.prompts(model.config.vocab_size), device=model.device)


def by_vllm(loads: list[Load]) -> Iterator[Sample]:
    """Completion tokens per second of each load in turn, by an engine of vLLM with asynchronous scheduling."""
    from vllm import LLM, SamplingParams

    model, batch, length = loads[0].model, max(load.batch for load in loads), max(load.length for load in loads)
    with tempfile.TemporaryDirectory() as directory:
        MODELS[model].write(directory)
        llm = LLM(
            model=directory, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", async_scheduling=True,
            gpu_memory_utilization=0.4, max_model_len=length, max_num_seqs=batch, enable_prefix_caching=False,
        )  # fmt: skip
    common = {"temperature": 0, "detokenize": False, "ignore_eos": True}
    try:
        for load in itertools.cycle(loads):
            sampling = [SamplingParams(max_tokens=new_tokens, **common) for new_tokens in load.completions()]
            prompts = [{"prompt_token_ids": tokens} for tokens in load.prompts(MODELS[model].vocabulary)]
            begin = time.perf_counter()
            done = llm.generate(prompts, sampling, use_tqdm=False)
            seconds = time.perf_counter() - begin
            yield {"tokens_per_s": sum(len(each.outputs[0].token_ids) for each in done) / seconds}
    finally:
        llm.llm_engine.engine_core.shutdown()  # a process of its own
