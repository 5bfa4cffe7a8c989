"""Agreement of vLLM's ranks: each publishes its drop-in, and all compare before the first sleep."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memsaver import drop_in
from memsaver.drop_in import DropInError
from memsaver.errors import Error

_PREFIX = "memsaver/drop_in/vllm"
_ANSWER_S = 300.0  # seconds in which each rank has to end a sleep or wake-up after the last rank did
_STORE_S = 60.0  # for the store to answer
_last: _Store | None = None


class _Store:
    """The store of a process group, and the part of the agreement that it has."""

    def __init__(self, store: Any) -> None:
        from memsaver.guests.store import StoreLink

        self.store, self.link = store, StoreLink(store, _PREFIX)
        self.has_published = self.was_checked = False


def _store() -> _Store:
    """The store of torch.distributed, for calls within a bound. Another process group has another one."""
    global _last
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    if _last is None or _last.store is not store:
        _last = _Store(store)
    _last.link.until = time.monotonic() + _STORE_S
    return _last


def _world() -> tuple[int, list[int]] | None:
    """This rank and all ranks of vLLM's world group. None without one, or with one rank."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from vllm.distributed import parallel_state

    group = parallel_state._WORLD  # get_world_group() asserts that there is one
    return None if group is None or len(group.ranks) == 1 else (group.rank, list(group.ranks))


def publish() -> None:
    """Write this rank's drop-in into the store. A no-op where there is one rank."""
    world = _world()
    if world is not None and not (store := _store()).has_published:
        store.link.set(str(world[0]), _own())
        store.has_published = True


def check() -> None:
    """Compare the drop-ins of all ranks, at the first call for a process group.

    Raises:
        DropInError: A rank has none, or one of another version. It names the rank.
    """
    world = _world()
    if world is None or (store := _store()).was_checked:
        return
    publish()
    rank, ranks = world
    for other in ranks:
        # Each rank publishes when it allocates its weights, long before the first sleep.
        theirs, ours = store.link.get(str(other)), _own()
        if theirs is None:
            raise DropInError(f"rank {other} has no drop-in: set {drop_in.VARIABLE} in its environment too", rank=other)
        if theirs != ours:
            raise DropInError(f"rank {other} has the drop-in {theirs}, and rank {rank} has {ours}", rank=other)
    store.was_checked = True


@contextmanager
def naming(call: str) -> Iterator[None]:
    """Adds this rank and the call to an error of the body. vLLM passes the text of one rank's error to its callers."""
    try:
        yield
    except Error as error:
        world = _world()
        if world is not None:
            error.args = (f"rank {world[0]}, {call}: {error}",)
        raise


def settle(worker: Any, call: str, error: Exception | None, logger: logging.Logger) -> None:
    """Ends a call of all workers. If it failed on a rank, the last rank raises, and no other does.

    vLLM's executors read the answers of the ranks in order, and stop at the first error. They take the answers that
    they have not read for those of the next call. So only the last rank may answer with an error. A rank without the
    drop-in does not take part: if it is the reason for the error, each rank raises.

    ``error``: of this rank's method. It is raised where this rank is the only one, or each has a caller of its own.
    """
    parallel = worker.parallel_config
    last = parallel.world_size - 1
    disagrees = isinstance(error, DropInError) and error.rank is not None
    if last == 0 or disagrees or not _has_one_caller(parallel.distributed_executor_backend):
        if error is not None:
            raise error
        return
    store, world = _store(), _world()
    first = world[0] - worker.rank if world is not None else 0  # ranks of the world group, as in other errors
    if error is None or isinstance(error, Error):  # naming() has added the rank
        text = "" if error is None else str(error)
    else:
        text = f"rank {first + worker.rank}, {call}: {type(error).__name__}: {error}"
    worker._memsaver_calls = number = getattr(worker, "_memsaver_calls", 0) + 1
    keys = [f"{parallel.data_parallel_rank}/{number}/{rank}" for rank in range(last)]
    if worker.rank != last:
        store.link.set(keys[worker.rank], text)
        if error is not None:
            logger.error("memsaver: %s failed; rank %d raises the error", call, first + last, exc_info=error)
        return
    deadline = time.monotonic() + _ANSWER_S
    answers = [_answer(store, key, first + rank, call, deadline) for rank, key in enumerate(keys)]
    if any(answers):
        raise Error("; ".join(each for each in (*answers, text) if each)) from error
    if error is not None:
        raise error


def _has_one_caller(backend: Any) -> bool:
    """Whether an executor of vLLM calls all ranks. With others, such as external_launcher, each rank has a caller."""
    if isinstance(backend, type):
        return any(each.__name__ == "MultiprocExecutor" for each in backend.__mro__)
    return backend in ("mp", "ray")


def _answer(store: _Store, key: str, rank: int, call: str, deadline: float) -> str:
    """The text of a rank's error, or nothing."""
    from memsaver.guests.store import sleep

    since = time.monotonic()
    try:
        while (text := store.link.get(key)) is None:
            if time.monotonic() >= deadline:
                return f"rank {rank} has not ended its {call} within {_ANSWER_S:.0f} s after the last rank"
            sleep(since)
        store.link.call(lambda keys: keys.delete_key(key), deadline + _STORE_S)  # no rank reads it again
        return text
    except Error as error:
        return f"the result of {call} on rank {rank} is unknown: {error}"


def _own() -> str:
    from memsaver import __version__

    status = drop_in.status()["vllm"]
    return json.dumps({"memsaver": __version__, "vllm": status.version, "replaced": status.replaced})
