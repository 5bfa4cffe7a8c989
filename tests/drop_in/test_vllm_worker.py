"""The calls of vLLM's worker: KV transfer, agreement and errors of several ranks, shared pools. Threads are ranks."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memsaver
from memsaver import drop_in
from memsaver.drop_in import DropInError
from memsaver.drop_in.vllm import ranks
from memsaver.drop_in.vllm import worker as calls
from memsaver.errors import OutOfMemoryError
from tests.drop_in import fake_vllm
from tests.drop_in.fake_vllm import Load, load
from tests.support import MIB

__all__ = ["load"]  # a fixture

Workers = list[Any]
Be = Callable[..., None]


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process with a shared pool."""
    monkeypatch.setattr(calls, "shares", lambda: True)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return store


# Agreement


@pytest.fixture
def be(load: Load, store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> Be:
    """Goes on as the process of a rank of the world group, whose ranks are 4 and 5. It begins as rank 4."""
    load()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    own = drop_in.status()["vllm"]

    def be(rank: int, all_ranks: Sequence[int] = (4, 5), **changes: Any) -> None:
        from vllm.distributed import parallel_state

        parallel_state._WORLD = SimpleNamespace(rank=rank, ranks=list(all_ranks))
        monkeypatch.setitem(drop_in._states, "vllm", drop_in.DropIn(**{**vars(own), **changes}))
        monkeypatch.setattr(ranks, "_last", None)

    be(4)
    return be


def test_ranks_of_each_process_group_are_compared(be: Be, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.publish()
    be(5)
    ranks.check()
    second = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: second)
    with pytest.raises(DropInError, match="rank 4 has no drop-in"):
        ranks.check()


def test_rank_without_drop_in_is_named_by_each_check(be: Be) -> None:
    for _ in range(2):
        with pytest.raises(DropInError, match="rank 5 has no drop-in: set MEMSAVER_DROP_IN") as raised:
            ranks.check()
        assert raised.value.rank == 5
    be(5)
    ranks.publish()
    be(4)
    ranks.check()


def test_rank_with_another_version_is_named(be: Be) -> None:
    ranks.publish()
    be(5, version="0.26.0")
    with pytest.raises(DropInError, match=r"rank 4 has the drop-in .*9.9.9.*, and rank 5 has .*0.26.0") as raised:
        ranks.check()
    assert raised.value.rank == 4


def test_errors_name_the_rank_and_the_call(be: Be) -> None:
    for prefix in ("rank 4, wake-up of weights: ", ""):
        with pytest.raises(OutOfMemoryError, match=f"^{prefix}3 GiB are missing$"):
            with ranks.naming("wake-up of weights"):
                raise OutOfMemoryError("3 GiB are missing")
        be(4, [4])  # there is one rank: it compares nothing
        ranks.check()


# Errors of several ranks


@pytest.fixture
def workers(load: Load, store: dist.Store) -> Workers:
    """The workers of three ranks, in one process, with one store."""
    load()
    return [fake_vllm.worker(rank, 3) for rank in range(3)]


def call(workers: Workers, *errors: Exception | None, method: str = "wake_up", args: tuple[Any, ...] = ()) -> Any:
    """The results or errors of a call of all ranks, of which some have errors."""

    def answer(worker: Any, error: Exception | None) -> Any:
        worker.error = error
        try:
            return getattr(worker, method)(*args)
        except Exception as raised:
            return raised

    with ThreadPoolExecutor(len(workers)) as threads:
        return list(threads.map(answer, workers, [*errors, *[None] * (len(workers) - len(errors))]))


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1), (0, 2), (0, 1, 2)])
def test_last_rank_raises_the_errors_of_all(workers: Workers, failing: tuple[int, ...]) -> None:
    errors = [OutOfMemoryError(f"rank {rank}: full") if rank in failing else None for rank in range(3)]
    answers = call(workers, *errors)
    assert not any(isinstance(answer, Exception) for answer in answers[:2])
    assert str(answers[2]) == "; ".join(f"rank {rank}: full" for rank in failing)
    for _ in range(2):  # the next calls have answers of their own
        assert call(workers) == ["awake"] * 3


def test_errors_keep_their_type_or_get_the_rank(workers: Workers) -> None:
    error = OutOfMemoryError("full")
    assert call(workers, None, None, error) == ["awake", "awake", error]
    answers = call(workers, None, AssertionError("asleep"), AssertionError())
    assert str(answers[2]) == "rank 1, wake_up: AssertionError: asleep; rank 2, wake_up: AssertionError: "
    answers = call(workers, error, method="discard", args=("kv_cache",))
    assert answers[:2] == [None, "discarded"] and str(answers[2]) == "full"


def test_rank_that_does_not_end_is_named(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_ANSWER_S", 0.05)
    text = "^rank 0 has not ended its wake_up within 0 s after the last rank; rank 1"
    with pytest.raises(RuntimeError, match=text):
        workers[2].wake_up()


def test_rank_without_drop_in_is_not_waited_for(workers: Workers) -> None:
    errors = [DropInError("rank 0 has no drop-in", rank=0) for _ in range(2)]
    assert call(workers[1:], *errors) == errors


class OwnExecutor(type("MultiprocExecutor", (), {})):  # type: ignore[misc]
    """An executor that a framework derives from vLLM's."""


@pytest.mark.parametrize(
    ("name", "value", "is_one"),
    [
        ("distributed_executor_backend", "ray", True),
        ("distributed_executor_backend", OwnExecutor, True),
        ("distributed_executor_backend", "external_launcher", False),
        ("distributed_executor_backend", int, False),
        ("world_size", 1, False),
    ],
)
def test_one_caller_gets_one_error_and_each_rank_of_several_its_own(
    workers: Workers, name: str, value: Any, is_one: bool
) -> None:
    error = OutOfMemoryError("rank 0: full")
    for each in workers:
        setattr(each.parallel_config, name, value)
    answers = call(workers, error)
    if is_one:
        assert answers[:2] == [None, "awake"] and str(answers[2]) == "rank 0: full"
    else:
        assert answers == [error, "awake", "awake"]


def test_engines_of_data_parallel_ranks_do_not_answer_each_other(workers: Workers) -> None:
    others = [fake_vllm.worker(rank, 3, replica=1) for rank in range(3)]
    answers = call([*workers, *others], OutOfMemoryError("rank 0: full"))
    assert str(answers[2]) == "rank 0: full" and answers[3:] == ["awake"] * 3


def test_store_that_has_ended_is_named(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(dist.Store):
        def clone(self) -> dist.Store:
            return self

        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("connection reset")

    ended = Ended()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: ended)
    text = r"^the result of wake_up on rank 0 is unknown: .*store cannot be reached: connection reset"
    with pytest.raises(RuntimeError, match=text):
        workers[2].wake_up()


# KV transfer


@pytest.fixture(autouse=True)
def no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "transfers_kv", False)


@pytest.mark.usefixtures("shared")
def test_kv_transfer_from_a_shared_pool_is_refused_when_the_worker_is_made(load: Load) -> None:
    drop_in.install("vllm")
    assert drop_in.status()["vllm"].state == "waiting"  # as in a worker's process: its allocator comes later
    for _ in range(2):
        with pytest.raises(DropInError, match="KV connector 'NixlConnector'.*without MEMSAVER_POOL=shared, witho"):
            fake_vllm.worker(transfer="NixlConnector")
        load()
        assert drop_in.status()["vllm"].state == "active"
    for options in ({"transfer": ""}, {"transfer": "NixlConnector", "cumem": False}):  # not of memory in a region
        assert fake_vllm.worker(**options).wake_up() == "awake"


def test_kv_cache_that_is_transferred_has_one_handle_for_each_segment(load: Load) -> None:
    allocator = load().CuMemAllocator.get_instance()
    fake_vllm.worker(transfer="NixlConnector")
    with allocator.use_memory_pool("weights"):
        weights = torch.ones(40 * MIB)
    with allocator.use_memory_pool("kv_cache"):
        cache = [torch.zeros(nbytes, dtype=torch.uint8) for nbytes in (37 * MIB, 5 * MIB + 3)]
    for _ in range(2):
        kv, other = (memsaver.region(f"vllm.{tag}", device="cpu") for tag in ("kv_cache", "weights"))
        assert (kv.one_handle, sorted(kv._core.chunks)) == (True, [6 * MIB, 38 * MIB])
        assert not other.one_handle
        allocator.sleep(("weights",))
        assert kv.mapped_bytes == 0
        allocator.wake_up()
    assert bool((weights == 1).all()) and not any(each.any() for each in cache)


# A sleep that ends with less free memory of the driver


@pytest.fixture
def worker(load: Load) -> Any:
    load()
    return fake_vllm.worker()


@pytest.mark.usefixtures("shared")
def test_shared_pool_may_take_memory_of_the_driver_during_a_sleep(
    worker: Any, caplog: pytest.LogCaptureFixture
) -> None:
    worker.freed_bytes = -1
    with caplog.at_level(logging.INFO, "vllm"):
        worker.sleep(level=2)
    assert "is in the shared pool, not in the driver" in caplog.text
    with pytest.raises(AssertionError, match="level is unknown"):
        worker.sleep(level=3)


def test_without_a_shared_pool_the_assertion_stays(worker: Any) -> None:
    worker.sleep(level=1)
    worker.freed_bytes = -1
    with pytest.raises(AssertionError, match="Memory usage increased after sleeping"):
        worker.sleep(level=1)


# Tensors that nobody wrote after a wake-up


@pytest.mark.parametrize("missing", ["layer.scale", "drafter.layer.weight", "lora.1", ""])
def test_the_first_forward_pass_after_a_wake_up_needs_all_tensors_of_the_model(load: Load, missing: str) -> None:
    memsaver.configure(stale="raise")
    try:
        allocator = load().CuMemAllocator.get_instance()
        worker = fake_vllm.worker()
        with allocator.use_memory_pool("weights"):
            models = [Sequential(), Sequential()]
            _buffer = torch.zeros(1000)  # of the runner: the forward pass writes it
        with allocator.use_memory_pool("kv_cache"):
            _cache = torch.zeros(1000)
        worker.model_runner = SimpleNamespace(model=models[0], drafter=SimpleNamespace(model=models[1]))
        assert worker.execute_model(None) == "executed"
        allocator.sleep(())
        allocator.wake_up(["weights"])
        named = {**dict(models[0].named_tensors("")), **dict(models[1].named_tensors("drafter."))}
        for name, tensor in named.items():
            if name != missing:
                tensor.fill_(1)
        allocator.wake_up(["kv_cache"])
        memsaver.check_written("vllm.kv_cache")  # it is written while it is used
        if missing:
            assert [unwritten(worker) for _ in range(2)] == [[missing]] * 2
            named[missing].fill_(1)
        assert worker.execute_model(None) == "executed"
    finally:
        memsaver.configure(stale="off")
        gc.collect()  # the tracebacks hold the models


def unwritten(worker: Any) -> list[str]:
    with pytest.raises(memsaver.StaleError) as raised:
        worker.execute_model(None)
    return [name for name, *_ in raised.value.tensors]


class Sequential(torch.nn.Module):
    """A layer with a weight, a scale and a rotary cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Module()
        for name, size in (("weight", 700), ("scale", 1), ("cos", 40)):
            self.layer.register_buffer(name, torch.zeros(size), persistent=name != "cos")
        self.lora = (torch.zeros(40), torch.zeros(80))  # vLLM's slots of adapters are no buffers

    def named_tensors(self, prefix: str) -> Sequence[tuple[str, torch.Tensor]]:
        adapters = [(f"lora.{at}", tensor) for at, tensor in enumerate(self.lora)]
        return [(prefix + name, tensor) for name, tensor in [*self.named_buffers(), *adapters]]
