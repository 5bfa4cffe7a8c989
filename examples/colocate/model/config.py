"""The shape of a decoder of the Qwen and Llama families, and the names of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_FLOATING = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder. `qk_norm` is True for Qwen3, `qkv_bias` for Qwen2.5, neither for Llama.

    Raises ValueError for sizes that do not fit together.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position: int  # tokens in the longest sequence the rotary tables cover
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    qk_norm: bool = True
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.float32
    rope_frequencies: tuple[float, ...] | None = None  # radians a token, of each pair; None: powers of rope_theta
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _FLOATING:
            raise ValueError(f"dtype is {self.dtype}; expected one of {', '.join(map(str, _FLOATING))}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads is {self.num_heads}; expected a multiple of num_kv_heads, {self.num_kv_heads}")


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's Hugging Face name and shape, in the order of the forward pass."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (hidden,)
        for module, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            shapes[f"{layer}self_attn.{module}.weight"] = (rows, hidden)
            if config.qkv_bias:
                shapes[f"{layer}self_attn.{module}.bias"] = (rows,)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[layer + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        shapes[layer + "mlp.gate_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def random_parameters(
    config: ModelConfig, dtype: torch.dtype, device: str | torch.device, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Initial values of every parameter by name, one at a time: norms one, biases zero, the rest normal."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in parameter_shapes(config).items():
        full = torch.full(shape, 0.0 if name.endswith(".bias") else 1.0, dtype=dtype, device=device)
        if full.dim() > 1:
            full.normal_(0.0, 0.5 if "embed_tokens" in name else shape[1] ** -0.5, generator=generator)
        yield name, full
