"""A model from a Hugging Face folder: config.json, and safetensors in one file or several."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..model import ModelConfig, RopeScaling

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


class CheckpointError(ValueError):
    """A folder that is no checkpoint, is broken, or is of a model that the engine does not compute."""


def load_config(folder: Path | str, dtype: torch.dtype | None = None) -> ModelConfig:
    """The configuration that config.json describes, in its dtype or the one given.

    Reads the spellings of transformers 4 and 5. Raises CheckpointError for a missing setting, and for each one that
    would change the arithmetic in a way that is not built here.
    """
    path = Path(folder) / "config.json"
    values = {name: value for name, value in _json(path).items() if value is not None}
    try:
        return _config(values, dtype)
    except KeyError as error:
        raise CheckpointError(f"{path}: {error.args[0]} is missing; expected a value") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{path}: {error}") from error


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


def named_tensors(folder: Path | str, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Full parameters by Hugging Face name, one at a time, each on the CPU and mapped from its file.

    From model.safetensors, or the files that model.safetensors.index.json names; converted to `dtype` where one is
    given. An output matrix that is tied to the embedding is left out. Raises CheckpointError at the call for a folder
    or a file that is not there.
    """
    folder = Path(folder)
    tied, index = _json(folder / "config.json").get("tie_word_embeddings"), folder / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        names = set(_json(index).get("weight_map", {}).values())
    missing = sorted(name for name in names if not (folder / name).exists())
    if missing or not names:
        raise CheckpointError(f"{folder}: {missing or 'weight_map'} is missing; expected all weights in safetensors")
    return _read([folder / name for name in sorted(names)], bool(tied), dtype)


def _read(files: list[Path], tied: bool, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    # Imported when first needed: with random weights the engine runs without it.
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 no dictionary
                    if not (tied and name == "lm_head.weight"):
                        tensor = file.get_tensor(name)
                        yield name, tensor if dtype is None else tensor.to(dtype)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}; expected a safetensors file") from error


def eos_tokens(folder: Path | str) -> tuple[int, ...]:
    """Tokens that end a text, by generation_config.json or else config.json; there may be none."""
    for path in (Path(folder) / "generation_config.json", Path(folder) / "config.json"):
        tokens = _json(path).get("eos_token_id") if path.exists() else None
        if tokens is not None:
            return tuple(tokens) if isinstance(tokens, list) else (tokens,)
    return ()


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}; expected a Hugging Face checkpoint's file") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}; expected JSON") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: holds a {type(values).__name__}; expected an object")
    return values
