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

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
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

    Reads the spellings of transformers 4 and 5. Raises FolderError for a missing setting, and for each one that would
    change the arithmetic in a way that is not built here.
    """
    path = folder / "config.json"
    values = {name: value for name, value in _json(path).items() if value is not None}
    try:
        return _config(values, dtype)
    except KeyError as error:
        raise FolderError(f"{path}: {error.args[0]} is missing; expected a value") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise FolderError(f"{path}: {error}") from error


def _config(values: dict[str, Any], dtype: torch.dtype | None) -> ModelConfig:
    kind = values.get("model_type")
    if kind not in _MODEL_TYPES:
        raise ValueError(f"model_type is {kind!r}; expected one of {', '.join(_MODEL_TYPES)}")
    # Transformers 5 keeps all of the rotary embedding in rope_parameters, 4 the base beside rope_scaling.
    rope = values.get("rope_scaling", values.get("rope_parameters", {}))
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling is {rope!r}; expected an object")
    for name, supported in _FIXED.items():
        value = rope.get(name, values.get(name, supported))
        if value != supported:
            raise ValueError(f"{name} is {value!r}; expected {supported!r}, no other is supported")
    if not set(values.get("layer_types", ())) <= {"full_attention"}:
        raise ValueError(f"layer_types are {sorted(set(values['layer_types']))}; expected only full_attention")
    name = str(values.get("dtype", values.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype is None and name not in DTYPES:
        raise ValueError(f"dtype is {name!r}; expected one of {', '.join(DTYPES)}")
    num_heads, hidden = values["num_attention_heads"], values["hidden_size"]
    return ModelConfig(
        vocab_size=values["vocab_size"],
        hidden_size=hidden,
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads", num_heads),
        head_dim=values.get("head_dim", 128 if kind == "qwen3" else hidden // num_heads),
        intermediate_size=values["intermediate_size"],
        max_position=values["max_position_embeddings"],
        rope_theta=rope.get("rope_theta", values.get("rope_theta", 10000.0)),
        norm_eps=values.get("rms_norm_eps", 1e-6),
        qk_norm=kind == "qwen3",
        tie_word_embeddings=values.get("tie_word_embeddings", False),
        dtype=dtype or DTYPES[name],
        rope_scaling=_rope_scaling(rope),
        qkv_bias=kind == "qwen2",
    )


def _rope_scaling(rope: dict[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_type is {kind!r}; expected 'default' or 'llama3'")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RopeScaling(*(rope[name] for name in names))


@contextmanager
def parameters(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The parameters by Hugging Face name: each has `get_shape()`, and reads the part that it is indexed with.

    Raises FolderError, at the begin or inside, for files that are missing or broken.
    """
    # Imported when first needed: with random weights no such package is.
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        names = set(_json(index)["weight_map"].values()) if index.exists() else {"model.safetensors"}
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(folder / name, "pt", device="cpu")) for name in sorted(names)]
            yield {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 no dictionary
    except (OSError, KeyError, SafetensorError) as error:
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


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FolderError(f"{path}: {error.strerror}; expected a Hugging Face checkpoint's file") from error
    except ValueError as error:
        raise FolderError(f"{path}: {error}; expected JSON") from error
    if not isinstance(values, dict):
        raise FolderError(f"{path}: holds a {type(values).__name__}; expected an object")
    return values
