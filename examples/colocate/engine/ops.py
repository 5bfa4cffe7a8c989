"""The operations of a step's layers between their matrix products: Triton on CUDA, torch elsewhere.

Both round at the same places. Triton is imported when first needed: without a GPU the engine runs without it.

Shape suffixes: T tokens, C hidden size, F twice the inner size, H heads, K key-value heads, D head dimension
(of the rotary tables: half of it), P positions, N blocks of the cache; a cache is [N, tokens in a block, K, D].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..model import layers

Pair = tuple[Tensor, Tensor]
_Operation = TypeVar("_Operation", bound=Callable[..., Any])


def in_triton(tensor: Tensor) -> bool:
    """Whether kernels in Triton work on a tensor, not torch's operations."""
    return tensor.is_cuda


def triton_on_cuda(module: str) -> Callable[[_Operation], _Operation]:
    """For a function in torch: calls the one of the same name in `kernels` where the first argument's device has it."""

    def decorate(in_torch: _Operation) -> _Operation:
        @wraps(in_torch)
        def operation(*args: Any) -> Any:
            if not in_triton(args[0]):
                return in_torch(*args)
            from . import kernels

            return getattr(getattr(kernels, module), in_torch.__name__)(*args)

        return cast(_Operation, operation)

    return decorate


@triton_on_cuda("fused")
def add_rms_norm(delta_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float) -> Pair:
    """The norm of residual + delta, and that sum, rounded to their dtype before it is normed.

    Without a residual the sum is delta itself.
    """
    residual_TC = delta_TC if residual_TC is None else residual_TC + delta_TC
    return layers.rms_norm(residual_TC, weight_C, eps), residual_TC


@triton_on_cuda("fused")
def rotate(
    qk_THD: Tensor, num_heads: int, norms_D: Pair | None, tables_PD: Pair, positions_T: Tensor, eps: float
) -> Tensor:
    """`num_heads` heads of queries, then those of keys, each normed where there are weights for it, and turned.

    The norms are of q and k, the tables cosine and sine of positions. The result is new and contiguous.
    """
    if norms_D is not None:
        parts = zip(qk_THD.tensor_split([num_heads], dim=1), norms_D)
        qk_THD = torch.cat([layers.rms_norm(x, norm_D, eps) for x, norm_D in parts], dim=1)
    return layers.apply_rotary(qk_THD, *(table_PD[positions_T] for table_PD in tables_PD))


@triton_on_cuda("fused")
def swiglu(gate_up_TF: Tensor) -> Tensor:
    """SiLU of the first half times the second: [T, F / 2]."""
    return layers.swiglu(*gate_up_TF.chunk(2, dim=-1))


@triton_on_cuda("fused")
def write_kv(k_cache: Tensor, v_cache: Tensor, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    """Put k and v into the caches [N, P, K, D] at their slots (integers). Slot 0 is padding's scratch."""
    k_cache.flatten(0, 1).index_copy_(0, slots_T.long(), k_TKD)
    v_cache.flatten(0, 1).index_copy_(0, slots_T.long(), v_TKD)
