"""The operations of a step's layers between their matrix products: Triton on CUDA, torch elsewhere.

Both round at the same places. Triton is imported when first needed: without a GPU the engine runs without it.

Shape suffixes: T tokens, C hidden size, F twice the inner size, H query heads, K key-value heads, D head dimension
(of the rotary tables: half of it), P positions, N blocks of the cache; a cache is [N, tokens in a block, K, D].
"""

from __future__ import annotations

from torch import Tensor

from ..model import layers


def in_triton(tensor: Tensor) -> bool:
    """Whether kernels in Triton work on a tensor, not torch's operations."""
    return tensor.is_cuda


def add_rms_norm(delta_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of residual + delta, and that sum, rounded to their dtype before it is normed.

    Without a residual the sum is delta itself.
    """
    if in_triton(delta_TC):
        from . import fused_kernels

        return fused_kernels.add_rms_norm(delta_TC, residual_TC, weight_C, eps)
    residual_TC = delta_TC if residual_TC is None else residual_TC + delta_TC
    return layers.rms_norm(residual_TC, weight_C, eps), residual_TC


def rotate(
    q_THD: Tensor,
    k_TKD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    cos_PD: Tensor,
    sin_PD: Tensor,
    positions_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Queries and keys, each head normed where there are weights for it, and turned by its token's position.

    q and k may be views of one product; the results are new and contiguous.
    """
    if in_triton(q_THD):
        from . import fused_kernels

        return fused_kernels.rotate(q_THD, k_TKD, q_norm_D, k_norm_D, eps, cos_PD, sin_PD, positions_T)
    if q_norm_D is not None:
        q_THD = layers.rms_norm(q_THD, q_norm_D, eps)
    if k_norm_D is not None:
        k_TKD = layers.rms_norm(k_TKD, k_norm_D, eps)
    cos_TD, sin_TD = cos_PD[positions_T], sin_PD[positions_T]
    return layers.apply_rotary(q_THD, cos_TD, sin_TD), layers.apply_rotary(k_TKD, cos_TD, sin_TD)


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """SiLU of the first half times the second: [T, F / 2]."""
    if in_triton(gate_up_TF):
        from . import fused_kernels

        return fused_kernels.swiglu(gate_up_TF)
    return layers.swiglu(*gate_up_TF.chunk(2, dim=-1))


def write_kv(k_cache: Tensor, v_cache: Tensor, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    """Put k and v into the caches [N, P, K, D] at their slots (integers). Slot 0, or -1, is padding's scratch."""
    if in_triton(k_cache):
        from . import fused_kernels

        fused_kernels.write_kv(k_cache, v_cache, k_TKD, v_TKD, slots_T)
        return
    slots_T = slots_T.long().clamp_min(0)
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots_T, k_TKD)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots_T, v_TKD)
