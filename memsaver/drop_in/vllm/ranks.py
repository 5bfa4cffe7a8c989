"""Agreement of vLLM's ranks: each publishes its drop-in, and all compare before the first sleep."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from memsaver import drop_in
from memsaver.drop_in.errors import DropInError
from memsaver.errors import Error

if TYPE_CHECKING:
    from memsaver.guests.store import StoreLink

_T = TypeVar("_T")
_PREFIX = "memsaver/drop_in/vllm"
_ANSWER_S = 300.0  # seconds in which each rank has to end a sleep or wake-up after the last rank did
_STORE_S = 60.0  # for the store to answer
# The stores of the process groups of the last calls: another group has another store.
_linked: tuple[Any, StoreLink] | None = None
_published_in: Any = None
_checked_in: Any = None


def publish() -> None:
    """Write this rank's drop-in into the store of torch.distributed. A no-op where there is one rank."""
    global _published_in
    found = _ranks()
    if found is None or found[0] is _published_in:
        return
    store, rank, _ = found
    _call(store, lambda keys: keys.set(str(rank), _own()))
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
        # Each rank publishes when it allocates its weights, long before the first sleep.
        theirs, ours = _call(store, partial(_read, str(other))), _own()
        if theirs is None:
            raise DropInError(f"rank {other} has no drop-in: set {drop_in.VARIABLE} in its environment too", rank=other)
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


def settle(worker: Any, call: str, error: Exception | None, logger: logging.Logger) -> None:
    """Ends a call of all workers. If it failed on a rank, the last rank raises, and no other does.

    vLLM's executors read the answers of the ranks in order, and stop at the first error. They take the answers that
    they have not read for those of the next call. So only the last rank may answer with an error. A rank without the
    drop-in does not take part: if it is the reason for the error, each rank raises.

    Args:
        worker: vLLM's worker.
        call: Its method: ``"sleep"`` or ``"wake_up"``.
        error: The error of the method on this rank. None: it has returned.
        logger: vLLM's logger.

    Raises:
        Exception: ``error``, where this rank is the only one, or each rank has a caller of its own.
        memsaver.Error: On the last rank: the errors of all ranks.
    """
    parallel = worker.parallel_config
    last = parallel.world_size - 1
    disagrees = isinstance(error, DropInError) and error.rank is not None
    if last == 0 or disagrees or not _has_one_caller(parallel.distributed_executor_backend):
        if error is not None:
            raise error
        return
    import torch.distributed as dist

    found = _ranks()
    first = found[1] - worker.rank if found is not None else 0  # ranks of the world group, as in other errors
    text = "" if error is None else _text(error, first + worker.rank, call)
    store = dist.distributed_c10d._get_default_store()
    worker._memsaver_calls = number = getattr(worker, "_memsaver_calls", 0) + 1
    keys = [f"{parallel.data_parallel_rank}/{number}/{rank}" for rank in range(last)]
    if worker.rank != last:
        _call(store, lambda found: found.set(keys[worker.rank], text))
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


def _text(error: Exception, rank: int, call: str) -> str:
    if isinstance(error, Error):  # naming() has added the rank
        return str(error)
    return f"rank {rank}, {call}: {type(error).__name__}: {error}"


def _answer(store: Any, key: str, rank: int, call: str, deadline: float) -> str:
    """The text of a rank's error, or nothing."""
    from memsaver.guests.store import Pace

    pace = Pace()
    try:
        while (text := _call(store, partial(_taken, key))) is None:
            if time.monotonic() >= deadline:
                return f"rank {rank} has not ended its {call} within {_ANSWER_S:.0f} s after the last rank"
            pace.sleep(deadline)
        return text
    except Error as error:
        return f"the result of {call} on rank {rank} is unknown: {error}"


def _call(store: Any, function: Callable[[Any], _T]) -> _T:
    """Calls a function with a connection to the store."""
    from memsaver.guests.store import StoreLink

    global _linked
    if _linked is None or _linked[0] is not store:
        _linked = store, StoreLink(store, _PREFIX)
    return _linked[1].call(function, time.monotonic() + _STORE_S)


def _read(key: str, store: Any) -> str | None:
    return str(store.get(key).decode()) if store.check([key]) else None


def _taken(key: str, store: Any) -> str | None:
    text = _read(key, store)
    if text is not None:
        store.delete_key(key)
    return text


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
