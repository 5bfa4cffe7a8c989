"""Eight clients of a shared pool take many turns: nothing grows. ``MEMSAVER_TEST_TURNS=10000`` takes longer."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tests.broker_support import Running
from tests.pool_support import Worker, chunks_of, descriptors_of, is_whole, mappings_of, rss_bytes
from tests.support import MIB, PAGE, until

CLIENTS = 8
CHUNKS = 3  # enough for one client, and for a part of another's need
TURNS = int(os.environ.get("MEMSAVER_TEST_TURNS", "1200"))
WARM_UP = 50  # of each client: descriptors have arrived, allocators have their caches
GROWTH = 2 * MIB  # of a process's memory: a margin for allocators and the interpreter
# M_MMAP_THRESHOLD: freed arrays go back to the system, also below used memory in the heap.
LARGE_ARRAYS_ARE_MAPPED = f"ctypes.CDLL(None).mallopt(-3, {MIB})"


@dataclass
class Footprint:
    descriptors: int  # beside those of chunks
    chunks: int
    mappings: int
    rss_bytes: int

    @classmethod
    def of(cls, pid: int) -> Footprint:
        return cls(descriptors_of(pid) - chunks_of(pid), chunks_of(pid), mappings_of(pid), rss_bytes(pid))

    def check(self, pid: int, who: str) -> None:
        until(lambda: Footprint.of(pid).descriptors <= self.descriptors)  # the status connection closes late
        now = Footprint.of(pid)
        # The broker has the handle of a chunk beside its descriptor, and on the host device a handle is a descriptor.
        assert now.chunks <= 2 * CHUNKS, f"{who} has {now.chunks} descriptors of chunks, there are {CHUNKS}"
        assert now.mappings <= self.mappings + 4, f"{who}: {now.mappings} mappings, {self.mappings} before"
        grown = now.rss_bytes - self.rss_bytes
        assert grown <= GROWTH, f"{who} has grown by {grown / MIB:.1f} MiB in {TURNS} turns"


def test_eight_clients_keep_contents_over_many_turns() -> None:
    with Running(str(CHUNKS * PAGE)) as broker:
        workers: list[Worker] = []
        try:
            for number in range(CLIENTS):
                made = f"held = hold('turns', PAGE + 4096, 'host', {number})"  # of two chunks
                workers.append(Worker(broker, LARGE_ARRAYS_ARE_MAPPED, made, "memsaver.pause()"))
            for turns in (WARM_UP, TURNS // CLIENTS):
                if turns != WARM_UP:
                    before = {worker.pid: Footprint.of(worker.pid) for worker in workers}
                    of_broker = Footprint.of(broker.process.pid)
                for worker in workers:
                    worker.send(f"take_turns(held, {turns})")
                for worker in workers:
                    worker.answer()
                until(lambda: is_whole(broker.status()))
            status = broker.status()
            assert status["idle_bytes"] == status["total_bytes"] == int(workers[0].run("print(used_bytes())"))
            assert len(status["clients"]) == CLIENTS
            for worker in workers:
                before[worker.pid].check(worker.pid, f"client {worker.pid}")
            of_broker.check(broker.process.pid, "the broker")
        finally:
            for worker in workers:
                with worker:
                    pass
