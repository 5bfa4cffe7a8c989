"""Qwen2.5, Qwen3 and Llama: weights by Hugging Face name in a region, and the forward pass in pieces.

Shape suffixes: T tokens, C hidden size, V vocabulary, H query heads, K key-value heads, D head dimension, P positions.
H and K are those of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model import ModelConfig, fused_shapes, weight_layout
from ..model.layers import rotary_tables
from . import ops
from .tensor_parallel import ONE_RANK, Parallel

# One layer's attention, (layer, q_THD, k_TKD, v_TKD) -> [T, H, D]: writes k and v where later steps find them, attends.
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# The residual stream, None before there is any, and the last layer's addend: kept apart so that the sum and the
# norm after it are one kernel.
State = tuple[Tensor | None, Tensor]

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Decoder:
    """Weights and forward pass of one rank.

    layout      each Hugging Face name's slice, and its place in `weights`
    weights     the tensors as the forward pass uses them: query, key and value in one, gate and up in another
    parameters  each Hugging Face name's part of `weights`, a view
    tables      cosine and sine of the rotary embedding, [P, D / 2]
    num_heads, num_kv_heads  of this rank
    """

    def __init__(self, config: ModelConfig, weights: Any, buffers: Any, parallel: Parallel = ONE_RANK) -> None:
        """Allocate in two regions: parameters in `weights`, constants in `buffers`."""
        self.config, self.parallel = config, parallel
        self.layout = weight_layout(config, parallel.rank, parallel.size)
        self.num_heads, self.num_kv_heads = config.num_heads // parallel.size, config.num_kv_heads // parallel.size
        shapes = fused_shapes(self.layout)
        self.weights: dict[str, Tensor] = {name: weights.empty(each, config.dtype) for name, each in shapes.items()}
        self.parameters = {name: part.within(self.weights) for name, part in self.layout.items()}
        self.tables: ops.Pair = tuple(
            buffers.empty(tuple(each.shape), each.dtype).copy_(each) for each in rotary_tables(config)
        )
        # A vocabulary that the ranks cannot share is every rank's own. A tied embedding is whole on each of them.
        self._shares_vocabulary = config.vocab_size % parallel.size == 0
        self._head_VC = self.parameters.get(_HEAD, self.parameters[_EMBEDDING])
        if config.tie_word_embeddings and self._shares_vocabulary:
            self._head_VC = self._head_VC.chunk(parallel.size)[parallel.rank]

    def embed(self, tokens_T: Tensor) -> State:
        """The first state, of tokens laid end to end."""
        return None, F.embedding(tokens_T, self.weights[_EMBEDDING])

    def before_attention(self, layer: int, state: State, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q_THD, k_TKD, v_TKD, residual_TC): the inputs of this rank's attention, and the residual around it."""
        weights, prefix = self.weights, f"model.layers.{layer}."
        attention = prefix + "self_attn."
        normed_TC, residual_TC = self._norm(state, prefix + "input_layernorm.weight")
        qkv = F.linear(normed_TC, weights[attention + "qkv_proj.weight"], weights.get(attention + "qkv_proj.bias"))
        heads = self.num_heads, self.num_kv_heads
        qk_THD, v_TKD = qkv.unflatten(1, (-1, self.config.head_dim)).tensor_split([sum(heads)], dim=1)
        norms_D = None
        if self.config.qk_norm:
            norms_D = weights[attention + "q_norm.weight"], weights[attention + "k_norm.weight"]
        qk_THD = ops.rotate(qk_THD, self.num_heads, norms_D, self.tables, positions_T, self.config.norm_eps)
        q_THD, k_TKD = qk_THD.split(heads, dim=1)
        return q_THD, k_TKD, v_TKD, residual_TC

    def after_attention(self, layer: int, residual_TC: Tensor, out_THD: Tensor) -> State:
        """The state that the next layer gets."""
        weights, prefix = self.weights, f"model.layers.{layer}."
        delta_TC = F.linear(out_THD.flatten(1), weights[prefix + "self_attn.o_proj.weight"])
        state = residual_TC, self.parallel.all_reduce(delta_TC)
        normed_TC, residual_TC = self._norm(state, prefix + "post_attention_layernorm.weight")
        inner = ops.swiglu(F.linear(normed_TC, weights[prefix + "mlp.gate_up_proj.weight"]))
        delta_TC = F.linear(inner, weights[prefix + "mlp.down_proj.weight"])
        return residual_TC, self.parallel.all_reduce(delta_TC)

    def finish(self, state: State) -> Tensor:
        """Hidden states [T, C], after the last norm."""
        return self._norm(state, "model.norm.weight")[0]

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, C] of tokens laid end to end; which sequence each is of is attention's business."""
        state = self.embed(tokens_T)
        for layer in range(self.config.num_layers):
            q_THD, k_TKD, v_TKD, residual_TC = self.before_attention(layer, state, positions_T)
            state = self.after_attention(layer, residual_TC, attention(layer, q_THD, k_TKD, v_TKD))
        return self.finish(state)

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] in the model's dtype, of the whole vocabulary on every rank."""
        logits_TV = F.linear(hidden_TC, self._head_VC)
        return self.parallel.gather_last(logits_TV) if self._shares_vocabulary else logits_TV

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy full tensors in by Hugging Face name; a rank takes its part of them."""
        for name, tensor in named_tensors:
            self.parameters[name].copy_(self.layout[name].of(tensor))

    def _norm(self, state: State, name: str) -> tuple[Tensor, Tensor]:
        residual_TC, delta_TC = state
        return ops.add_rms_norm(delta_TC, residual_TC, self.weights[name], self.config.norm_eps)
