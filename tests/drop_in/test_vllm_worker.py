"""The calls of vLLM's worker: KV transfer, errors on several ranks, shared pools. Threads stand for ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

import memsaver
from memsaver import drop_in
from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.vllm import ranks
from memsaver.drop_in.vllm import worker as worker_calls
from memsaver.errors import OutOfMemoryError
from tests.drop_in import fake_vllm
from tests.drop_in.test_vllm_allocator import Load, load
from tests.support import MIB

__all__ = ["load"]  # a fixture

Workers = list[Any]


@pytest.fixture
def workers(load: Load, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """The workers of three ranks, in one process, with one store."""
    load()
    workers = [fake_vllm.worker(rank, 3) for rank in range(3)]
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    return workers


def wake(workers: Workers, errors: Sequence[Exception | None] = (None, None, None)) -> list[Any]:
    return call(workers, "wake_up", errors)


def call(workers: Workers, method: str, errors: Sequence[Exception | None], *args: Any) -> list[Any]:
    """The results or errors of a call of all ranks."""

    def answer(worker: Any, error: Exception | None) -> Any:
        worker.error = error
        try:
            return getattr(worker, method)(*args)
        except Exception as raised:
            return raised

    with ThreadPoolExecutor(len(workers)) as threads:
        return list(threads.map(answer, workers, errors))


def test_calls_that_succeed_return_on_all_ranks(workers: Workers) -> None:
    for _ in range(3):
        assert wake(workers) == ["awake"] * 3


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1), (0, 2), (0, 1, 2)])
def test_last_rank_raises_the_errors_of_all(workers: Workers, failing: tuple[int, ...]) -> None:
    errors = [OutOfMemoryError(f"rank {rank}: full") if rank in failing else None for rank in range(3)]
    answers = wake(workers, errors)
    assert not any(isinstance(answer, Exception) for answer in answers[:2])
    assert str(answers[2]) == "; ".join(f"rank {rank}: full" for rank in failing)
    assert wake(workers) == ["awake"] * 3  # the next call has answers of its own


def test_error_of_the_last_rank_alone_keeps_its_type(workers: Workers) -> None:
    error = OutOfMemoryError("full")
    assert wake(workers, [None, None, error]) == ["awake", "awake", error]


def test_errors_of_others_than_memsaver_get_the_rank(workers: Workers) -> None:
    answers = wake(workers, [None, AssertionError("asleep"), AssertionError()])
    assert str(answers[2]) == "rank 1, wake_up: AssertionError: asleep; rank 2, wake_up: AssertionError: "


def test_rank_that_does_not_end_is_named(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_ANSWER_S", 0.05)
    with pytest.raises(RuntimeError, match="^rank 0 has not ended its wake_up within 0 s after the last rank; rank 1"):
        workers[2].wake_up()


def test_rank_without_drop_in_is_not_waited_for(workers: Workers) -> None:
    errors: list[Exception | None] = [None, *(DropInError("rank 0 has no drop-in", rank=0) for _ in range(2))]
    assert wake(workers[1:], errors[1:]) == errors[1:]


class OwnExecutor(type("MultiprocExecutor", (), {})):  # type: ignore[misc]
    """An executor that a framework derives from vLLM's."""


@pytest.mark.parametrize("backend", ["ray", OwnExecutor])
def test_executors_that_call_all_ranks_get_one_error(workers: Workers, backend: Any) -> None:
    for each in workers:
        each.parallel_config.distributed_executor_backend = backend
    answers = wake(workers, [OutOfMemoryError("rank 0: full"), None, None])
    assert answers[:2] == [None, "awake"] and str(answers[2]) == "rank 0: full"


@pytest.mark.parametrize(
    ("name", "value"),
    [("distributed_executor_backend", "external_launcher"), ("distributed_executor_backend", int), ("world_size", 1)],
)
def test_each_rank_with_a_caller_of_its_own_raises_its_error(workers: Workers, name: str, value: Any) -> None:
    errors = [OutOfMemoryError("full"), None, None]
    for each in workers:
        setattr(each.parallel_config, name, value)
    assert wake(workers, errors) == [errors[0], "awake", "awake"]


def test_engines_of_data_parallel_ranks_do_not_answer_each_other(workers: Workers) -> None:
    others = [fake_vllm.worker(rank, 3, data_parallel_rank=1) for rank in range(3)]
    answers = wake([*workers, *others], [OutOfMemoryError("rank 0: full"), *[None] * 5])
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


def test_discard_that_fails_on_a_rank_is_one_error_too(workers: Workers) -> None:
    answers = call(workers, "discard", [OutOfMemoryError("rank 0: full"), None, None], ("kv_cache",))
    assert answers[:2] == [None, "discarded"] and str(answers[2]) == "rank 0: full"


class Transfer:
    """vLLM's KVTransferConfig."""

    def __init__(self, is_kv_transfer_instance: bool = True) -> None:
        self.kv_connector, self.is_kv_transfer_instance = "NixlConnector", is_kv_transfer_instance


@pytest.fixture(autouse=True)
def no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "transfers_kv", False)


@pytest.mark.parametrize("mode", ["vllm", "vllm:warn"])
def test_kv_transfer_from_a_shared_pool_is_refused_when_the_worker_is_made(
    load: Load, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("MEMSAVER_DROP_IN", mode)
    monkeypatch.setattr(worker_calls, "shares", lambda: True)
    drop_in.install("vllm")
    assert drop_in.status()["vllm"].state == "waiting"  # as in a worker's process: its allocator comes later
    for _ in range(2):
        with pytest.raises(DropInError, match="KV connector 'NixlConnector'.*without MEMSAVER_POOL=shared, without"):
            fake_vllm.worker(transfer=Transfer())
        load()
        assert drop_in.status()["vllm"].state == "active"


def test_kv_cache_that_is_transferred_has_one_handle_for_each_segment(load: Load) -> None:
    allocator = load().CuMemAllocator.get_instance()
    fake_vllm.worker(transfer=Transfer())
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


def test_kv_transfer_from_other_memory_is_accepted(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    load()
    assert fake_vllm.worker(transfer=Transfer(is_kv_transfer_instance=False)).wake_up() == "awake"
    assert fake_vllm.worker(transfer=Transfer(), cumem=False).wake_up() == "awake"
    aside = drop_in.DropIn("vllm", "9.9.9", "stepped aside", reason="another patch")
    monkeypatch.setitem(drop_in._states, "vllm", aside)
    assert fake_vllm.worker(transfer=Transfer()).wake_up() == "awake"


class TestWorker:
    @pytest.fixture
    def worker(self, load: Load) -> Any:
        load()
        worker = fake_vllm.worker()
        worker.freed_bytes = -1
        return worker

    def test_shared_pool_may_take_memory_of_the_driver_during_a_sleep(
        self, worker: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("memsaver.drop_in.vllm.worker.shares", lambda: True)
        with caplog.at_level(logging.INFO, "vllm"):
            worker.sleep(level=2)
        assert "is in the shared pool, not in the driver" in caplog.text
        with pytest.raises(AssertionError, match="level is unknown"):
            worker.sleep(level=3)

    def test_without_a_shared_pool_the_assertion_stays(self, worker: Any) -> None:
        with pytest.raises(AssertionError, match="Memory usage increased after sleeping"):
            worker.sleep(level=1)
        worker.freed_bytes = 0
        worker.sleep(level=1)

    def test_drop_in_that_stepped_aside_changes_nothing(self, worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("memsaver.drop_in.vllm.worker.shares", lambda: True)
        aside = drop_in.DropIn("vllm", "9.9.9", "stepped aside", reason="another patch")
        monkeypatch.setitem(drop_in._states, "vllm", aside)
        with pytest.raises(AssertionError, match="Memory usage increased after sleeping"):
            worker.sleep(level=1)
