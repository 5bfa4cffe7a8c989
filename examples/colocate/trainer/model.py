"""The decoder of the trainer: modules of plain torch, with parameters named as in Hugging Face checkpoints.

Shape suffixes: T tokens of a packed row, N tokens to predict, H query heads, K key-value heads, D head dimension, C
hidden size, P positions of the tables.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..model.config import ModelConfig
from ..model.layers import apply_rotary, flash_attention, rms_norm, swiglu
from .batch import MicroBatch
from .token_logprobs import token_logprobs

_NEEDED = {"window_size", "enable_gqa"}  # options of torch's attention that its first versions lack


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        hidden, bias = config.hidden_size, config.qkv_bias
        self.q_proj = nn.Linear(hidden, config.num_heads * config.head_dim, bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * config.head_dim, bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * config.head_dim, bias)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, hidden, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, batch: MicroBatch) -> Tensor:
        config, length = self.config, len(x_TC)
        projections = self.q_proj, self.k_proj, self.v_proj
        q_THD, k_TKD, v_TKD = (each(x_TC).view(length, -1, config.head_dim) for each in projections)
        if config.qk_norm:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        q_THD, k_TKD = apply_rotary(q_THD, cos_TD, sin_TD), apply_rotary(k_TKD, cos_TD, sin_TD)
        return self.o_proj(packed_attention(q_THD, k_TKD, v_TKD, batch).reshape(length, -1))


def packed_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, batch: MicroBatch) -> Tensor:
    """Causal attention of each sequence to itself: [T, H, D].

    Flash attention over the packed row for half precision on CUDA; elsewhere over sequences padded to the longest.
    """
    if q_THD.is_cuda and q_THD.dtype != torch.float32:
        flash = flash_attention()
        if flash is not None and flash.keywords.keys() >= _NEEDED:
            bounds, longest = batch.bounds, batch.longest
            return cast(Tensor, flash(q_THD, k_TKD, v_TKD, bounds, bounds, longest, longest))

    def padded(x_TKD: Tensor) -> Tensor:
        rows = x_TKD.new_zeros((len(batch.bounds) - 1) * batch.longest, *x_TKD.shape[1:])
        return rows.index_copy(0, batch.slots_T, x_TKD).unflatten(0, (-1, batch.longest)).transpose(1, 2)

    # Padding stands at the end, where no token of the sequence attends to it.
    out = F.scaled_dot_product_attention(
        padded(q_THD), padded(k_TKD), padded(v_TKD), is_causal=True, enable_gqa=q_THD.shape[1] != k_TKD.shape[1]
    )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, batch.slots_T)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TC: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_TC), self.up_proj(x_TC)))


class Block(nn.Module):
    """A layer of the decoder; the unit that FSDP gathers."""

    def __init__(self, config: ModelConfig, is_checkpointed: bool) -> None:
        super().__init__()
        self.is_checkpointed = is_checkpointed
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_TC: Tensor, *rest: Any) -> Tensor:
        if not (self.is_checkpointed and torch.is_grad_enabled()):
            return self._layer(x_TC, *rest)
        # Within the module that FSDP wraps: the layer's parameters are gathered when it is computed again.
        return checkpoint(self._layer, x_TC, *rest, use_reentrant=False, preserve_rng_state=False)

    def _layer(self, x_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, batch: MicroBatch) -> Tensor:
        x_TC = x_TC + self.self_attn(self.input_layernorm(x_TC), cos_TD, sin_TD, batch)
        return x_TC + self.mlp(self.post_attention_layernorm(x_TC))


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig, is_checkpointed: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, is_checkpointed) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, batch: MicroBatch, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x_TC = self.embed_tokens(batch.tokens_T)
        for layer in self.layers:
            x_TC = layer(x_TC, cos_TD, sin_TD, batch)
        return self.norm(x_TC)


class CausalLM(nn.Module):
    """The whole decoder."""

    def __init__(self, config: ModelConfig, is_checkpointed: bool) -> None:
        super().__init__()
        self.model = Backbone(config, is_checkpointed)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tied = config.tie_word_embeddings
        self.tie()

    def tie(self) -> None:
        """Make the head's weight the embedding's, if the config says so. A module that moves separates them."""
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, batch: MicroBatch, cos_PD: Tensor, sin_PD: Tensor, temperature: float, chunk: int, with_statistics: bool
    ) -> Tensor:
        """Log-probabilities of the tokens to predict, fp32 [1, N] or [3, N]: see `token_logprobs`."""
        hidden_TC = self.model(batch, cos_PD[batch.positions_T], sin_PD[batch.positions_T])
        hidden_NC = hidden_TC.index_select(0, batch.predictors_N)
        return token_logprobs(hidden_NC, self.lm_head.weight, batch.targets_N, temperature, chunk, with_statistics)


def initial_deviation(name: str, shape: torch.Size) -> float | None:
    """The standard deviation of a parameter's initial values, of mean zero; None for norms (1) and biases (0)."""
    if len(shape) == 1:
        return None
    return 0.5 if "embed_tokens" in name else float(shape[1]) ** -0.5
