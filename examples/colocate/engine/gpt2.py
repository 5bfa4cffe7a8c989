"""GPT-2: learned positions, layer norms, biases, and products whose weights are kept as [in, out].

Shape suffixes as in `model`; P positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..model.config import check_values
from .model import Model, Parameter, State
from .parallel import Shard


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2; its output is tied to its embedding. Raises ValueError for sizes that do not fit together."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    max_position: int  # tokens in the longest sequence
    inner_size: int | None = None  # None: four times hidden_size
    norm_eps: float = 1e-5
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_values(self, positive=("norm_eps",))
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size is {self.hidden_size}; expected a multiple of num_heads, {self.num_heads}")

    @property
    def num_kv_heads(self) -> int:
        """Every query head has its own."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Of queries, keys and values."""
        return self.hidden_size // self.num_heads

    @property
    def intermediate_size(self) -> int:
        """Between the MLP's two products."""
        return 4 * self.hidden_size if self.inner_size is None else self.inner_size


class GPT2(Model):
    """q, k and v come out of one product, as in the checkpoint."""

    embedding = "transformer.wte.weight"
    config: GPT2Config

    def layout(self) -> dict[str, Parameter]:
        """See `Model`. Biases of row-parallel products are whole: they are added once, to the ranks' sum."""
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        layout = {
            self.embedding: Parameter((config.vocab_size, hidden)),
            "transformer.wpe.weight": Parameter((config.max_position, hidden)),
        }
        norm = {"weight": Parameter((hidden,)), "bias": Parameter((hidden,))}
        modules = {
            "ln_1": norm,
            "attn.c_attn": _column_parallel(hidden, 3 * hidden, sections=3),
            "attn.c_proj": _row_parallel(hidden, hidden),
            "ln_2": norm,
            "mlp.c_fc": _column_parallel(hidden, inner),
            "mlp.c_proj": _row_parallel(inner, hidden),
        }
        for index in range(config.num_layers):
            for module, parameters in modules.items():
                layout |= {f"transformer.h.{index}.{module}.{name}": each for name, each in parameters.items()}
        return layout | {f"transformer.ln_f.{name}": each for name, each in norm.items()}

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> State:
        """See `Model`."""
        tokens_VC, positions_PC = self.weights[self.embedding], self.weights["transformer.wpe.weight"]
        return F.embedding(tokens_T, tokens_VC), F.embedding(positions_T, positions_PC)

    def before_attention(self, layer: int, state: State, positions_T: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `Model`."""
        prefix = f"transformer.h.{layer}."
        normed_TC, residual_TC = self._norm(state, prefix + "ln_1")
        qkv = self._linear(normed_TC, prefix + "attn.c_attn").unflatten(1, (3, self.num_heads, -1))
        q_THD, k_TKD, v_TKD = qkv.unbind(1)
        return q_THD, k_TKD, v_TKD, residual_TC

    def after_attention(self, layer: int, residual_TC: Tensor, out_THD: Tensor) -> State:
        """See `Model`."""
        prefix = f"transformer.h.{layer}."
        state = residual_TC, self._reduced(out_THD.flatten(1), prefix + "attn.c_proj")
        normed_TC, residual_TC = self._norm(state, prefix + "ln_2")
        inner = F.gelu(self._linear(normed_TC, prefix + "mlp.c_fc"), approximate="tanh")
        return residual_TC, self._reduced(inner, prefix + "mlp.c_proj")

    def finish(self, state: State) -> Tensor:
        """See `Model`."""
        return self._norm(state, "transformer.ln_f")[0]

    def _norm(self, state: State, name: str) -> tuple[Tensor, Tensor]:
        residual_TC, delta_TC = state
        residual_TC = delta_TC if residual_TC is None else residual_TC + delta_TC
        weight_C, bias_C = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return F.layer_norm(residual_TC, weight_C.shape, weight_C, bias_C, self.config.norm_eps), residual_TC

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return torch.addmm(self.weights[f"{name}.bias"], x, self.weights[f"{name}.weight"])

    def _reduced(self, x: Tensor, name: str) -> Tensor:
        if self.parallel.size == 1:
            return self._linear(x, name)
        return self.parallel.all_reduce(x @ self.weights[f"{name}.weight"]) + self.weights[f"{name}.bias"]


def _column_parallel(inputs: int, outputs: int, sections: int = 1) -> dict[str, Parameter]:
    return {
        "weight": Parameter((inputs, outputs), Shard(1, sections)),
        "bias": Parameter((outputs,), Shard(0, sections)),
    }


def _row_parallel(inputs: int, outputs: int) -> dict[str, Parameter]:
    return {"weight": Parameter((inputs, outputs), Shard(0)), "bias": Parameter((outputs,))}
