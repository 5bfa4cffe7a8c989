"""The decoder in plain torch, on fused weights that live in a region.

Shape suffixes: T tokens, C hidden size, V vocabulary, H query heads, K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.config import ModelConfig, parameter_shapes
from ..model.layers import apply_rotary, rms_norm, rotary_tables, swiglu
from .attention import Attention

_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


class Decoder:
    """Weights and forward pass.

    `weights` holds the tensors as the forward pass uses them, q, k and v in one, gate and up in one; `parameters`
    shows each Hugging Face name as the part of them that it is.
    """

    def __init__(self, config: ModelConfig, weights: Any, buffers: Any) -> None:
        """Allocate in two regions: parameters in `weights`, the rotary tables in `buffers`."""
        self.config = config
        self.weights: dict[str, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        rows: dict[str, int] = {}
        shapes = parameter_shapes(config)
        for name, shape in shapes.items():
            rows[_fused(name)] = rows.get(_fused(name), 0) + shape[0]
        filled = dict.fromkeys(rows, 0)
        for name, shape in shapes.items():
            fused = _fused(name)
            if fused not in self.weights:
                self.weights[fused] = weights.empty((rows[fused], *shape[1:]), config.dtype)
            self.parameters[name] = self.weights[fused].narrow(0, filled[fused], shape[0])
            filled[fused] += shape[0]
        table_shape = (config.max_position, config.head_dim // 2)
        self.cos_PD: Tensor = buffers.empty(table_shape, torch.float32)
        self.sin_PD: Tensor = buffers.empty(table_shape, torch.float32)
        cos, sin = rotary_tables(config.max_position, config.head_dim, config.rope_theta)
        self.cos_PD.copy_(cos)
        self.sin_PD.copy_(sin)
        self._awaited = set(shapes)

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Random weights: norms one, the rest normal with deviation 0.02."""
        generator = torch.Generator(self.cos_PD.device).manual_seed(seed)
        for weight in self.weights.values():
            if weight.dim() == 1:
                weight.fill_(1.0)
            else:
                weight.normal_(0.0, 0.02, generator=generator)

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], partial: bool = False) -> None:
        """Copy tensors in by Hugging Face name, each checked before its first byte is written.

        The tensors may be on any device. With `partial` more calls follow, and only the last one, without it, asks
        that every name has come. Raises ValueError for a name that is unknown, comes twice or is missing, and for
        another shape or dtype than the config's; after that the load starts over.
        """
        complete = False
        try:
            for name, tensor in named_tensors:
                self._check(name, tensor)
                self.parameters[name].copy_(tensor)
                self._awaited.discard(name)
            if not partial and self._awaited:
                raise ValueError(f"weights are missing: {_some(self._awaited)}; expected every parameter of the model")
            complete = True
        finally:
            if not (complete and partial):
                self._awaited = set(self.parameters)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, C] after the last norm, of tokens laid end to end; sequences are attention's business."""
        config, weights = self.config, self.weights
        cos_TD, sin_TD = self.cos_PD[positions_T], self.sin_PD[positions_T]
        x_TC = F.embedding(tokens_T, weights["model.embed_tokens.weight"])
        for index in range(config.num_layers):
            layer = f"model.layers.{index}."
            normed = rms_norm(x_TC, weights[layer + "input_layernorm.weight"], config.norm_eps)
            x_TC = x_TC + self._attention(index, normed, cos_TD, sin_TD, attention)
            normed = rms_norm(x_TC, weights[layer + "post_attention_layernorm.weight"], config.norm_eps)
            gate, up = F.linear(normed, weights[layer + "mlp.gate_up.weight"]).chunk(2, dim=-1)
            x_TC = x_TC + F.linear(swiglu(gate, up), weights[layer + "mlp.down_proj.weight"])
        return rms_norm(x_TC, weights["model.norm.weight"], config.norm_eps)

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] in the model's dtype."""
        tied = self.config.tie_word_embeddings
        return F.linear(hidden_TC, self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"])

    def _attention(self, index: int, x_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, attention: Attention) -> Tensor:
        config, weights, prefix = self.config, self.weights, f"model.layers.{index}.self_attn."
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = F.linear(x_TC, weights[prefix + "qkv.weight"]).view(-1, heads + 2 * kv_heads, head_dim)
        q_THD, k_TKD, v_TKD = qkv.split((heads, kv_heads, kv_heads), dim=1)
        if config.qk_norm:
            q_THD = rms_norm(q_THD, weights[prefix + "q_norm.weight"], config.norm_eps)
            k_TKD = rms_norm(k_TKD, weights[prefix + "k_norm.weight"], config.norm_eps)
        q_THD, k_TKD = apply_rotary(q_THD, cos_TD, sin_TD), apply_rotary(k_TKD, cos_TD, sin_TD)
        return F.linear(attention(index, q_THD, k_TKD, v_TKD).flatten(1), weights[prefix + "o_proj.weight"])

    def _check(self, name: str, tensor: Tensor) -> None:
        target = self.parameters.get(name)
        if target is None:
            raise ValueError(f"weight {name!r} is unexpected; expected one of {_some(self._awaited)}")
        if name not in self._awaited:
            raise ValueError(f"weight {name!r} comes twice; expected each once")
        if tensor.shape != target.shape or tensor.dtype != target.dtype:
            raise ValueError(
                f"weight {name!r} is {tensor.dtype} {tuple(tensor.shape)}; "
                f"expected {target.dtype} {tuple(target.shape)}"
            )


def _fused(name: str) -> str:
    for part, fused in _FUSED.items():
        name = name.replace(part, fused)
    return name


def _some(names: set[str]) -> str:
    shown = sorted(names)[:4]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
