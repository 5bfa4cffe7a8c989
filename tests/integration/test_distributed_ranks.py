"""Groups over torch.distributed's store: the ranks are processes with regions on the host driver."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed

import memsaver
from memsaver.distributed import Group, LostRankError
from tests.ranks_support import ranks, store_server
from tests.ray_support import Member
from tests.support import MIB, fresh_device

PHASES = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params"]}}
TIMEOUT = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_HOST_DEVICE", fresh_device())


def _joined(rank: int, port: int) -> tuple[Group, Member]:
    """Two engines and a trainer, in the phase "rollout"."""
    # The store is not in one of the ranks, as under torchrun.
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    member = Member("", "weights" if rank < 2 else "params", 4 * MIB)
    role: dict[str, Any] = {"engine" if rank < 2 else "trainer": member}
    group = Group(phases=PHASES, store=store, rank=rank, world_size=3, **role)
    group.enter("rollout", timeout=60)
    assert member.buffer.region.state == ("active" if rank < 2 else "paused")
    return group, member


def _die(rank: int, port: int, victim: int, step: str) -> None:
    group, member = _joined(rank, port)
    if rank == victim:
        member.dies = step
    with pytest.raises(memsaver.Error, match=rf"rank {victim} has ended \(pid \d+\)") as raised:
        group.enter("train")
    error: Any = raised.value
    assert isinstance(error.__cause__, LostRankError) and error.__cause__.process == victim
    assert (error.phase, error.rank) == ("train", victim)
    expected = "paused" if rank == 2 or step == "commit" else "active"
    assert member.buffer.region.state == expected
    with pytest.raises(memsaver.Error, match=f"rank {victim} "):
        group.enter("rollout")
    memsaver.resume()
    assert member.buffer.holds(1)


@pytest.mark.parametrize(("victim", "step"), [(0, "drain"), (1, "commit")])
def test_a_rank_killed_in_a_half_of_the_turn_is_named_on_the_others(victim: int, step: str) -> None:
    with store_server() as (_, port), ranks(_die, 3, port, victim, step, lost=[victim]):
        pass


def _lose_store(rank: int, port: int, directory: str) -> None:
    group, member = _joined(rank, port)
    Path(directory, str(rank)).touch()
    with pytest.raises(memsaver.Error, match="store cannot be reached: .*has the process that holds it ended"):
        while True:
            group.enter("train", timeout=60)
            group.enter("rollout", timeout=60)
    memsaver.resume()
    assert member.buffer.holds(1)
    with pytest.raises(memsaver.Error, match="this group can enter no phase any more"):
        group.enter("train")


def test_a_store_that_ends_is_named_on_all_ranks(tmp_path: Path) -> None:
    with store_server() as (server, port), ranks(_lose_store, 3, port, str(tmp_path)) as processes:
        while len(list(tmp_path.iterdir())) < 3:
            assert all(process.is_there() for process in processes)
        server.kill()


def _share(rank: int, port: int) -> None:
    store = distributed.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    member = Member("", "reference", 20 * MIB, same_as="model")
    phases: dict[str, Any] = {"score": {"engine": ["reference"]}, "train": {}}
    group = Group(phases=phases, store=store, rank=rank, world_size=3, engine=member)
    group.enter("score", timeout=60)
    member.buffer.array[9 * MIB] ^= rank == 1
    with pytest.raises(memsaver.Error, match=r"in block 1 .*, rank 1\) differ from the others") as raised:
        group.enter("train", timeout=60)
    assert isinstance(raised.value.__cause__, memsaver.SameError)
    assert member.buffer.region.state == "active"
    member.buffer.array[9 * MIB] ^= rank == 1
    turn = group.enter("train", timeout=60)
    assert sorted(each.copied_bytes for each in turn.paused["engine"]) == [4 * MIB, 8 * MIB, 8 * MIB]
    group.enter("score", timeout=60)
    assert member.buffer.holds(1)


def test_ranks_with_equal_contents_write_a_share_each_and_one_that_differs_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MEMSAVER_POOL_DIR", str(tmp_path))
    with store_server() as (_, port), ranks(_share, 3, port):
        pass
