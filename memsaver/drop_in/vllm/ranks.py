"""Agreement of vLLM's ranks: each publishes its drop-in, and all compare before the first sleep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memsaver import drop_in
from memsaver.drop_in.errors import DropInError
from memsaver.errors import Error

_KEY = "memsaver/drop_in/vllm/{}"
# The stores of the process groups of the last calls: another group has another store.
_published_in: Any = None
_checked_in: Any = None


def publish() -> None:
    """Write this rank's drop-in into the store of torch.distributed. A no-op where there is one rank."""
    global _published_in
    found = _ranks()
    if found is None or found[0] is _published_in:
        return
    store, rank, _ = found
    store.set(_KEY.format(rank), _own())
    _published_in = store


def check() -> None:
    """Compare the drop-ins of all ranks of vLLM's world group, at the first call for a process group.

    Raises:
        DropInError: A rank has none, or one of another version. It names the rank.
    """
    global _checked_in
    found = _ranks()
    if found is None or found[0] is _checked_in:
        return
    publish()
    store, rank, ranks = found
    for other in ranks:
        key = _KEY.format(other)
        # Each rank publishes when it allocates its weights, long before the first sleep.
        if not store.check([key]):
            raise DropInError(f"rank {other} has no drop-in: set {drop_in.VARIABLE} in its environment too", rank=other)
        theirs, ours = store.get(key).decode(), _own()
        if theirs != ours:
            raise DropInError(f"rank {other} has the drop-in {theirs}, and rank {rank} has {ours}", rank=other)
    _checked_in = store


@contextmanager
def naming(call: str) -> Iterator[None]:
    """Adds this rank and the call to an error of the body. vLLM passes the text of one rank's error to its callers."""
    try:
        yield
    except Error as error:
        found = _ranks()
        if found is not None:
            error.args = (f"rank {found[1]}, {call}: {error}",)
        raise


def _own() -> str:
    from memsaver import __version__

    status = drop_in.status()["vllm"]
    return json.dumps({"memsaver": __version__, "vllm": status.version, "replaced": status.replaced})


def _ranks() -> tuple[Any, int, list[int]] | None:
    """The store, this rank, and all ranks. None without a world group, or with one rank."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from vllm.distributed import parallel_state

    group = parallel_state._WORLD  # get_world_group() asserts that there is one
    if group is None or len(group.ranks) == 1:
        return None
    return dist.distributed_c10d._get_default_store(), group.rank, list(group.ranks)
