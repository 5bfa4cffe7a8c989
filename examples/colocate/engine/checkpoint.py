"""Where a model comes from: a Hugging Face folder (config.json and safetensors), or a published shape by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..model.config import ModelConfig, RopeScaling
from .decoder import Decoder
from .gpt2 import GPT2, GPT2Config
from .model import Config, Model
from .parallel import ONE_RANK, Parallel

_MODELS: dict[type, type[Model]] = {ModelConfig: Decoder, GPT2Config: GPT2}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
# Prefixes of names by model_type. Checkpoints of the model without its head lack them.
_PREFIXES = {"qwen3": "model.", "llama": "model.", "gpt2": "transformer."}
# Tensors of older checkpoints that are not parameters.
_NO_PARAMETERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class CheckpointError(ValueError):
    """A folder that is no checkpoint, is broken, or is of a model that the engine does not compute."""


def build(config: Config, weights: Any, buffers: Any, parallel: Parallel = ONE_RANK) -> Model:
    """The model that the configuration is of, uninitialised, in two regions (see `Model`)."""
    check_supported(config)
    return _MODELS[type(config)](config, weights, buffers, parallel)


def check_supported(config: Config) -> None:
    """Raise ValueError for the configuration of a model that is not built here."""
    if type(config) not in _MODELS:
        raise ValueError(f"config is a {type(config).__name__}; expected {' or '.join(c.__name__ for c in _MODELS)}")


def load_config(folder: Path | str, dtype: torch.dtype | None = None) -> Config:
    """The configuration that config.json describes, in its dtype or the one given.

    Reads the spellings of transformers 4 and 5. Raises CheckpointError for a missing setting, and for each one that
    would change the arithmetic in a way that is not built here.
    """
    fields = _Fields(Path(folder) / "config.json")
    try:
        fields.expect("quantization_config", None)
        dtype = dtype or fields.dtype()
        return _gpt2(fields, dtype) if fields.model_type == "gpt2" else _decoder(fields, dtype)
    except CheckpointError:
        raise
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{fields.path}: {error}") from error


def named_tensors(folder: Path | str, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Parameters by the model's names, one at a time, each on the CPU and mapped from its file.

    From model.safetensors, or the files that model.safetensors.index.json names; converted to `dtype` where one is
    given. Raises CheckpointError at the call for a folder or a file that is not there.
    """
    fields, files = _Fields(Path(folder) / "config.json"), _weight_files(Path(folder))
    return _read(files, _PREFIXES[fields.model_type], fields.tied, dtype)


def eos_tokens(folder: Path | str) -> tuple[int, ...]:
    """Tokens that end a text, by generation_config.json or else config.json; there may be none."""
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if name == "config.json" or path.exists():
            tokens = _json(path).get("eos_token_id")
            if tokens is not None:
                return tuple(tokens) if isinstance(tokens, list) else (tokens,)
    return ()


class _Fields:
    """config.json, key by key; null counts as absent."""

    def __init__(self, path: Path) -> None:
        self.path, self.values = path, _json(path)
        self.model_type = str(self.values.get("model_type"))
        if self.model_type not in _PREFIXES:
            raise CheckpointError(f"{path}: model_type is {self.model_type!r}; expected one of {', '.join(_PREFIXES)}")

    @property
    def tied(self) -> bool:
        """Whether the output's weights are the embedding's; by default GPT-2's alone are."""
        return bool(self.get("tie_word_embeddings", default=self.model_type == "gpt2"))

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these that is there."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def need(self, *names: str) -> Any:
        """As `get`, where there is no default."""
        value = self.get(*names)
        if value is None:
            raise CheckpointError(f"{self.path}: {names[0]} is missing; expected a value")
        return value

    def expect(self, name: str, supported: Any) -> None:
        """Refuse another value than the one that is built here; absent means that one."""
        value = self.get(name, default=supported)
        if value != supported:
            raise CheckpointError(f"{self.path}: {name} is {value!r}; expected {supported!r}, no other is supported")

    def dtype(self) -> torch.dtype:
        """Float32 if nothing is said."""
        name = str(self.get("dtype", "torch_dtype", default="float32")).removeprefix("torch.")
        if name not in DTYPES:
            raise CheckpointError(f"{self.path}: dtype is {name!r}; expected one of {', '.join(DTYPES)}")
        return DTYPES[name]


def _decoder(fields: _Fields, dtype: torch.dtype) -> ModelConfig:
    fields.expect("hidden_act", "silu")
    for name in ("attention_bias", "mlp_bias"):
        fields.expect(name, False)
    hidden, num_layers, num_heads = map(fields.need, ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    windowed = fields.get("use_sliding_window") and fields.get("max_window_layers", default=28) < num_layers
    kinds = fields.get("layer_types", default=["sliding_attention" if windowed else "full_attention"])
    if set(kinds) != {"full_attention"}:
        raise CheckpointError(f"{fields.path}: layer_types are {sorted(set(kinds))}; expected only full_attention")
    qk_norm = fields.model_type == "qwen3"
    theta, scaling = _rope(fields)
    return ModelConfig(
        vocab_size=fields.need("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", default=num_heads),
        head_dim=fields.get("head_dim", default=128 if qk_norm else hidden // num_heads),
        intermediate_size=fields.need("intermediate_size"),
        max_position=fields.need("max_position_embeddings"),
        rope_theta=theta,
        norm_eps=fields.get("rms_norm_eps", default=1e-6),
        qk_norm=qk_norm,
        tie_word_embeddings=fields.tied,
        dtype=dtype,
        rope_scaling=scaling,
    )


def _rope(fields: _Fields) -> tuple[float, RopeScaling | None]:
    """Transformers 5 keeps all in rope_parameters, 4 the base beside rope_scaling."""
    rope = fields.get("rope_scaling", "rope_parameters", default={})
    if not isinstance(rope, dict):
        raise CheckpointError(f"{fields.path}: rope_scaling is {rope!r}; expected an object")
    theta = rope.get("rope_theta", fields.get("rope_theta", default=10000.0))
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", fields.get("partial_rotary_factor", default=1.0))
    if partial != 1.0:
        raise CheckpointError(f"{fields.path}: partial_rotary_factor is {partial!r}; expected 1.0")
    if kind == "default":
        return theta, None
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers: list[Any] = [rope.get(name) for name in names]
    return theta, RopeScaling(kind, *(numbers if kind == "llama3" else numbers[:1]))


def _gpt2(fields: _Fields, dtype: torch.dtype) -> GPT2Config:
    fields.expect("activation_function", "gelu_new")
    for name in ("tie_word_embeddings", "scale_attn_weights"):
        fields.expect(name, True)
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        fields.expect(name, False)
    return GPT2Config(
        vocab_size=fields.need("vocab_size"),
        hidden_size=fields.need("n_embd", "hidden_size"),
        num_layers=fields.need("n_layer", "num_hidden_layers"),
        num_heads=fields.need("n_head", "num_attention_heads"),
        max_position=fields.need("n_positions", "max_position_embeddings"),
        inner_size=fields.get("n_inner"),
        norm_eps=fields.get("layer_norm_epsilon", default=1e-5),
        dtype=dtype,
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if not (folder / names[0]).exists() and index.exists():
        places = _json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(f"{index}: weight_map is missing; expected a file for each parameter")
        names = sorted(set(map(str, places.values())))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise CheckpointError(f"{folder}: {', '.join(missing)} is missing; expected all weights in safetensors")
    return [folder / name for name in names]


def _read(files: list[Path], prefix: str, tied: bool, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    # Imported when first needed: with random weights the engine runs without it.
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 no dictionary
                    if name.endswith(_NO_PARAMETERS) or (tied and name == "lm_head.weight"):
                        continue
                    tensor = file.get_tensor(name)
                    if dtype is not None and tensor.is_floating_point():
                        tensor = tensor.to(dtype)
                    yield name if name.startswith((prefix, "lm_head.")) else prefix + name, tensor
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {error}; expected a safetensors file") from error


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


# Published shapes, for random weights: vocabulary, hidden, layers, heads, KV heads, head dimension, inner, positions.
_QWEN3_8B = ModelConfig(151936, 4096, 36, 32, 8, 128, 12288, 40960, rope_theta=1e6, dtype=torch.bfloat16)
_QWEN3_SMALL = replace(_QWEN3_8B, num_layers=28, num_heads=16, tie_word_embeddings=True)
_LLAMA_8B = replace(
    ModelConfig(128256, 4096, 32, 32, 8, 128, 14336, 131072, rope_theta=5e5, norm_eps=1e-5, qk_norm=False),
    rope_scaling=RopeScaling("llama3", factor=8.0),
    dtype=torch.bfloat16,
)
_LLAMA_1B = replace(_LLAMA_8B, hidden_size=2048, num_layers=16, head_dim=64, intermediate_size=8192)
PRESETS: dict[str, Config] = {
    "gpt2": GPT2Config(50257, 768, num_layers=12, num_heads=12, max_position=1024, dtype=torch.bfloat16),
    "qwen3-0.6b": replace(_QWEN3_SMALL, hidden_size=1024, intermediate_size=3072),
    "qwen3-1.7b": replace(_QWEN3_SMALL, hidden_size=2048, intermediate_size=6144),
    "qwen3-8b": _QWEN3_8B,
    "llama-3.2-1b": replace(_LLAMA_1B, tie_word_embeddings=True, rope_scaling=RopeScaling("llama3", factor=32.0)),
    "llama-3.1-8b": _LLAMA_8B,
}
