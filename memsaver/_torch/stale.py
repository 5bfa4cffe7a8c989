"""Tensors that were not written since their memory came back without contents.

A resume fills such memory with a random pattern of 128 bits. 64 bytes that still hold it were not written.
"""

from __future__ import annotations

import bisect
import itertools
import secrets
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from memsaver import _moves
from memsaver._adapter import loaded
from memsaver._torch.checksums import bytes_at
from memsaver.errors import Error, StaleError
from memsaver.regions import Region, Selection, find, outside

_PIECE = 64  # bytes
_LEAST = 4  # bytes of a tensor: shorter ones may have the pattern by chance
_STEP = 1 << 26  # bytes at once: the results of comparisons take as much, or an eighth
_MOST_NAMED = 20  # in an error
_GRANULE = 512  # of allocations on the host driver, whose requested sizes are not known


@dataclass
class _Fill:
    pattern: Tensor  # uint8 [64], on the CPU: four times the same 16 bytes
    blocks: dict[int, int]  # address and bytes of the allocations


class _Rows(NamedTuple):
    """The memory of a tensor: equal parts, whose addresses differ by ``step``."""

    address: int
    nbytes: int  # of each
    number: int = 1
    step: int = 0

    @property
    def span(self) -> int:
        return (self.number - 1) * self.step + self.nbytes


_fills: weakref.WeakKeyDictionary[Region, _Fill] = weakref.WeakKeyDictionary()
_names: dict[str, weakref.ref[Tensor]] = {}


def name_tensors(module: torch.nn.Module, prefix: str = "") -> None:
    """Gives names to the tensors of a module, for the errors of ``memsaver.check_written()``.

    These are parameters, buffers, and tensors that are attributes of a submodule or elements of such a list or tuple.

    Args:
        module: The module. Its tensors are not kept alive.
        prefix: Begins each name.

    Raises:
        TypeError: ``module`` is not a torch.nn.Module.

    Examples:
        >>> memsaver.name_tensors(torch.nn.Linear(2, 2), prefix="draft.")
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is {module!r}, expected a torch.nn.Module")
    for name in [name for name, found in list(_names.items()) if found() is None]:
        _names.pop(name, None)
    named = itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )
    for name, tensor in itertools.chain(named, _attributes(module)):
        _names[prefix + name] = weakref.ref(tensor)


def _attributes(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Such as the stacked weights of LoRA adapters in engines."""
    for path, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            parts = enumerate(value) if isinstance(value, (list, tuple)) else [("", value)]
            for at, part in parts:
                if isinstance(part, Tensor):
                    yield ".".join(filter(None, [path, name, str(at)])), part


def check_written(tags: Selection = None) -> None:
    """Raises an error if tensors were not written since their region came back without contents.

    ``configure(stale=...)`` turns the check on: from then on a resume without contents fills the memory of allocations
    with a random pattern. Memory that is written while it is used is left out: regions with ``written_in_use=True``,
    and pools of graphs. Tensors below 4 bytes are not checked, nor is memory that was allocated after the resume. In a
    pool of torch on a CUDA device, an allocation takes the place of a freed one unseen. On the host driver, allocations
    up to 512 bytes need names.

    Args:
        tags: A tag, a Region, several of either, or None for all regions.

    Raises:
        StaleError: Tensors were not written. It names those with names of ``memsaver.name_tensors()``, and the regions
            and addresses of others.
        memsaver.Error: ``configure(stale=...)`` is ``"off"``.
        ValueError: A tag has no region.

    Examples:
        >>> memsaver.configure(stale="check")
        >>> weights = memsaver.region("weights", device="cpu")
        >>> layer = torch.nn.Linear(64, 64)
        >>> layer.weight = torch.nn.Parameter(weights.empty((64, 64)))
        >>> memsaver.name_tensors(layer)
        >>> _ = weights.pause(), weights.resume()
        >>> memsaver.check_written("weights")
        Traceback (most recent call last):
        memsaver.errors.StaleError: 1 tensor was not written since its memory came back: weight (16384 of 16384 bytes)
        >>> memsaver.configure(stale="off")
    """
    if _moves.stale() == "off":
        raise Error("stale is 'off': nothing is known. Expected configure(stale='check'), 'warn' or 'raise' before")
    _raise(find(tags))


def is_pending(regions: Iterable[Region]) -> bool:
    """Whether check_first_use() has to look at one of these regions."""
    return bool(_fills) and _moves.stale() in ("warn", "raise") and any(each in _fills for each in regions)


def check_first_use(regions: Sequence[Region], only_named: bool = False) -> None:
    """The check at the first use of regions after a resume, by the option: an error, a warning or none.

    ``only_named``: memory without a name may be a buffer that the first use itself writes.
    """
    if not is_pending(regions):
        return
    chosen = [each for each in regions if each in _fills]
    try:
        _raise(chosen, only_named)
    except StaleError as error:
        if _moves.stale() == "raise":
            raise
        for each in chosen:
            _fills.pop(each, None)
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def fill(region: Region) -> None:
    """Fills the allocations of a region that is mapped and unused. The caller waits for the device."""
    # No byte is 0, 1 or 255, as those of masks and flags are.
    pattern = bytes(0x90 + secrets.randbelow(0x60) for _ in range(16)) * (_PIECE // 16)
    made = _Fill(torch.frombuffer(bytearray(pattern), dtype=torch.uint8), _blocks(region)[0])
    with outside(), torch.no_grad():
        on_device = made.pattern.to(region.device)
        for address, nbytes in made.blocks.items():
            memory, whole = bytes_at(region.device, address, nbytes), nbytes // _PIECE * _PIECE
            memory[:whole].view(-1, _PIECE).copy_(on_device)
            memory[whole:].copy_(on_device[: nbytes - whole])
    _fills[region] = made


def allocated(region: Region, address: int) -> None:
    """An allocation was made at this address, in the place of a freed one."""
    if (found := _fills.get(region)) is not None:
        found.blocks.pop(address, None)


def forget_all() -> None:
    _fills.clear()


def _blocks(region: Region) -> tuple[dict[int, int], bool]:
    """Bytes of each allocation by address, and whether they are those requested, as in a pool of torch.

    Without such a pool they are rounded up to 512.
    """
    router = loaded()
    known = router.blocks(region) if router is not None else None
    return dict(region._core.segments() if known is None else known), known is not None


def _raise(regions: Iterable[Region], only_named: bool = False) -> None:
    chosen = [each for each in regions if each in _fills and not each._handle.closed and each.state == "active"]
    found = [each for region in chosen for each in _unwritten(region, _fills[region], only_named)]
    if not found:
        for each in chosen:
            _fills.pop(each, None)
        return
    names = ", ".join(f"{name} ({stale} of {nbytes} bytes)" for name, nbytes, stale in found[:_MOST_NAMED])
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    many = (
        f"{len(found)} tensors were not written since their" if len(found) > 1 else "1 tensor was not written since its"
    )
    raise StaleError(f"{many} memory came back: {names}{more}", tensors=found)


def _unwritten(region: Region, made: _Fill, only_named: bool) -> list[tuple[str, int, int]]:
    """Name, bytes, and bytes that hold the pattern."""
    now, is_exact = _blocks(region)
    named: dict[int, list[tuple[str, _Rows]]] = {}
    kept = sorted(address for address, nbytes in made.blocks.items() if now.get(address) == nbytes)
    for name, rows in _named():
        at = bisect.bisect_right(kept, rows.address) - 1
        if at >= 0 and rows.address + rows.span <= kept[at] + made.blocks[kept[at]]:
            named.setdefault(kept[at], []).append((name, rows))
    parts, counts = [], []
    with outside(), torch.no_grad():
        # By the offset in a block.
        patterns = torch.stack([torch.roll(made.pattern, -at) for at in range(16)]).to(region.device)
        for block in named if only_named else kept:
            # Of a rounded size, all but the last bytes are of the tensor for sure.
            sure = made.blocks[block] - (0 if is_exact else _GRANULE)
            for name, rows in named.get(block, [(f"region {region.tag!r} at {block:#x}", _Rows(block, sure))]):
                if rows.nbytes >= _LEAST:
                    parts.append((name, rows.number * rows.nbytes, min(rows.nbytes, _PIECE)))
                    counts.append(_count(region.device, rows, patterns[(rows.address - block) % 16]))
        found = torch.stack(counts).tolist() if counts else []  # one wait for the device
    return [(name, nbytes, pieces * piece) for (name, nbytes, piece), pieces in zip(parts, found) if pieces]


def _named() -> Iterator[tuple[str, _Rows]]:
    """Name and memory of the tensors with names that are alive."""
    for name, found in list(_names.items()):
        if (tensor := found()) is not None:
            for part, local in _parts(name, getattr(tensor, "_local_tensor", tensor)):  # of a DTensor
                if not torch._C._has_storage(local) or nn.parameter.is_lazy(local):
                    continue  # sparse, of oneDNN, or without a shape yet
                is_one = local.is_contiguous() or local.is_nested
                yield part, _Rows(local.data_ptr(), local.nbytes) if is_one else _rows(local)


def _rows(tensor: Tensor) -> _Rows:
    """The memory of a strided tensor that is not contiguous.

    One part: the dimensions have another order. Several: the tensor is a part of each row of another tensor. Else the
    whole storage counts, also if the parts begin at different offsets of the pattern or are shorter than a piece.
    """
    item, width = tensor.element_size(), 1
    outer: list[list[int]] = []  # sizes and strides of the dimensions outside of the contiguous run
    for stride, size in sorted(zip(tensor.stride(), tensor.size())):
        last = outer[-1] if outer else None
        if last is None and stride == width:
            width *= size
        elif last is not None and stride == last[0] * last[1]:
            last[0] *= size
        elif size > 1:
            outer.append([size, stride])
    if not outer:
        return _Rows(tensor.data_ptr(), width * item)
    count, step = outer[0][0], outer[0][1] * item
    if len(outer) > 1 or step % 16 or not _PIECE <= width * item <= step:
        storage = tensor.untyped_storage()
        return _Rows(storage.data_ptr(), storage.nbytes())
    return _Rows(tensor.data_ptr(), width * item, count, step)


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors with memory of one that has none itself, such as torchao's quantized weights."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield name, tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        yield from _parts(f"{name}.{attribute}", getattr(tensor, attribute))


def _count(device: str, rows: _Rows, pattern: Tensor) -> Tensor:
    """The pieces of 64 bytes that hold the pattern. A shorter tensor is one piece."""
    memory = bytes_at(device, rows.address, rows.span)
    if rows.nbytes < _PIECE:
        return (memory == pattern[: rows.nbytes]).all().long()
    width = rows.nbytes // _PIECE * _PIECE
    whole = memory.as_strided((rows.number, width), (rows.step or width, 1))
    if rows.address % 8 == 0:
        whole, pattern = whole.view(torch.int64), pattern.view(torch.int64)
    parts = [part for some in whole.split(max(1, _STEP // width)) for part in some.split(_STEP, 1)]
    counts = [(part.unflatten(1, (-1, pattern.numel())) == pattern).all(2).sum() for part in parts]
    return sum(counts[1:], counts[0])
