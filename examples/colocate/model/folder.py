"""A model from a Hugging Face folder: config.json, and safetensors in one file or several."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import ModelConfig, RopeScaling

_MODEL_TYPES = ("qwen2", "qwen3", "llama")
# Settings that would change the arithmetic, and the values that the decoder has.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
}


class FolderError(ValueError):
    """A folder has no checkpoint, a broken one, or that of a model that is not built here."""


def load_config(folder: Path, dtype: torch.dtype | None = None) -> ModelConfig:
    """The configuration that config.json describes, in its dtype or the one given.

    Raises FolderError for a folder without one, and for each setting that would change the arithmetic in a way that is
    not built here.
    """
    from transformers import AutoConfig  # slow to import

    try:
        return _config(AutoConfig.from_pretrained(folder, local_files_only=True), dtype)
    except Exception as error:  # transformers has many kinds
        raise FolderError(f"{folder}: {error}; expected the config.json of a model") from error


def _config(found: Any, dtype: torch.dtype | None) -> ModelConfig:
    kind, rope = found.model_type, getattr(found, "rope_parameters", {})
    if kind not in _MODEL_TYPES:
        raise ValueError(f"model_type is {kind!r}; expected one of {', '.join(_MODEL_TYPES)}")
    for name, supported in _FIXED.items():
        value = rope.get(name, getattr(found, name, supported))
        if value != supported:
            raise ValueError(f"{name} is {value!r}; expected {supported!r}, no other is supported")
    layers = set(getattr(found, "layer_types", None) or ())
    if not layers <= {"full_attention"}:
        raise ValueError(f"layer_types are {sorted(layers)}; expected only full_attention")
    scaling = None
    if rope["rope_type"] != "default":
        if rope["rope_type"] != "llama3":
            raise ValueError(f"rope_type is {rope['rope_type']!r}; expected 'default' or 'llama3'")
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling = RopeScaling(*(rope[name] for name in names))
    return ModelConfig(
        vocab_size=found.vocab_size,
        hidden_size=found.hidden_size,
        num_layers=found.num_hidden_layers,
        num_heads=found.num_attention_heads,
        num_kv_heads=found.num_key_value_heads,
        head_dim=getattr(found, "head_dim", None) or found.hidden_size // found.num_attention_heads,
        intermediate_size=found.intermediate_size,
        max_position=found.max_position_embeddings,
        rope_theta=rope["rope_theta"],
        norm_eps=found.rms_norm_eps,
        qk_norm=kind == "qwen3",
        tie_word_embeddings=found.tie_word_embeddings,
        dtype=dtype or found.dtype or torch.float32,
        rope_scaling=scaling,
        qkv_bias=kind == "qwen2",
    )


@contextmanager
def parameters(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The parameters by Hugging Face name: each has `get_shape()`, and reads the part that it is indexed with.

    Raises FolderError, at the begin or inside, for files that are missing or broken.
    """
    # Imported when first needed: with random weights no such package is.
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        names = {"model.safetensors"}
        if index.exists():
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(folder / name, "pt", device="cpu")) for name in sorted(names)]
            yield {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 no dictionary
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise FolderError(f"{folder}: {error!r}; expected the model's parameters in safetensors") from error


def named_tensors(folder: Path, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Full parameters by Hugging Face name, one at a time, on the CPU; converted to `dtype` where one is given.

    An output matrix that is tied to the embedding is left out. Raises FolderError.
    """
    tied = load_config(folder, dtype).tie_word_embeddings
    with parameters(folder) as stored:
        for name, each in stored.items():
            if not (tied and name == "lm_head.weight"):
                yield name, each[:].to(dtype)
