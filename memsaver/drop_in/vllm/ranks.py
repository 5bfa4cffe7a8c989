"""Agreement of vLLM's ranks: each publishes its drop-in, and all compare before a sleep."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memsaver import drop_in
from memsaver.drop_in import DropInError
from memsaver.errors import Error

if TYPE_CHECKING:
    from memsaver.guests.agreement import Agreement

_PREFIX = "memsaver/drop_in/vllm"
_ANSWER_S = 300.0  # seconds in which each rank has to end a sleep or wake-up after the last rank did
_STORE_S = 60.0  # for the store to answer
_ONCE = (1, 1)  # the question of the drop-in, which a rank answers again with the same value


def _agreement(place: str, rank: int, size: int) -> Agreement:
    """The part of a rank in questions of several, over the store of torch.distributed."""
    import torch.distributed as dist

    from memsaver.guests.agreement import Agreement

    found = Agreement(dist.distributed_c10d._get_default_store(), f"{_PREFIX}/{place}", rank, size)
    found.link.until = time.monotonic() + _STORE_S
    return found


def _world() -> tuple[int, list[int]] | None:
    """This rank and all ranks of vLLM's world group. None without one, or with one rank."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from vllm.distributed import parallel_state

    group = parallel_state._WORLD  # get_world_group() asserts that there is one
    return None if group is None or len(group.ranks) == 1 else (group.rank, list(group.ranks))


def publish() -> list[tuple[int, Any]]:
    """Write this rank's drop-in into the store. Returns all ranks with theirs so far, or nothing where it is alone."""
    world = _world()
    if world is None:
        return []
    rank, ranks = world
    agreement = _agreement("world", ranks.index(rank), len(ranks))
    agreement.answer(_ONCE, _own())
    return list(zip(ranks, (answer for _, answer in agreement.answers())))


def check() -> None:
    """Compare the drop-ins of all ranks.

    Raises:
        DropInError: A rank has none, or one of another version. It names the rank.
    """
    ours = _own()
    for rank, theirs in publish():
        # Each rank publishes when it allocates its weights, long before the first sleep.
        if theirs is None:
            raise DropInError(f"rank {rank} has no drop-in: set {drop_in.VARIABLE} in its environment too", rank=rank)
        if theirs != ours:
            raise DropInError(f"rank {rank} has the drop-in {theirs}, and this one has {ours}", rank=rank)


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
    world = _world()
    first = world[0] - worker.rank if world is not None else 0  # ranks of the world group, as in other errors
    if error is None or isinstance(error, Error):  # naming() has added the rank
        text = "" if error is None else str(error)
    else:
        text = f"rank {first + worker.rank}, {call}: {type(error).__name__}: {error}"
    worker._memsaver_calls = number = getattr(worker, "_memsaver_calls", 0) + 1
    agreement = _agreement(str(parallel.data_parallel_rank), worker.rank, parallel.world_size)
    until = time.monotonic() + _ANSWER_S
    try:
        agreement.answer((number, 1), text)
        if worker.rank != last:
            if error is not None:
                logger.error("memsaver: %s failed; rank %d raises the error", call, first + last, exc_info=error)
            return
        late = "rank {} has not ended its {} within {:.0f} s after the last rank"
        found = agreement.wait((number, 1), until, lambda missing: missing if time.monotonic() >= until else None)
        missing = [late.format(first + rank, call, _ANSWER_S) for rank in found.reason or ()]
        others = [*missing, *filter(None, found.answers[:last])]
    except Error as lost:
        others = [f"the results of {call} on other ranks are unknown: {lost}"]
    if others:
        raise Error("; ".join([*others, *([text] if text else [])])) from error
    if error is not None:
        raise error


def _has_one_caller(backend: Any) -> bool:
    """Whether an executor of vLLM calls all ranks. With others, such as external_launcher, each rank has a caller."""
    if isinstance(backend, type):
        return any(each.__name__ == "MultiprocExecutor" for each in backend.__mro__)
    return backend in ("mp", "ray")


def _own() -> str:
    from memsaver import __version__

    status = drop_in.status()["vllm"]
    return json.dumps({"memsaver": __version__, "vllm": status.version, "replaced": status.replaced})
