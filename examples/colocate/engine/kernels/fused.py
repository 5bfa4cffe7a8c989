"""The operations of `ops` in Triton, one launch each: the work of layers between their matrix products.

Memory bounds all of them, and in a small decode step the launch does. So operations that belong together
are one kernel, a thread moves 16 bytes at a time, and a program is as small as still fills a few warps. Arithmetic is
fp32, rounded to the tensors' dtype at the same places as the torch versions round.

Tensors may be views with a row stride, as parts of one product are; within a token's row they have no gaps.
Floats are constants of a kernel, since torch.compile passes others in double precision.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..ops import Pair

# A thread's share of 8 elements is one access of 16 bytes at 16 bits each.
_THREAD_ELEMENTS = 8
_MAX_WARPS = 16  # 512 threads: four programs still fill a multiprocessor
# Of a program of swiglu or write_kv: few, so that a decode batch makes many programs.
_COLUMNS, _COLUMNS_WARPS = 1024, 4
_HEADS = 8  # of a program of rotate: two warps at D = 128, and no idle lanes with 8, 16 or 32 heads


def add_rms_norm(delta_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float) -> Pair:
    """`ops.add_rms_norm`: a program for each row, all of it in registers."""
    tokens, size = delta_TC.shape
    # Of rows with gaps between them, which is all that is let through below, empty_like makes contiguous ones.
    normed_TC = torch.empty_like(delta_TC)
    sum_TC = delta_TC if residual_TC is None else torch.empty_like(delta_TC)
    size_pad = pad(size)
    _add_rms_norm[(tokens,)](
        delta_TC, residual_TC, weight_C, normed_TC, sum_TC,
        row_stride(delta_TC, 1), 0 if residual_TC is None else row_stride(residual_TC, 1),
        EPS=eps, SIZE=size, SIZE_PAD=size_pad, num_warps=_warps(size_pad),
    )  # fmt: skip
    return normed_TC, sum_TC


def rotate(
    qk_THD: Tensor, num_heads: int, norms_D: Pair | None, tables_PD: Pair, positions_T: Tensor, eps: float
) -> Tensor:
    """`ops.rotate`: a program for several heads of one token, which share its angles."""
    (q_norm_D, k_norm_D), (cos_PD, sin_PD) = norms_D or (None, None), tables_PD
    tokens, heads, head_dim = qk_THD.shape
    out_THD = qk_THD.new_empty(qk_THD.shape)
    half_pad = pad(head_dim // 2)
    _rotate[(tokens, -(-heads // _HEADS))](
        qk_THD, q_norm_D, k_norm_D, cos_PD, sin_PD, positions_T, out_THD,
        row_stride(qk_THD, head_dim), positions_T.stride(0),
        EPS=eps, Q_HEADS=num_heads, HEADS=heads, HALF=head_dim // 2, HALF_PAD=half_pad, PROGRAM_HEADS=_HEADS,
        num_warps=_warps(_HEADS * half_pad),
    )  # fmt: skip
    return out_THD


def swiglu(gate_up_TF: Tensor) -> Tensor:
    """`ops.swiglu`: a program for some columns of a row."""
    tokens, size = gate_up_TF.shape
    half = size // 2
    out = gate_up_TF.new_empty((tokens, half))
    _swiglu[(tokens, -(-half // _COLUMNS))](
        gate_up_TF, out, row_stride(gate_up_TF, 1), HALF=half, COLUMNS=_COLUMNS, num_warps=_COLUMNS_WARPS
    )
    return out


def write_kv(k_cache: Tensor, v_cache: Tensor, k_TKD: Tensor, v_TKD: Tensor, slots_T: Tensor) -> None:
    """`ops.write_kv`: a program for some columns of a token's k and v."""
    tokens, kv_heads, head_dim = k_TKD.shape
    _write_kv[(tokens, -(-kv_heads * head_dim // _COLUMNS))](
        k_cache, v_cache, k_TKD, v_TKD, slots_T,
        row_stride(k_TKD, head_dim), row_stride(v_TKD, head_dim), slots_T.stride(0),
        SIZE=kv_heads * head_dim, COLUMNS=_COLUMNS, num_warps=_COLUMNS_WARPS,
    )  # fmt: skip


def pad(size: int) -> int:
    """The power of two that Triton needs for a tensor's length, without the 3 us that its own function takes."""
    return 1 << (size - 1).bit_length()


def _warps(elements: int) -> int:
    return min(_MAX_WARPS, max(1, elements // (32 * _THREAD_ELEMENTS)))


def row_stride(x: Tensor, inner: int) -> int:
    """Elements from one row to the next; `inner` is the stride that the dimension after it must have."""
    stride = x.stride()
    if stride[-1] != 1 or (stride[1] != inner and x.shape[1] != 1):
        raise ValueError(f"a tensor {tuple(x.shape)} has strides {stride}; expected rows without gaps")
    return stride[0]


@triton.jit
def _add_rms_norm(
    delta_ptr,
    residual_ptr,  # None: nothing is added, and the sum is not stored
    weight_ptr, normed_ptr, sum_ptr, delta_stride, residual_stride,
    EPS: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    mask = column < SIZE
    dtype = delta_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + column, mask=mask, other=0.0)
    x = tl.load(delta_ptr + row * delta_stride + column, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(dtype)
        tl.store(sum_ptr + row * SIZE + column, x, mask=mask)
    x = x.to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + EPS)).to(dtype)
    tl.store(normed_ptr + row * SIZE + column, (normed.to(tl.float32) * weight.to(tl.float32)).to(dtype), mask=mask)


@triton.jit
def _rotate(
    x_ptr,
    q_norm_ptr, k_norm_ptr,  # None: heads are not normed
    cos_ptr, sin_ptr, positions_ptr, out_ptr, stride, positions_stride,
    EPS: tl.constexpr, Q_HEADS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    PROGRAM_HEADS: tl.constexpr,
):  # fmt: skip
    """The halves of a head form the pairs. The first Q_HEADS heads are queries, the others keys."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * PROGRAM_HEADS + tl.arange(0, PROGRAM_HEADS)[:, None]
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    # Values that all heads share are loaded for each head: equal loads of the lanes of a warp cost nothing, while
    # spreading a row of values over the heads would go through shared memory.
    column = head * 0 + tl.arange(0, HALF_PAD)[None, :]
    mask = (head < HEADS) & (column < HALF)
    cos = tl.load(cos_ptr + position * HALF + column, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + column, mask=mask, other=0.0)
    dtype = x_ptr.dtype.element_ty
    x_ptr += token * stride
    offset = head * (2 * HALF) + column
    first = tl.load(x_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + offset + HALF, mask=mask, other=0.0).to(tl.float32)
    if q_norm_ptr is not None:
        q_mask, k_mask = mask & (head < Q_HEADS), mask & (head >= Q_HEADS)
        first_weight = tl.load(q_norm_ptr + column, mask=q_mask, other=0.0).to(tl.float32)
        first_weight += tl.load(k_norm_ptr + column, mask=k_mask, other=0.0).to(tl.float32)
        second_weight = tl.load(q_norm_ptr + HALF + column, mask=q_mask, other=0.0).to(tl.float32)
        second_weight += tl.load(k_norm_ptr + HALF + column, mask=k_mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(first * first + second * second, 1) / (2 * HALF) + EPS)[:, None]
        first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    out_ptr += token * (HEADS * HALF * 2)
    tl.store(out_ptr + offset, (first * cos - second * sin).to(dtype), mask=mask)
    tl.store(out_ptr + offset + HALF, (second * cos + first * sin).to(dtype), mask=mask)


@triton.jit
def _swiglu(gate_up_ptr, out_ptr, stride, HALF: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < HALF
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(gate_up_ptr + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + HALF + column, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * HALF + column, (activated * up).to(dtype), mask=mask)


@triton.jit
def _write_kv(
    k_cache_ptr, v_cache_ptr, k_ptr, v_ptr, slots_ptr, k_stride, v_stride, slots_stride,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    slot = tl.load(slots_ptr + token * slots_stride).to(tl.int64)
    k = tl.load(k_ptr + token * k_stride + column, mask=mask)
    v = tl.load(v_ptr + token * v_stride + column, mask=mask)
    tl.store(k_cache_ptr + slot * SIZE + column, k, mask=mask)
    tl.store(v_cache_ptr + slot * SIZE + column, v, mask=mask)
