"""The end of vLLM's engine ends a worker's wait for memory. A thread stands for vLLM's reader of the pipe."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import memsaver
from memsaver.drop_in.vllm import engine
from tests.drop_in import fake_vllm
from tests.drop_in.test_vllm_allocator import Load, load
from tests.support import MIB, Fill, Hooks

__all__ = ["load"]  # a fixture

Make = Callable[..., memsaver.Region]


class Pipe:
    """The reader of the pipe, and vLLM's handler of SIGTERM, which does nothing once the pipe is closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()
        self.signals: list[int] = []
        self.reader = threading.Thread(target=self.closed.wait, name="DeathPipeMonitor", daemon=True)
        self.reader.start()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self.closed.is_set():
            self.signals.append(number)

    def close(self) -> None:
        self.closed.set()
        self.reader.join()


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    monkeypatch.setattr(engine, "_found", None)
    pipe = Pipe()
    previous = signal.signal(signal.SIGTERM, pipe.handle)
    yield pipe
    signal.signal(signal.SIGTERM, previous)
    pipe.close()


@pytest.fixture
def asleep(make: Make) -> Iterator[memsaver.Region]:
    """A region that cannot wake up: another one has the memory."""
    region = make()
    address = Hooks(region).alloc(MIB)
    region.pause()
    with Fill():
        yield region
    region.resume()
    Hooks(region).free(address)


def wait_for_memory(region: memsaver.Region) -> None:
    region.resume(memory_timeout=60.0)


@pytest.mark.parametrize("at", ["before the call", "during the wait"])
def test_wait_for_memory_ends_with_the_engine(pipe: Pipe, asleep: memsaver.Region, at: str) -> None:
    with engine.bounding():
        pass  # an earlier call, as the sleep before a wake-up
    if at == "before the call":
        pipe.close()
    else:
        threading.Timer(0.2, pipe.closed.set).start()
    with pytest.raises(engine.EndedError, match="vLLM's engine has ended or shuts down"), engine.bounding():
        wait_for_memory(asleep)
    assert asleep.state == "paused"
    assert signal.getsignal(signal.SIGTERM) == pipe.handle


def test_signal_reaches_the_handler_of_vllm_while_the_engine_runs(pipe: Pipe) -> None:
    with engine.bounding():
        os.kill(os.getpid(), signal.SIGTERM)
    assert pipe.signals == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == pipe.handle


def test_call_in_another_thread_changes_no_handler(pipe: Pipe) -> None:
    found: list[Any] = []

    def call() -> None:
        with engine.bounding():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found == [pipe.handle]


def test_process_without_a_pipe_changes_no_handler(pipe: Pipe) -> None:
    pipe.reader.name = "another"
    with engine.bounding():
        assert signal.getsignal(signal.SIGTERM) == pipe.handle


class TestWorker:
    @pytest.fixture
    def worker(self, load: Load, pipe: Pipe) -> Any:
        load()
        return fake_vllm.worker()

    def test_calls_with_a_shared_pool_end_with_the_engine(
        self, worker: Any, pipe: Pipe, asleep: memsaver.Region, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("memsaver.drop_in.vllm.worker.shares", lambda: True)
        worker.parallel_config.world_size = 2  # the last rank would wait for the answer of this one
        worker.call = lambda: wait_for_memory(asleep)
        threading.Timer(0.2, pipe.closed.set).start()
        with pytest.raises(engine.EndedError):
            worker.wake_up()

    def test_calls_without_a_shared_pool_change_no_handler(self, worker: Any, pipe: Pipe) -> None:
        found: list[Any] = []
        worker.call = lambda: found.append(signal.getsignal(signal.SIGTERM))
        assert worker.wake_up() == "awake"
        assert found == [pipe.handle]
