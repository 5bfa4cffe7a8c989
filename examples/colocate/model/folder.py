"""A model from a Hugging Face folder: config.json, and safetensors in one file or several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .config import ModelConfig

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
    except Exception as error:
        raise FolderError(f"{folder}: expected the config.json of a model: {error!r}") from None


def _config(found: Any, dtype: torch.dtype | None) -> ModelConfig:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

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
    if rope["rope_type"] not in ("default", "llama3"):
        raise ValueError(f"rope_type is {rope['rope_type']!r}; expected 'default' or 'llama3'")
    stretched = tuple(ROPE_INIT_FUNCTIONS["llama3"](found)[0].tolist()) if rope["rope_type"] == "llama3" else None
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
        rope_frequencies=stretched,
        qkv_bias=kind == "qwen2",
    )


def load_parameters(parameters: Mapping[str, Tensor], folder: Path) -> None:
    """Overwrite parameters with those of a folder, in place and in their own dtype. A sharded one reads its part.

    A collective, if there is a process group. Raises FolderError for files that are missing or broken, and for
    parameters that are missing or have another shape.
    """
    import torch.distributed.checkpoint as dcp  # slow to import

    with failing(FolderError, f"{folder}: expected the model's parameters in safetensors"):
        held = {name: parameter.detach() for name, parameter in parameters.items()}
        dcp.load(held, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))


@contextmanager
def failing(kind: type[Exception], text: str) -> Iterator[None]:
    """Raises an error with each rank's reason in a line: torch's own holds their stacks, and does not pickle."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's own is no Exception
        causes = error.failures if isinstance(error, CheckpointException) else {}
        said = "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in causes.items()) or repr(error)
        raise kind(f"{text}: {said}") from None
