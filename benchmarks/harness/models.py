"""Models of random weights for vLLM and SGLang: their directories, and their weights by name in a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from examples.colocate.model import ModelConfig, parameter_shapes

UNCOMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8]}
"""vLLM's compilation_config: graphs of decode steps, and no torch.compile. Engines start sooner."""


def prompt(number: int) -> list[int]:
    """Tokens that every model has."""
    return [(number * 7919 + at * 104729) % 31000 + 5 for at in range(64)]


class Model(ModelConfig):
    """A shape of Qwen3, in bf16."""

    def write(self, directory: str) -> None:
        """Writes config.json, and a tokenizer whose tokens are numbers."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu",
            "hidden_size": self.hidden_size, "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers, "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads, "head_dim": self.head_dim, "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position, "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta, "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
        vocabulary = {f"t{number}": number for number in range(self.vocab_size)}
        tokenizer: dict[str, Any] = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
            "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
        }  # fmt: skip
        described = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t2"}
        for name, text in {"config": config, "tokenizer": tokenizer, "tokenizer_config": described}.items():
            Path(directory, f"{name}.json").write_text(json.dumps(text))

    def nbytes(self) -> int:
        """Of a checkpoint."""
        return sum(2 * math.prod(shape) for shape in parameter_shapes(self).values())

    def kv_bytes(self) -> int:
        """Of a token in the KV cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 2

    def weights(self, version: int, device: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The random weights of a version, by their names in a checkpoint. Equal in each process."""
        generator = torch.Generator(device=device)
        for number, (name, shape) in enumerate(parameter_shapes(self).items()):
            generator.manual_seed(version * 1_000_003 + number)
            weight = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
            yield name, (weight * 0.02 if len(shape) > 1 else 1 + weight * 0.1).to(torch.bfloat16)


def _qwen3(
    hidden: int, intermediate: int, layers: int, heads: int, vocabulary: int = 32000, tied: bool = True
) -> Model:
    sizes = (vocabulary, hidden, layers, heads, 8, 128, intermediate)
    return Model(*sizes, max_position=4096, rope_theta=1e6, tie_word_embeddings=tied, dtype=torch.bfloat16)


MODELS = {
    "tiny": _qwen3(1024, 3072, 8, 16),
    "wide": _qwen3(4096, 12288, 12, 32),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, vocabulary=151936),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, vocabulary=151936, tied=False),
}
