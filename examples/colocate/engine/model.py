"""The common part of all models: weights by Hugging Face name in a region, loading, and the forward pass in pieces.

Shape suffixes: T tokens, C hidden size, V vocabulary, H query heads, K key-value heads, D head dimension; H, K and V
are those of this rank around attention, and of the full model elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .parallel import ONE_RANK, Parallel, Shard

# One layer's attention, (layer, q_THD, k_TKD, v_TKD) -> [T, H, D]: writes k and v where later steps find them, attends.
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# The residual stream, None before there is any, and the last layer's addend: kept apart so that the sum and the
# norm after it are one kernel.
State = tuple[Tensor | None, Tensor]

_DEVIATION = 0.02  # of random weights
_HEAD_ROWS = 64  # the output's matrix has a multiple of it: a product with GPT-2's 50257 takes six times as long


class Config(Protocol):
    """The fields of a model's configuration that the engine needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def max_position(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class Parameter:
    """A parameter of a checkpoint, and where the model keeps it."""

    shape: tuple[int, ...]  # in full
    shard: Shard | None = None  # the part of a rank; None: all
    weight: str | None = None  # the weight that it is some rows of, with others; None: it is one by itself


class Model(ABC):
    """Weights and forward pass of one rank.

    config      of the full model
    weights     the tensors as the forward pass uses them, some of them several parameters in one, the output's padded
    parameters  each Hugging Face name's part of `weights`, as far as this rank holds it
    constants   tables that are computed from the configuration, not loaded
    num_heads, num_kv_heads  of this rank
    """

    embedding: ClassVar[str]  # the parameter whose rows stand for tokens, in the output too if there is no lm_head
    config: Config

    def __init__(self, config: Config, weights: Any, buffers: Any, parallel: Parallel = ONE_RANK) -> None:
        """Allocate in two regions: parameters in `weights`, constants in `buffers`.

        Raises ValueError for sizes that the ranks cannot share.
        """
        parallel.check(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, intermediate_size=config.intermediate_size
        )
        self.config, self.parallel = config, parallel
        self.num_heads, self.num_kv_heads = config.num_heads // parallel.size, config.num_kv_heads // parallel.size
        self.weights: dict[str, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        self.constants: dict[str, Tensor] = {}
        # A vocabulary that the ranks cannot share is every rank's own.
        self.shares_vocabulary = parallel.size > 1 and config.vocab_size % parallel.size == 0
        self._layout = self.layout()
        self._head = "lm_head.weight" if "lm_head.weight" in self._layout else self.embedding
        self._awaited = set(self._layout)
        self._allocate(weights, config.dtype)
        self._head_VC = self.weights[self._head]
        if self.shares_vocabulary and self._head == self.embedding:
            self._head_VC = self.parameters[self.embedding].chunk(parallel.size)[parallel.rank]

    @abstractmethod
    def layout(self) -> dict[str, Parameter]:
        """Every parameter by its Hugging Face name, in the order of the forward pass."""

    @abstractmethod
    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> State:
        """The first state, of tokens laid end to end."""

    @abstractmethod
    def before_attention(self, layer: int, state: State, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(q_THD, k_TKD, v_TKD, residual_TC): the inputs of this rank's attention, and the residual around it."""

    @abstractmethod
    def after_attention(self, layer: int, residual_TC: Tensor, out_THD: Tensor) -> State:
        """The state that the next layer gets."""

    @abstractmethod
    def finish(self, state: State) -> Tensor:
        """Hidden states [T, C], after the last norm."""

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, C] of tokens laid end to end; which sequence each is of is attention's business."""
        state = self.embed(tokens_T, positions_T)
        for layer in range(self.config.num_layers):
            q_THD, k_TKD, v_TKD, residual_TC = self.before_attention(layer, state, positions_T)
            state = self.after_attention(layer, residual_TC, attention(layer, q_THD, k_TKD, v_TKD))
        return self.finish(state)

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """Logits [T, V] in the model's dtype, of the whole vocabulary on every rank."""
        logits_TV = F.linear(hidden_TC, self._head_VC)
        if self.shares_vocabulary:
            return self.parallel.gather_last(logits_TV)
        return logits_TV[:, : self.config.vocab_size]

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Random weights: norms one, biases zero, the rest normal with deviation 0.02.

        The full model is the same for every number of ranks.
        """
        generator = torch.Generator(self._head_VC.device)
        for index, (name, parameter) in enumerate(self._layout.items()):
            part = self.parameters[name]
            if len(parameter.shape) == 1:
                part.fill_(0.0 if name.endswith(".bias") else 1.0)
                continue
            generator.manual_seed((seed * 1_000_003 + index) % 2**32)
            if part.shape == parameter.shape:
                part.normal_(0.0, _DEVIATION, generator=generator)
            else:
                full = torch.empty(parameter.shape, dtype=part.dtype, device=part.device)
                self.parallel.copy_part(full.normal_(0.0, _DEVIATION, generator=generator), parameter.shard, part)

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], partial: bool = False) -> None:
        """Copy tensors in by Hugging Face name, each checked before its first byte is written.

        The tensors are full ones, on any device; a rank takes its part of them. With `partial` more calls follow, and
        only the last one, without it, asks that every name has come. Raises ValueError for a name that is unknown,
        comes twice or is missing, and for another shape or dtype than the config's; after that the load starts over.
        """
        complete = False
        try:
            for name, tensor in named_tensors:
                self._check(name, tensor)
                self.parallel.copy_part(tensor, self._layout[name].shard, self.parameters[name])
                self._awaited.discard(name)
            if not partial and self._awaited:
                raise ValueError(f"weights are missing: {_some(self._awaited)}; expected every parameter of the model")
            complete = True
        finally:
            if not (complete and partial):
                self._awaited = set(self._layout)

    def _allocate(self, region: Any, dtype: torch.dtype) -> None:
        shapes = {name: self.parallel.part_shape(each.shape, each.shard) for name, each in self._layout.items()}
        rows: dict[str, int] = {}
        for name, shape in shapes.items():
            weight = self._layout[name].weight or name
            rows[weight] = rows.get(weight, 0) + shape[0]
        if not self.shares_vocabulary:
            rows[self._head] = -(-rows[self._head] // _HEAD_ROWS) * _HEAD_ROWS
        filled = dict.fromkeys(rows, 0)
        for name, shape in shapes.items():
            weight = self._layout[name].weight or name
            if weight not in self.weights:
                self.weights[weight] = region.empty((rows[weight], *shape[1:]), dtype)
            self.parameters[name] = self.weights[weight].narrow(0, filled[weight], shape[0])
            filled[weight] += shape[0]
        self.weights[self._head][filled[self._head] :].zero_()

    def _check(self, name: str, tensor: Tensor) -> None:
        parameter = self._layout.get(name)
        if parameter is None:
            raise ValueError(f"weight {name!r} is unexpected; expected one of {_some(self._awaited)}")
        if name not in self._awaited:
            raise ValueError(f"weight {name!r} comes twice; expected each once")
        dtype = self.parameters[name].dtype
        if tensor.shape != parameter.shape or tensor.dtype != dtype:
            raise ValueError(
                f"weight {name!r} is {tensor.dtype} {tuple(tensor.shape)}; expected {dtype} {parameter.shape}"
            )


def _some(names: set[str]) -> str:
    shown = sorted(names)[:4]
    return ", ".join(shown) + (f" and {len(names) - len(shown)} more" if len(names) > len(shown) else "")
