"""torch's pools over regions of the host driver, in the place of ``torch.cuda.MemPool``.

As in torch, a freed block stays cached as long as the object of its pool exists, and the blocks of tensors outlive it.
When these are freed, ``torch.cuda.empty_cache()`` returns their memory.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

import memsaver
from memsaver._adapter import adapter
from memsaver._torch import pools, routing
from tests.support import Hooks

Id = tuple[int, int]
_numbers = itertools.count(1)
_blocks: dict[Id, dict[int, tuple[int, Hooks]]] = {}  # bytes and entry points by address, as torch's allocator has them
_cached: set[int] = set()  # addresses
_router: Any = None


class Pool:
    def __init__(self, region: memsaver.Region) -> None:
        self.id = 0, next(_numbers)
        self.uses = 1
        self._hooks = Hooks(region)
        _blocks[self.id] = {}

    def __del__(self) -> None:
        _free_cached(self.id)

    def use_count(self) -> int:
        return self.uses

    def malloc(self, nbytes: int) -> int | None:
        for address, (size, _) in _blocks[self.id].items():
            if address in _cached and size == nbytes:
                _cached.remove(address)
                return address
        made = self._hooks.alloc(nbytes)
        if made is not None:
            _blocks[self.id][made] = nbytes, self._hooks
        return made


def free(address: int | None) -> None:
    """The block is torch's from now on: cached."""
    assert address is not None
    _cached.add(address)


def use() -> None:
    """Lets regions of the host driver have such pools, in this process."""
    global _router
    _router = adapter()
    pools.snapshot = _snapshot  # type: ignore[assignment]
    pools.RegionPools._make = lambda self: Pool(self.region)  # type: ignore[assignment,return-value]
    routing.has_many_blocks = lambda device: False  # type: ignore[assignment]
    torch.cuda.empty_cache = _empty_cache


def lend(region: memsaver.Region) -> Any:
    """A pool for a thread that enters the region."""
    with _router._lock:
        return _router._of(region).lend()


def take_back(region: memsaver.Region, pool: Pool) -> None:
    with _router._lock:
        _router._of(region).take_back(pool)


def cached(region: memsaver.Region, *sizes: int) -> None:
    """Lets the region have a pool that no thread uses, with free blocks of these sizes."""
    use()
    pool = lend(region)
    for address in [pool.malloc(nbytes) for nbytes in sizes]:
        free(address)
    take_back(region, pool)


def _snapshot(pool_id: Id) -> list[dict[str, Any]]:
    def state(address: int) -> str:
        return "inactive" if address in _cached else "active_allocated"

    blocks = sorted(_blocks.get(pool_id, {}).items())
    return [{"blocks": [{"address": address, "size": size, "state": state(address)}]} for address, (size, _) in blocks]


def _free_cached(pool_id: Id) -> None:
    for address, (_, hooks) in list(_blocks[pool_id].items()):
        if address in _cached:
            _cached.remove(address)
            del _blocks[pool_id][address]
            hooks.free(address)


def _empty_cache() -> None:
    for pool_id in list(_blocks):
        if not any(pool_id == pool.id for each in _router._pools.values() for pool in (*each._idle, *each._lent)):
            _free_cached(pool_id)
