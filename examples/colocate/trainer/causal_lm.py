"""The decoder of the trainer in plain torch, with parameters named as in Hugging Face checkpoints.

Shape suffixes: T tokens of a packed row, N tokens to predict, H query heads, K key-value heads, D head dimension, C
hidden size, V vocabulary, P positions of the tables.
"""

from __future__ import annotations

import inspect
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..model.config import ModelConfig, parameter_shapes
from ..model.layers import apply_rotary, rms_norm, swiglu
from .batch import MicroBatch


class CausalLM(nn.Module):
    """The whole decoder: modules without methods, by the parts of the parameters' names, but for its layers."""

    def __init__(self, config: ModelConfig, is_checkpointed: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens, self.config = nn.Module(), config
        self.model.layers = nn.ModuleList(Layer(config, is_checkpointed) for _ in range(config.num_layers))
        for name, shape in parameter_shapes(config).items():
            *path, last = name.split(".")
            module: Any = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module._modules[part]
            module.register_parameter(last, nn.Parameter(torch.empty(shape)))

    @property
    def layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.model.layers)

    def forward(
        self, batch: MicroBatch, cos_PD: Tensor, sin_PD: Tensor, temperature: float, chunk: int, with_statistics: bool
    ) -> Tensor:
        """Log-probabilities of the tokens to predict, fp32 [1, N] or [3, N]: see `token_logprobs`."""
        weights = dict(self.named_parameters())
        embedding_VC = weights["model.embed_tokens.weight"]
        x_TC = F.embedding(batch.tokens_T, embedding_VC)
        for layer in self.layers:
            x_TC = layer(x_TC, cos_PD[batch.positions_T], sin_PD[batch.positions_T], batch)
        x_TC = rms_norm(x_TC, weights["model.norm.weight"], self.config.norm_eps)
        hidden_NC, head_VC = x_TC.index_select(0, batch.predictors_N), weights.get("lm_head.weight", embedding_VC)
        return token_logprobs(hidden_NC, head_VC, batch.targets_N, temperature, chunk, with_statistics)


class Layer(nn.Module):
    """A layer of the decoder; the unit that FSDP gathers."""

    def __init__(self, config: ModelConfig, is_checkpointed: bool) -> None:
        super().__init__()
        self.config, self.is_checkpointed = config, is_checkpointed

    def forward(self, x_TC: Tensor, *rest: Any) -> Tensor:
        if not (self.is_checkpointed and torch.is_grad_enabled()):
            return self._layer(x_TC, *rest)
        # Within the module that FSDP wraps: the layer's parameters are gathered when it is computed again.
        return checkpoint(self._layer, x_TC, *rest, use_reentrant=False, preserve_rng_state=False)

    def _layer(self, x_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, batch: MicroBatch) -> Tensor:
        config, weights = self.config, dict(self.named_parameters())

        def linear(name: str, x: Tensor) -> Tensor:
            return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

        def norm(name: str, x: Tensor) -> Tensor:
            return rms_norm(x, weights[f"{name}.weight"], config.norm_eps)

        normed_TC = norm("input_layernorm", x_TC)
        q_THD, k_TKD, v_TKD = (
            linear(f"self_attn.{each}_proj", normed_TC).unflatten(1, (-1, config.head_dim)) for each in "qkv"
        )
        if config.qk_norm:
            q_THD, k_TKD = norm("self_attn.q_norm", q_THD), norm("self_attn.k_norm", k_TKD)
        q_THD, k_TKD = apply_rotary(q_THD, cos_TD, sin_TD), apply_rotary(k_TKD, cos_TD, sin_TD)
        x_TC = x_TC + linear("self_attn.o_proj", packed_attention(q_THD, k_TKD, v_TKD, batch).flatten(1))
        normed_TC = norm("post_attention_layernorm", x_TC)
        inner = swiglu(linear("mlp.gate_proj", normed_TC), linear("mlp.up_proj", normed_TC))
        return x_TC + linear("mlp.down_proj", inner)


def packed_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, batch: MicroBatch) -> Tensor:
    """Causal attention of each sequence to itself: [T, H, D].

    Flash attention over the packed row for half precision on CUDA; elsewhere over sequences padded to the longest.
    """
    if q_THD.is_cuda and q_THD.dtype != torch.float32 and (flash := flash_attention()):
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


def token_logprobs(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, temperature: float, chunk: int, with_statistics: bool
) -> Tensor:
    """Log-probability of each target under softmax(hidden @ weight.T / temperature): fp32 [1, N], in nats.

    `with_statistics`: [3, N], with the entropy of each distribution and the variance of -log p under it, both without a
    gradient. The logits of `chunk` tokens are in memory at once, also in the backward pass, which computes them again.
    """
    parts = [
        checkpoint(
            _chunk, *rows, weight_VC, temperature, with_statistics, use_reentrant=False, preserve_rng_state=False
        )
        for rows in zip(hidden_NC.split(chunk), targets_N.split(chunk))
    ]
    return torch.cat(parts, dim=1)


def _chunk(
    hidden_NC: Tensor, targets_N: Tensor, weight_VC: Tensor, temperature: float, with_statistics: bool
) -> Tensor:
    logits_NV = F.linear(hidden_NC, weight_VC).float() / temperature
    total_N = logits_NV.logsumexp(-1)
    logprobs_N = logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) - total_N
    if not with_statistics:
        return logprobs_N[None]
    with torch.no_grad():
        logprobs_NV = logits_NV - total_N[:, None]
        probabilities_NV = logprobs_NV.exp()
        entropy_N = -(probabilities_NV * logprobs_NV).sum(-1)
        variance_N = (probabilities_NV * (logprobs_NV + entropy_N[:, None]).square()).sum(-1)
    return torch.stack((logprobs_N, entropy_N, variance_N))


@cache
def flash_attention() -> partial[Any] | None:
    """Torch's attention of sequences laid end to end, causal and of grouped queries; None in a version without these.

    The import takes a second, and so comes with the first use.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    options: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True}
    known = inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, **options) if options.keys() <= known.keys() else None
