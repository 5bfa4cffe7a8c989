"""Qwen3 and Llama: pre-norm decoders with rotary positions and a gated MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.config import ModelConfig, parameter_shapes
from ..model.layers import rotary_tables
from . import ops
from .model import Model, Parameter, State
from .parallel import ONE_RANK, Parallel, Shard

_FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
_ROW_PARALLEL = ("o_proj", "down_proj")


class Decoder(Model):
    """A layer is q, k and v in one product, gate and up in another. Shape suffixes as in `model`; P positions."""

    embedding = "model.embed_tokens.weight"
    config: ModelConfig

    def __init__(self, config: ModelConfig, weights: Any, buffers: Any, parallel: Parallel = ONE_RANK) -> None:
        """See `Model`; the constants are the rotary tables."""
        super().__init__(config, weights, buffers, parallel)
        tables = rotary_tables(config.max_position, config.head_dim, config.rope_theta, scaling=config.rope_scaling)
        for name, table_PD in zip(("cos", "sin"), tables):
            self.constants[name] = buffers.empty(tuple(table_PD.shape), torch.float32)
            self.constants[name].copy_(table_PD)

    def layout(self) -> dict[str, Parameter]:
        """See `Model`."""
        layout = {}
        for name, shape in parameter_shapes(self.config).items():
            *path, module, _ = name.split(".")
            fused = _FUSED.get(module)
            shard = Shard(0) if fused else Shard(1) if module in _ROW_PARALLEL else None
            if module == "lm_head" and self.shares_vocabulary:
                shard = Shard(0)
            layout[name] = Parameter(shape, shard, fused and ".".join((*path, fused, "weight")))
        return layout

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> State:
        """See `Model`; positions come in with every layer's rotation."""
        return None, F.embedding(tokens_T, self.weights[self.embedding])

    def before_attention(self, layer: int, state: State, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `Model`."""
        weights, prefix = self.weights, f"model.layers.{layer}."
        attention = prefix + "self_attn."
        normed_TC, residual_TC = self._norm(state, prefix + "input_layernorm.weight")
        qkv = F.linear(normed_TC, weights[attention + "qkv.weight"]).unflatten(1, (-1, self.config.head_dim))
        q_THD, k_TKD, v_TKD = qkv.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        q_THD, k_TKD = ops.rotate(
            q_THD,
            k_TKD,
            weights.get(attention + "q_norm.weight"),
            weights.get(attention + "k_norm.weight"),
            self.config.norm_eps,
            self.constants["cos"],
            self.constants["sin"],
            positions_T,
        )
        return q_THD, k_TKD, v_TKD, residual_TC

    def after_attention(self, layer: int, residual_TC: Tensor, out_THD: Tensor) -> State:
        """See `Model`."""
        weights, prefix = self.weights, f"model.layers.{layer}."
        delta_TC = F.linear(out_THD.flatten(1), weights[prefix + "self_attn.o_proj.weight"])
        state = residual_TC, self.parallel.all_reduce(delta_TC)
        normed_TC, residual_TC = self._norm(state, prefix + "post_attention_layernorm.weight")
        inner = ops.swiglu(F.linear(normed_TC, weights[prefix + "mlp.gate_up.weight"]))
        delta_TC = F.linear(inner, weights[prefix + "mlp.down_proj.weight"])
        return residual_TC, self.parallel.all_reduce(delta_TC)

    def finish(self, state: State) -> Tensor:
        """See `Model`."""
        return self._norm(state, "model.norm.weight")[0]

    def _norm(self, state: State, name: str) -> tuple[Tensor, Tensor]:
        residual_TC, delta_TC = state
        return ops.add_rms_norm(delta_TC, residual_TC, self.weights[name], self.config.norm_eps)
