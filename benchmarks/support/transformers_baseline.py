"""The time of `transformers` for a load: its eager decode, and `generate` with the static cache, compiled."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from examples.colocate.engine.gpt2 import GPT2Config
from support.engine_loads import Clock, Load, shape_of, use
from support.processes import Sample


def build(load: Load, device: str, small: bool) -> Any:
    """The load's model with random weights, of the engine's shape and dtype, and torch's attention."""
    # Imported when first needed, and in the benchmark's processes alone: it takes seconds.
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers import GPT2Config as TheirGPT2Config

    use(device)
    shape: Any = shape_of(load.model, small)
    nothing_special: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}  # or a completion could end early
    config: Any
    if isinstance(shape, GPT2Config):
        config = TheirGPT2Config(
            vocab_size=shape.vocab_size,
            n_embd=shape.hidden_size,
            n_layer=shape.num_layers,
            n_head=shape.num_heads,
            n_positions=shape.max_position,
            **nothing_special,
        )
    else:
        config = Qwen3Config(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            max_position_embeddings=shape.max_position,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=shape.tie_word_embeddings,
            **nothing_special,
        )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=shape.dtype, attn_implementation="sdpa")
    return model.eval()


@torch.no_grad()
def eager_rate(model: Any, load: Load) -> float:
    """Tokens per second of a bare greedy loop with the dynamic cache: nothing in it that `generate` adds."""
    from transformers import DynamicCache

    clock, cache, tokens = Clock(model.device.type), DynamicCache(config=model.config), _prompts(model, load)
    for _ in range(load.new_tokens):
        logits_BTV = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        tokens = logits_BTV[:, -1].argmax(-1, keepdim=True)
        clock.mark()
    steps = clock.intervals_ms()
    return 1e3 * load.batch * len(steps) / sum(steps)


def compiled(load: Load, device: str, small: bool) -> Iterator[Sample]:
    """First compiles, then measures: milliseconds of a decode step of `generate`, between one token and the next.

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
    yield {
        "compile_s": time.perf_counter() - begin,
        "compiled_graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "cuda_graph_skips": counters["inductor"]["cudagraph_skips"],
    }
    yield {"step_ms": statistics.median(_generate_ms(model, load))}


def _generate_ms(model: Any, load: Load) -> list[float]:
    from transformers import CompileConfig, LogitsProcessor, LogitsProcessorList

    clock = Clock(model.device.type)

    class Marks(LogitsProcessor):  # type: ignore[misc]  # transformers is read without types
        """Called for every token, between the forward pass and the choice."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            clock.mark()
            return scores

    config: Any = CompileConfig()
    config._compile_all_devices = True  # the CPU too, where this is tried out
    prompts = _prompts(model, load)
    made = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=load.new_tokens,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=config,
        logits_processor=LogitsProcessorList([Marks()]),
    )
    assert made.shape == (load.batch, load.length)
    return clock.intervals_ms()


def _prompts(model: Any, load: Load) -> Tensor:
    return torch.tensor(load.prompts(model.config.vocab_size), device=model.device)
