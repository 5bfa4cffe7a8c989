"""The decoder of the trainer: modules of plain torch, with parameters named as in Hugging Face checkpoints.

Shape suffixes: B sequences, T positions, P positions of the tables, H query heads, K key-value heads, D head dimension,
C hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..model.config import ModelConfig
from ..model.layers import apply_rotary, rms_norm, swiglu


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
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        config, (rows, length) = self.config, x_BTC.shape[:2]
        q_BTHD = self.q_proj(x_BTC).view(rows, length, config.num_heads, config.head_dim)
        k_BTKD = self.k_proj(x_BTC).view(rows, length, config.num_kv_heads, config.head_dim)
        v_BTKD = self.v_proj(x_BTC).view(rows, length, config.num_kv_heads, config.head_dim)
        if config.qk_norm:
            q_BTHD, k_BTKD = self.q_norm(q_BTHD), self.k_norm(k_BTKD)
        q_BTHD, k_BTKD = apply_rotary(q_BTHD, cos_TD, sin_TD), apply_rotary(k_BTKD, cos_TD, sin_TD)
        out_BHTD = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            k_BTKD.transpose(1, 2),
            v_BTKD.transpose(1, 2),
            is_causal=True,
            enable_gqa=config.num_heads != config.num_kv_heads,
        )
        out_BTC: Tensor = self.o_proj(out_BHTD.transpose(1, 2).reshape(rows, length, -1))
        return out_BTC


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out_BTC: Tensor = self.down_proj(swiglu(self.gate_proj(x_BTC), self.up_proj(x_BTC)))
        return out_BTC


class Block(nn.Module):
    """A layer of the decoder; the unit that FSDP gathers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x_BTC = x_BTC + self.self_attn(self.input_layernorm(x_BTC), cos_TD, sin_TD)
        out_BTC: Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return out_BTC


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, tokens_BT: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x_BTC = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC, cos_TD, sin_TD)
        out_BTC: Tensor = self.norm(x_BTC)
        return out_BTC


class CausalLM(nn.Module):
    """The whole decoder, in fp32: the optimizer works on it, and the engine gets its dtype when weights are sent."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tied = config.tie_word_embeddings
        self.tie()

    def tie(self) -> None:
        """Make the head's weight the embedding's, if the config ties them. Needed again after a module has moved, since
        torch separates them then.
        """
        if self.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BT: Tensor, cos_PD: Tensor, sin_PD: Tensor) -> Tensor:
        """Logits [B, T, V]. The tables are those of rotary_tables(), for T positions or more."""
        length = tokens_BT.shape[1]
        if length > len(cos_PD):
            raise ValueError(f"sequences have {length} tokens; expected at most max_position, {len(cos_PD)}")
        hidden_BTC = self.model(tokens_BT, cos_PD[:length], sin_PD[:length])
        logits_BTV: Tensor = self.lm_head(hidden_BTC)
        return logits_BTV


def initial_deviation(name: str, shape: torch.Size) -> float | None:
    """The standard deviation of a parameter's initial values, of mean zero; None for norms (1) and biases (0)."""
    if len(shape) == 1:
        return None
    return 0.5 if "embed_tokens" in name else float(shape[1]) ** -0.5
