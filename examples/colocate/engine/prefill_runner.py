"""Prefill in pieces: the parts between two attentions as CUDA graphs, for a few token counts, attention called between.

Attention cannot be captured with them, since its kernels are chosen by the lengths of the step's sequences. The rest of
a layer depends on the number of tokens alone, which is padded to the next size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .config import padded_to
from .graph_pool import Graph, GraphPool
from .memory import borrowed
from .model import Attention, Model


@dataclass(frozen=True)
class _Piece:
    """From one attention to the next. Its result: q, k and v for the attention after it, or the last hidden state.

    They are views that own nothing: a later piece of the same pool may use their memory again once they are read.
    """

    graph: Graph
    outputs: tuple[Tensor, ...]


class PrefillRunner:
    """Runs a model over the tokens of a prefill, by its pieces' graphs or by calling it.

    Both ways pad the tokens to the same size, so both run the same kernels.
    """

    def __init__(self, model: Model, sizes: tuple[int, ...], buffers: Any, pool: GraphPool) -> None:
        """`sizes`: token counts, ascending. Static inputs for the largest are made in the region `buffers`."""
        self.model, self.sizes, self.pool = model, sizes, pool
        self.pieces: dict[int, list[_Piece]] = {}
        self.replays = 0
        if self.sizes:
            config, most = model.config, self.sizes[-1]
            self.tokens_T: Tensor = buffers.empty((most,), torch.int32)
            self.positions_T: Tensor = buffers.empty((most,), torch.int32)
            self.attended_THD: Tensor = buffers.empty((most, model.num_heads, config.head_dim), config.dtype)
            for tensor in (self.tokens_T, self.positions_T, self.attended_THD):
                tensor.zero_()

    def addresses(self) -> dict[str, int]:
        """Where the static tensors are."""
        names = ("tokens_T", "positions_T", "attended_THD") if self.sizes else ()
        return {f"prefill_{name}": getattr(self, name).data_ptr() for name in names}

    def padded_size(self, count: int) -> int:
        """The size that so many tokens are padded to: the next of `sizes`, or their own where there is none."""
        return padded_to(count, self.sizes)

    def run(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention, use_graphs: bool) -> Tensor:
        """Hidden states of the tokens. Padding's mean nothing."""
        size = len(tokens_T)
        if not (use_graphs and size in self.pieces):
            return self.model.forward(tokens_T, positions_T, partial(_attend_padded, attention))
        self.tokens_T[:size].copy_(tokens_T)
        self.positions_T[:size].copy_(positions_T)
        *layers, last = self.pieces[size]
        for layer, piece in enumerate(layers):
            piece.graph.replay()
            attended_THD = attention(layer, *piece.outputs)
            self.attended_THD[: len(attended_THD)].copy_(attended_THD)
        last.graph.replay()
        self.replays += 1
        return last.outputs[0]

    def capture(self) -> None:
        """Capture every size, the largest first. The pool is open."""
        self.pool.warm_up([partial(self._call_pieces, size) for size in reversed(self.sizes)])
        for size in reversed(self.sizes):
            with self.pool.account(f"prefill {size}"):
                self.pieces[size] = self._capture(size)

    def release(self) -> None:
        """Drop the graphs."""
        self.pieces.clear()

    def _capture(self, size: int) -> list[_Piece]:
        pieces: list[_Piece] = []
        kept: tuple[Tensor, ...] = ()  # of the last piece alone, so that the next but one has its memory
        for index in range(self.model.config.num_layers + 1):
            residual_TC = kept[-1] if kept else None
            graph, kept = self.pool.capture(partial(self._piece, index, size, residual_TC))
            pieces.append(_Piece(graph, tuple(borrowed(each) for each in kept[:3])))
        return pieces

    def _call_pieces(self, size: int) -> None:
        residual_TC: Tensor | None = None
        for index in range(self.model.config.num_layers + 1):
            residual_TC = self._piece(index, size, residual_TC)[-1]

    def _piece(self, index: int, size: int, residual_TC: Tensor | None) -> tuple[Tensor, ...]:
        """(q, k, v, residual), or (hidden,) for the last one."""
        model = self.model
        positions_T = self.positions_T[:size]
        if residual_TC is None:
            state = model.embed(self.tokens_T[:size], positions_T)
        else:
            state = model.after_attention(index - 1, residual_TC, self.attended_THD[:size])
        if index == model.config.num_layers:
            return (model.finish(state),)
        return model.before_attention(index, state, positions_T)


def _attend_padded(attention: Attention, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Attention over real tokens. The rows of padding are zero."""
    out_THD = attention(layer, q_THD, k_TKD, v_TKD)
    padding = len(q_THD) - len(out_THD)
    return F.pad(out_THD, (0, 0, 0, 0, 0, padding)) if padding else out_THD
