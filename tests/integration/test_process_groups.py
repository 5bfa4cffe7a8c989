"""Process groups as guests: closed and opened again under meshes, DTensors and FSDP2, over gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import memsaver
from memsaver.distributed import Colocated, Group
from memsaver.guests import ProcessGroups
from memsaver.guests import process_groups as module
from memsaver.guests.meeting import Meeting
from tests.ranks_support import free_address, ranks

TAG = "train"
SHORT_S = 0.3
LONG_S = 60.0
Check = Callable[[int, str], None]


@pytest.fixture(autouse=True)
def made_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group is made when all ranks have made it. Else a pause could close the connections that another rank makes."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")


def on_ranks(count: int, over: str = "file", **options: Any) -> Callable[[Check], Callable[[Path], None]]:
    """A test that calls its function on so many ranks. ``over``: the kind of the store, which is an argument of it."""

    def made(check: Check) -> Callable[[Path], None]:
        def test(tmp_path: Path) -> None:
            with ranks(check, count, str(tmp_path / "store") if over == "file" else free_address(), **options):
                pass

        test.__name__, test.__doc__, check.__qualname__ = check.__name__, check.__doc__, f"{check.__name__}.check"
        test.check = check  # type: ignore[attr-defined]  # where pickle finds it
        return test

    return made


def begin(rank: int, world_size: int, meeting: str, **options: Any) -> ProcessGroups:
    """Makes the guest and the world. ``meeting``: a file, or ``tcp://host:port``, whose store is in rank 0."""
    guest = ProcessGroups(TAG, backends=["gloo"], **options)
    memsaver.register(guest)
    meeting = meeting if "://" in meeting else f"file://{meeting}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    return guest


def reopen(guest: ProcessGroups) -> None:
    memsaver.pause(TAG)
    assert guest.closed
    memsaver.resume(TAG)
    assert guest.closed == []


# Computations with the groups give the same results


def collectives(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The results of all kinds of calls, on the ranks of one group."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    base = torch.arange(size * 2, dtype=torch.float32) + rank
    results = [base.clone()]
    dist.all_reduce(results[0], group=group)
    gathered = torch.empty(size * size * 2)
    dist.all_gather_into_tensor(gathered, base, group=group)
    parts = [torch.empty_like(base) for _ in range(size)]
    dist.all_gather(parts, base, group=group)
    scattered = torch.empty(2)
    dist.reduce_scatter_tensor(scattered, base, group=group)
    exchanged = torch.empty_like(base)
    dist.all_to_all_single(exchanged, base, group=group)
    sent = base.clone()
    dist.broadcast(sent, group=group, group_src=0)
    reduced = base.clone()
    dist.reduce(reduced, group=group, group_dst=0)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank, group=group)
    received = torch.empty_like(base)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, base, group=group, group_peer=(rank + 1) % size),
            dist.P2POp(dist.irecv, received, group=group, group_peer=(rank - 1) % size),
        ]
    )
    for work in works:
        work.wait()
    dist.barrier(group)
    return [*results, gathered, *parts, scattered, exchanged, sent, reduced, torch.tensor(objects), received]


def check_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second):
        assert torch.equal(one, other)


class Trainer:
    """FSDP2 with hybrid sharding on a mesh of two dimensions."""

    def __init__(self, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def step(self, number: int) -> float:
        torch.manual_seed(100 * number + dist.get_rank())
        loss = self.model(torch.randn(4, 16)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total)


@on_ranks(4)
def test_fsdp_meshes_and_collectives_compute_the_same_with_groups_opened_anew(rank: int, file: str) -> None:
    guest = begin(rank, 4, file)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    pairs = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    mine = pairs[0] if rank in (0, 3) else pairs[1]
    tensor = distribute_tensor(torch.arange(16.0), mesh["shards"], [Shard(0)])
    groups = [None, mine, mesh.get_group("shards")]
    before = [collectives(group) for group in groups]
    calm = Trainer(mesh)
    expected = [calm.step(number) for number in range(2)]

    trainer = Trainer(mesh)
    losses = []
    for number in range(2):
        losses.append(trainer.step(number))
        reopen(guest)
    assert losses == expected
    for one, other in zip(calm.model.parameters(), trainer.model.parameters()):
        assert isinstance(one, DTensor) and isinstance(other, DTensor)
        assert torch.equal(one.full_tensor(), other.full_tensor())

    for group, results in zip(groups, before):
        check_equal(collectives(group), results)
    assert torch.equal(tensor.full_tensor(), torch.arange(16.0))
    total = tensor.sum()
    assert isinstance(total, DTensor)
    assert float(total.full_tensor()) == 120
    assert mesh.get_group("shards") is groups[2]
    assert groups[1] is mine
    # Groups that are made later, of wrapped and of opened groups.
    check_equal(collectives(dist.new_group(range(4))), before[0])
    reopen(guest)
    check_equal(collectives(mine), before[1])


class Refusing(Colocated):
    refuses = False

    def colocated_drain(self, tags: Any) -> None:
        if self.refuses:
            raise OSError("busy")


@on_ranks(2)
def test_turns_of_a_group_close_and_open_the_groups_of_all_ranks(rank: int, file: str) -> None:
    guest = begin(rank, 2, file, timeout=30.0)
    params, kv = (memsaver.region(tag, device="cpu", backup="host") for tag in (TAG, "kv_cache"))
    weight = params.empty((4,))
    weight.fill_(rank + 1)
    kv.empty((4,)).fill_(0)
    phases = {"rollout": {"worker": ["kv_cache"]}, "train": {"worker": [TAG]}}
    worker = Refusing()
    group = Group(phases=phases, worker=worker)
    for number in range(2):
        group.enter("rollout", timeout=60)
        assert (guest.closed, params.state) == (["0"], "paused")
        group.enter("train", timeout=60)
        assert (guest.closed, kv.state) == ([], "paused")
        total = weight.clone()
        dist.all_reduce(total)
        assert total.tolist() == [3.0] * 4, number
    # A rank that cannot prepare: no group of any rank is closed, since opening one would need all ranks.
    worker.refuses = rank == 1
    with pytest.raises(memsaver.Error, match="could not prepare to pause.*busy"):
        group.enter("rollout", timeout=60)
    assert (guest.closed, params.state) == ([], "active")
    dist.barrier()
    group.close()


# Failures


@on_ranks(2)
def test_a_pause_with_work_pending_is_refused(rank: int, file: str) -> None:
    guest = begin(rank, 2, file, timeout=SHORT_S)
    signals = dist.PrefixStore("signals", dist.distributed_c10d._get_default_store())
    tensor = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(memsaver.GuestError, match="collectives of the groups 0 have not ended") as raised:
            memsaver.pause(TAG)
        assert raised.value.stage == "prepare"
        signals.set("refused", "")
    else:
        signals.wait(["refused"])
        work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    work.wait()
    assert float(tensor) == 2
    guest.timeout = LONG_S
    memsaver.pause(TAG)
    memsaver.resume(TAG)
    dist.all_reduce(tensor)
    assert float(tensor) == 4


class Signals:
    """Ranks wait for each other at points with a name, through the store of the world."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._store = dist.PrefixStore("signals", dist.distributed_c10d._get_default_store())
        self._rank, self._size = rank, world_size

    def all_at(self, name: str) -> None:
        self._store.set(f"{name} {self._rank}", "")
        self._store.wait([f"{name} {each}" for each in range(self._size)])


def resume_in_vain(guest: ProcessGroups, text: str) -> None:
    with pytest.raises(memsaver.GuestError, match=text):
        memsaver.resume(TAG)
    assert guest.closed == ["0"]


def check_open(guest: ProcessGroups, group: dist.ProcessGroup | None = None) -> None:
    assert guest.closed == []
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=group)
    assert float(tensor) == dist.get_world_size(group)


@on_ranks(1)
def test_collectives_of_other_threads_do_not_disturb_a_pause(rank: int, file: str) -> None:
    """A collective of another thread may begin in any line of pending()."""
    guest = begin(rank, 1, file)
    works = [dist.all_reduce(torch.ones(2), async_op=True) for _ in range(3)]

    def trace(frame: Any, event: str, argument: object) -> Any:
        if event == "call" and "weak" not in frame.f_code.co_filename:
            return None
        if event == "line":
            works.append(dist.all_reduce(torch.ones(2), async_op=True))
            works[-1].wait()
        return trace

    for work in works:
        work.wait()
    sys.settrace(trace)
    try:
        guest.prepare()
    finally:
        sys.settrace(None)
    assert len(works) > 3
    reopen(guest)


@on_ranks(3)
def test_groups_open_together_after_failures_on_some_ranks(rank: int, file: str) -> None:
    guest = begin(rank, 3, file)
    signals = Signals(rank, 3)

    def alone(name: str, *actors: int, pauses: bool, attempts: int) -> None:
        if rank in actors:
            guest.timeout = SHORT_S
            if pauses:
                memsaver.pause(TAG)
            for _ in range(attempts):
                resume_in_vain(guest, "could not come back: TimeoutError: ")
            guest.timeout = LONG_S
        signals.all_at(name)

    # A rank has paused and tries to resume, while the groups of the others are open.
    alone("first", 0, pauses=True, attempts=2)
    alone("second", 1, 2, pauses=True, attempts=0)
    memsaver.resume(TAG)
    check_open(guest)
    # Ranks make different numbers of attempts, at different times.
    alone("third", 0, 1, 2, pauses=True, attempts=0)
    alone("fourth", 1, pauses=False, attempts=3)
    alone("fifth", 2, pauses=False, attempts=1)
    alone("sixth", 0, 1, pauses=False, attempts=1)
    memsaver.resume(TAG)
    check_open(guest)
    reopen(guest)
    check_open(guest)


@on_ranks(2, over="tcp")
def test_rank_that_fails_in_its_last_group_closes_the_groups_of_all_ranks(rank: int, address: str) -> None:
    """Over a store with one connection for each process, which an opening that waits would hold."""
    guest = begin(rank, 2, address, timeout=LONG_S)
    group = dist.new_group([0, 1])
    signals = Signals(rank, 2)
    connect = guest._connect

    def failing(record: Any, *others: Any) -> Any:
        if record.group is group:
            raise OSError("no route")
        return connect(record, *others)

    for failed in (0, 1):
        memsaver.pause(TAG)
        if rank == failed:
            guest._connect = failing  # type: ignore[assignment,method-assign]
        with pytest.raises(memsaver.GuestError, match="OSError: no route"):
            memsaver.resume(TAG)
        assert guest.closed == ["0", str(group.group_name)]
        if rank == failed:
            del guest._connect  # the class has its own
        signals.all_at(f"failed {failed}")
        memsaver.resume(TAG)
        check_open(guest)
        check_open(guest, group)


@on_ranks(2, lost=[1])
def test_a_rank_that_ends_while_groups_are_opened_is_an_error_of_the_others(rank: int, file: str) -> None:
    guest = begin(rank, 2, file, timeout=2.0)
    memsaver.pause(TAG)
    Signals(rank, 2).all_at("paused")
    if rank == 1:
        guest._connect = lambda *arguments: os._exit(0)  # type: ignore[assignment,method-assign]
    resume_in_vain(guest, "could not come back")
    resume_in_vain(guest, "the ranks 1 did not come back within 2 s")


@on_ranks(2)
def test_interrupted_calls_can_be_repeated(rank: int, file: str) -> None:
    guest = begin(rank, 2, file, timeout=LONG_S)
    group = dist.new_group([0, 1])
    signals = Signals(rank, 2)
    if rank == 0:  # between two groups that a pause closes
        close = guest._close

        def interrupted(record: Any, *others: Any) -> None:
            if record.group is not group:
                raise KeyboardInterrupt
            close(record, *others)

        guest._close = interrupted  # type: ignore[assignment,method-assign]
        with pytest.raises(KeyboardInterrupt):
            memsaver.pause(TAG)
        del guest._close
        assert guest.closed == [group.group_name]
    reopen(guest)
    check_open(guest, group)

    # After all ranks have opened their groups. This rank's groups are open, and the guest counts as away.
    settle = Meeting.settle

    def settled(*arguments: Any) -> None:
        settle(*arguments)
        raise KeyboardInterrupt

    for again in (True, False):
        memsaver.pause(TAG)
        if rank == 0:
            Meeting.settle = settled  # type: ignore[assignment,method-assign]
            with pytest.raises(KeyboardInterrupt):
                memsaver.resume(TAG)
            Meeting.settle = settle  # type: ignore[method-assign]
        if rank == 1 or again:
            memsaver.resume(TAG)
        check_open(guest)
        signals.all_at(f"interrupted, {again}")
    memsaver.pause(TAG)  # closes the groups of rank 1 alone
    signals.all_at("closed")
    assert bool(guest.closed) is (rank == 1)
    memsaver.resume(TAG)
    check_open(guest)
    check_open(guest, group)


# Groups that are made and destroyed while others are closed


@on_ranks(2)
def test_groups_are_made_and_destroyed_while_others_are_closed(rank: int, file: str) -> None:
    guest = begin(rank, 2, file, timeout=LONG_S)
    first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
    memsaver.pause(TAG)
    dist.destroy_process_group(first)
    made = dist.new_group([0, 1])
    assert guest.closed == ["0", second.group_name]
    check_made = torch.ones(1)
    dist.all_reduce(check_made, group=made)
    assert float(check_made) == 2
    memsaver.resume(TAG)
    for group in (None, second, made):
        check_open(guest, group)
    reopen(guest)
    check_open(guest, made)

    memsaver.pause(TAG)
    dist.destroy_process_group()
    memsaver.resume(TAG)
    assert guest.closed == []
    for paused in (False, True):
        if paused:
            memsaver.pause(TAG)
            dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.FileStore(f"{file} {paused}", 2), rank=rank, world_size=2)
        if paused:
            memsaver.resume(TAG)
        check_open(guest)
        reopen(guest)
        check_open(guest, dist.new_group([0, 1]))
        store = dist.PrefixStore(f"memsaver/{guest.name}", dist.distributed_c10d._get_default_store())
        assert store.check(["decision"])  # the ranks have met in the store of this world


@on_ranks(3)
def test_ranks_without_groups_take_part(rank: int, file: str) -> None:
    """The world is of another backend. Rank 2 has no group, and the others wait for it."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # the backend that does nothing

    guest = ProcessGroups(TAG, backends=["gloo"], timeout=LONG_S)
    memsaver.register(guest)
    dist.init_process_group("fake", store=dist.FileStore(file, 3), rank=rank, world_size=3)
    signals = Signals(rank, 3)
    group = dist.new_group([0, 1], backend="gloo")
    for number in range(2):
        memsaver.pause(TAG)
        assert bool(guest.closed) is (rank != 2)
        signals.all_at(f"paused {number}")
        memsaver.resume(TAG)
        if rank != 2:
            check_open(guest, group)


# One rank


@on_ranks(1)
def test_groups_of_one_rank_are_closed_and_opened_and_the_guest_ends(rank: int, file: str) -> None:
    guest = begin(rank, 1, file)
    group = dist.new_group([0], backend="gloo", group_desc="pair")
    with pytest.raises(memsaver.Error, match="wrapped by the guest 'process groups'"):
        ProcessGroups("other")
    memsaver.pause(TAG)
    names = guest.closed
    assert len(names) == 2
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1), group=group),
        lambda: dist.barrier(group),
        lambda: torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", group.group_name),
    ):
        with pytest.raises((memsaver.Error, RuntimeError), match="is closed"):
            call()
    assert (group.rank(), group.size(), group.group_desc, dist.get_world_size(group)) == (0, 1, "pair", 1)
    dist.destroy_process_group(group)
    assert guest.closed == ["0"]
    memsaver.resume(TAG)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    reopened = [memsaver.pause(TAG).paused, memsaver.resume(TAG).resumed]
    assert reopened == [(TAG,), (TAG,)]
    assert guest.closed == []
    guest.unwrap()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert type(dist.group.WORLD) is dist.ProcessGroup
    with pytest.raises(memsaver.Error, match="is initialized"):
        ProcessGroups("late")
    assert module._installed is None


@on_ranks(1)
def test_groups_of_other_backends_stay_open(rank: int, file: str) -> None:
    guest = ProcessGroups(TAG)  # of NCCL
    assert guest.timeout == 20  # so that the death of a rank is an error of the others within 30 s
    memsaver.register(guest)
    dist.init_process_group("gloo", store=dist.FileStore(file, 1), rank=rank, world_size=1)
    assert type(dist.group.WORLD) is dist.ProcessGroup
    memsaver.pause(TAG)
    dist.all_reduce(torch.ones(1))
