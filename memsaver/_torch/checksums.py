"""Checksums of a region's contents, computed on its device.

Those of rows of 8 KiB are compared before a pause and after the resume that restores the contents; those of blocks of
8 MiB, with other processes.
"""

from __future__ import annotations

import bisect
import ctypes
import operator
import random
from array import array
from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memsaver.errors import VerifyError
from memsaver.regions import Ranges, Region, outside

_ROW = 8192  # bytes of a row of words
_MOST_NAMED = 20  # allocations in an error
_WORD, _HALF = (1 << 64) - 1, (1 << 32) - 1
_AT_ONCE = 1 << 25  # bytes: fewer calls of kernels, and about four times as much temporary memory of the device
# Odd numbers, the same in all processes and versions of Python.
_numbers = random.Random("memsaver")
_FACTORS = array("q", [_numbers.getrandbits(64) - (1 << 63) | 1 for _ in range(2 * _ROW // 8)])
# Of paused regions: address, bytes and sums of each range. Changed by single operations, in any thread.
_kept: WeakKeyDictionary[Region, list[tuple[int, int, Tensor]]] = WeakKeyDictionary()


def record(region: Region, ranges: Ranges) -> None:
    """Computes and keeps the checksums of these ranges of a region that is mapped and unused."""
    _kept.pop(region, None)
    parts = region._core.segments(ranges)
    _kept[region] = [(*each, _sums(region.device, [each], _ROW)) for each in parts]


def forget_all() -> None:
    _kept.clear()


def check(region: Region) -> None:
    """Compares the contents with the checksums of the last pause, and drops these. A no-op if there are none.

    Raises VerifyError if contents differ.
    """
    segments = region._core.segments()
    # Of each part that differs: address and bytes, the offset of the first difference, and the segment.
    found: list[tuple[int, int, int, tuple[int, int]]] = []
    for address, nbytes, before in _kept.pop(region, []):
        at = bisect.bisect(segments, address, key=operator.itemgetter(0)) - 1
        if at < 0 or address >= sum(segments[at]):
            continue  # it was freed while the region was paused
        differing = torch.nonzero((_sums(region.device, [(address, nbytes)], _ROW) != before).any(1))
        if differing.numel():
            found.append((address, nbytes, int(differing[0]) * _ROW, segments[at]))
    if not found:
        return
    address, _, offset, (begin, size) = found[0]
    names = ", ".join(f"{address:#x} of {nbytes} bytes" for address, nbytes, *_ in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    raise VerifyError(
        f"the contents of region {region.tag!r} on {region.device} changed between its pause and its resume: "
        f"the first difference is in the segment at {begin:#x} of {size} bytes, within {_ROW} bytes from "
        f"offset {address + offset - begin}; they changed in the allocations at {names}{more}; load the contents of "
        "the region again",
        tag=region.tag,
        segment=begin,
        offset=address + offset - begin,
        parts=[(address, nbytes) for address, nbytes, *_ in found],
    )


def block_sums(device: str, parts: Ranges, block: int) -> list[int]:
    """Two sums of 64 bits for each block of contents: the parts of a region, end to end."""
    return [number & _WORD for number in _sums(device, parts, block).flatten().tolist()]


@torch.no_grad()
def _sums(device: str, parts: Ranges, block: int) -> Tensor:
    """int64 [blocks, 2] on the CPU: the sums of each block of contents, after the work of the device.

    Each word is folded and multiplied by an odd constant of its place in a row of 8 KiB. The sums of the rows are words
    of a second such row. So a change of one word always changes a sum.
    """
    with outside():
        if device != "cpu":
            torch.cuda.synchronize(device)
        factors = torch.frombuffer(_FACTORS, dtype=torch.int64).view(2, -1).to(device)  # [2, words of a row]
        return torch.cat([_block_sums(factors, pieces, block) for pieces in _contents(device, parts, _AT_ONCE)]).cpu()


def _contents(device: str, parts: Ranges, most: int) -> Iterator[list[Tensor]]:
    """uint8 [bytes]: the contents in lists of pieces, of ``most`` bytes together. The last list may have fewer."""
    pieces: list[Tensor] = []
    room = most
    for address, nbytes in parts:
        while nbytes:
            size = min(nbytes, room)
            pieces.append(bytes_at(device, address, size))
            address, nbytes, room = address + size, nbytes - size, room - size
            if not room:
                yield pieces
                pieces, room = [], most
    if pieces:
        yield pieces


def _block_sums(factors: Tensor, pieces: list[Tensor], block: int) -> Tensor:
    """int64 [blocks, 2]: the sums of blocks of at most 8 MiB. The last one may be shorter."""
    missing = -sum(each.numel() for each in pieces) % block
    # A copy, since a piece may begin at any address, and the device reads words at multiples of 8 alone.
    contents = torch.cat([*pieces, pieces[0].new_zeros(missing)])
    rows = _folded(contents.view(torch.int64).view(-1, _ROW // 8))
    sums = _folded(torch.stack([(rows * factor).sum(1) for factor in factors])).view(2, -1, block // _ROW)
    found = (sums * factors[:, None, : block // _ROW]).sum(2).T + block
    found[-1] -= missing
    return found


def _folded(words: Tensor) -> Tensor:
    """The words, with their upper halves added to the lower ones by xor: so a sum's upper bits depend on all bits."""
    return (words >> 32).bitwise_and_(_HALF).bitwise_xor_(words)


def bytes_at(device: str, address: int, nbytes: int) -> Tensor:
    """The memory itself as uint8 [bytes]."""
    if device == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_Memory(address, nbytes), device=device)


class _Memory:
    """Device memory for torch.as_tensor()."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
