"""Tiny models in the form of Hugging Face, written by `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,  # some waves are shorter, some longer, some between
}


def save_model(folder: Path, kind: str, saving: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A random model whose norms and biases are not ones and zeros. `kind`: "Qwen3", "Qwen2" or "Llama"."""
    transformers = pytest.importorskip("transformers", reason="it writes the checkpoint")
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape)
    model.save_pretrained(folder, **saving or {})
    return model


def save_tokenizer(folder: Path, words: list[str], between: str = "") -> None:
    """A token for each of the words; the first one ends a text, the last one is all others."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(len(words)))), unk_token=words[-1]))
    split = tokenizers.pre_tokenizers
    core.pre_tokenizer = split.Split("", "isolated") if not between else split.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token=words[0]).save_pretrained(folder)
