"""Prefill in pieces: the parts between two attentions as CUDA graphs, for a few token counts, attention called between.

Attention cannot be captured with them, since its kernels are chosen by the lengths of the step's sequences. The rest of
a layer depends on the number of tokens alone, which is padded to the next size.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .decoder import Attention, Decoder
from .engine_memory import EngineMemory, borrowed

# The graph from one attention to the next, and its result: q, k and v for the attention after it, or the last hidden
# state. They are views that own nothing: a later piece of the same pool may use their memory once they are read.
_Piece = tuple[Any, tuple[Tensor, ...]]


class PrefillGraphs:
    """Runs a model over the tokens of a prefill, by its pieces' graphs or by calling it: the same kernels."""

    def __init__(self, model: Decoder, sizes: tuple[int, ...], buffers: Any) -> None:
        """`sizes`: token counts, ascending. Static inputs for the largest are made in the region `buffers`."""
        self.model, self.sizes = model, sizes
        self.pieces: dict[int, list[_Piece]] = {}
        self.inputs: dict[str, Tensor] = {}
        if sizes:
            attended = (sizes[-1], model.num_heads, model.config.head_dim)
            self.inputs["tokens_T"] = buffers.empty((sizes[-1],), torch.int32).zero_()
            self.inputs["positions_T"] = buffers.empty((sizes[-1],), torch.int32).zero_()
            self.inputs["attended_THD"] = buffers.empty(attended, model.config.dtype).zero_()

    def run(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention, use_graphs: bool) -> Tensor:
        """Hidden states of the tokens, with graphs if those of their number are there. Padding's mean nothing."""
        size = len(tokens_T)
        if not use_graphs:
            return self.model.forward(tokens_T, positions_T, attention)
        self.inputs["tokens_T"][:size].copy_(tokens_T)
        self.inputs["positions_T"][:size].copy_(positions_T)
        *layers, last = self.pieces[size]
        for layer, (graph, outputs) in enumerate(layers):
            graph.replay()
            self.inputs["attended_THD"][:size].copy_(attention(layer, *outputs))
        last[0].replay()
        return last[1][0]

    def capture(self, memory: EngineMemory) -> None:
        """Capture every size, the largest first."""
        sizes = self.sizes[::-1]
        memory.warm_up([partial(self._forward, size) for size in sizes])
        for size in sizes:
            pieces: list[_Piece] = []
            residual_TC: Tensor | None = None
            for index in range(self.model.config.num_layers + 1):
                # Only the last piece's results are kept, so that the next but one has the memory of this one's.
                graph, kept = memory.capture(partial(self._piece, index, size, residual_TC))
                residual_TC = kept[-1]
                pieces.append((graph, tuple(borrowed(each) for each in kept[:3])))
            self.pieces[size] = pieces

    def _forward(self, size: int) -> None:
        """The work of all pieces."""
        tokens_T, positions_T, attended_THD = (each[:size] for each in self.inputs.values())
        self.model.forward(tokens_T, positions_T, lambda *_: attended_THD)

    def _piece(self, index: int, size: int, residual_TC: Tensor | None) -> tuple[Tensor, ...]:
        """(q, k, v, residual), or (hidden,) for the last one."""
        model, (tokens_T, positions_T, attended_THD) = self.model, (each[:size] for each in self.inputs.values())
        if residual_TC is None:
            state = model.embed(tokens_T)
        else:
            state = model.after_attention(index - 1, residual_TC, attended_THD)
        if index == model.config.num_layers:
            return (model.finish(state),)
        return model.before_attention(index, state, positions_T)
