"""The operations between the matrix products of a step, and the choice of its tokens: Triton on CUDA, torch elsewhere.

Both round at the same places. Triton is imported when first needed: without a GPU the engine runs without it.

Shape suffixes: B sequences, V vocabulary, T tokens, C hidden size, F twice the inner size, H heads, K key-value heads,
D head dimension (of the rotary tables: half of it), P positions, N blocks of the cache; a cache is [N, tokens in a
block, K, D].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
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


@triton_on_cuda("sampling")
def sample(logits_BV: Tensor, temperature_B: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens (int64 [B]) and their log-probabilities (fp32 [B]).

    Random numbers follow from `state`, int64 [2]: a seed, and a count of calls, which goes up by one, also in a graph.

    The log-probability is that of the distribution that was sampled, log_softmax(logits / t): a policy gradient,
    and the weight of a token that another program sampled, need this one. For t = 0 it is that of t = 1.

    The token is the largest of logit - t * log(noise), noise ~ Exp(1): the Gumbel-max trick, multiplied by t, so
    that t = 0 leaves the logits as they are and is greedy without a branch.
    """
    # NumPy's Philox takes seed and count as key and counter. Torch's generator on the CPU drops the upper 32 bits of
    # its seed.
    seed, calls = (value % (1 << 64) for value in state.tolist())
    state[1:].add_(1)
    generator = np.random.Generator(np.random.Philox(key=seed, counter=np.array([0, 0, calls, 0], np.uint64)))
    noise = torch.from_numpy(generator.standard_exponential(tuple(logits_BV.shape), dtype=np.float32))
    logits = logits_BV.float()
    # It may be zero, whose logarithm is not finite.
    tokens_B = torch.argmax(logits - temperature_B[:, None] * noise.clamp_min_(1e-30).log_(), dim=-1)
    scaled = logits / torch.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    return tokens_B, scaled.log_softmax(-1).gather(1, tokens_B[:, None]).squeeze(1)
