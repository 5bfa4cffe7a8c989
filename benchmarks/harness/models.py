"""Models of random weights for vLLM and SGLang: their directories, and their weights by name in a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HEAD, KV_HEADS = 128, 8  # elements of an attention head; heads of the KV cache
UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
"""vLLM's compilation_config: graphs of decode steps, and no torch.compile. Engines start sooner."""


def prompt(number: int) -> list[int]:
    """Tokens that every model has."""
    return [(number * 7919 + at * 104729) % 31000 + 5 for at in range(64)]


@dataclass(frozen=True)
class Model:
    """A shape of Qwen3."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int = 32000
    tied: bool = True

    def write(self, directory: str) -> None:
        """Writes config.json, and a tokenizer whose tokens are numbers."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
            "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD, "vocab_size": self.vocabulary, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": self.tied,
            "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        vocabulary = {f"t{number}": number for number in range(self.vocabulary)}
        tokenizer: dict[str, Any] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
        }  # fmt: skip
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t2"}
        for name, text in {"config": config, "tokenizer": tokenizer, "tokenizer_config": described}.items():
            Path(directory, f"{name}.json").write_text(json.dumps(text))

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of a checkpoint's weights."""
        width, kv_width = self.heads * HEAD, KV_HEADS * HEAD
        yield "model.embed_tokens.weight", (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            for name, shape in {
                "input_layernorm": (self.hidden,),
                "self_attn.q_proj": (width, self.hidden),
                "self_attn.k_proj": (kv_width, self.hidden),
                "self_attn.v_proj": (kv_width, self.hidden),
                "self_attn.q_norm": (HEAD,),
                "self_attn.k_norm": (HEAD,),
                "self_attn.o_proj": (self.hidden, width),
                "post_attention_layernorm": (self.hidden,),
                "mlp.gate_proj": (self.intermediate, self.hidden),
                "mlp.up_proj": (self.intermediate, self.hidden),
                "mlp.down_proj": (self.hidden, self.intermediate),
            }.items():
                yield f"model.layers.{layer}.{name}.weight", shape
        yield "model.norm.weight", (self.hidden,)
        if not self.tied:
            yield "lm_head.weight", (self.vocabulary, self.hidden)

    def nbytes(self) -> int:
        """Of a checkpoint."""
        return sum(2 * math.prod(shape) for _, shape in self.shapes())

    def kv_bytes(self) -> int:
        """Of a token in the KV cache."""
        return 2 * self.layers * KV_HEADS * HEAD * 2

    def weights(self, version: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The random weights of a version, by their names in a checkpoint. Equal in each process."""
        generator = torch.Generator(device=device)
        for number, (name, shape) in enumerate(self.shapes()):
            generator.manual_seed(version * 1_000_003 + number)
            weight = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            yield name, (weight * 0.02 if len(shape) > 1 else 1 + weight * 0.1).to(torch.bfloat16)


MODELS = {
    "tiny": Model(1024, 3072, 8, 16),
    "wide": Model(4096, 12288, 12, 32),
    "qwen3-0.6b": Model(1024, 3072, 28, 16, vocabulary=151936),
    "qwen3-8b": Model(4096, 12288, 36, 32, vocabulary=151936, tied=False),
}
