"""Several nodes, each with a device and a pool of its own: brokers on all of them, and turns over all of them."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs ray")

from ray.util.scheduling_strategies import (  # noqa: E402
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)  # noqa: E402

import memsaver  # noqa: E402
from memsaver.broker import discovery  # noqa: E402
from memsaver.ray import Group  # noqa: E402
from tests import ray_support  # noqa: E402
from tests.ray_support import Member, look  # noqa: E402
from tests.support import MIB, fresh_device, until  # noqa: E402

PART = 64 * MIB  # of one rank: two do not fit
CAPACITY = 96 * MIB
PHASES = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params"]}, "none": {}}
# Of an actor: the node, whether the memory is in a shared pool, and the device.
WHERE = (
    "(__import__('ray').get_runtime_context().get_node_id(), memsaver._core.in_pool('cpu'), "
    "memsaver._core.device_uuid('cpu'))"
)
LIMIT = "(memsaver.release_host_memory(), memsaver.configure(host_limit={}))"


@dataclass
class Machine:
    """A raylet that finds a device and a directory of sockets of its own, as on a machine of its own."""

    raylet: Any
    pools: Path

    @property
    def id(self) -> str:
        return str(self.raylet.node_id)

    def brokers(self) -> list[int]:
        return [int(lock.read_text()) for lock in self.pools.glob("*.lock") if lock.read_text()]


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(ray_support)  # workers cannot import it
    cluster, found = Cluster(), []
    for _ in range(3):
        pools = Path(tempfile.mkdtemp(prefix="pool", dir="/tmp"))  # short: a socket's path holds 107 bytes
        variables = {
            "MEMSAVER_POOL": "shared",
            "MEMSAVER_POOL_CAPACITY": str(CAPACITY),
            "MEMSAVER_POOL_DIR": str(pools),
            "MEMSAVER_HOST_DEVICE": fresh_device(),
            "MEMSAVER_BACKUP_AHEAD": "off",
            "OMP_NUM_THREADS": "1",
        }
        raylet = cluster.add_node(
            num_cpus=2, num_gpus=0, object_store_memory=80 * MIB, include_dashboard=False, env_vars=variables
        )
        found.append(Machine(raylet, pools))
    ray.init(address=cluster.address, log_to_driver=False)
    yield found
    brokers = [pid for each in found for pid in each.brokers()]
    ray.shutdown()
    cluster.shutdown()
    try:
        # They have outlived their starters, the actors and the raylets.
        for machine in found:
            assert all(discovery.accepts(path) for path in machine.pools.glob("*.sock"))
        assert brokers
    finally:
        for pid in brokers:
            os.kill(pid, signal.SIGTERM)
        for machine in found:
            until(lambda: not list(machine.pools.glob("*.sock")))  # noqa: B023
            shutil.rmtree(machine.pools)


def is_dead(actor: Any) -> bool:
    try:
        ray.get(actor.look.remote())
    except ray.exceptions.ActorDiedError:
        return True
    except ray.exceptions.ActorUnavailableError:
        pass
    return False


def test_turns_over_nodes_with_a_broker_on_each(machines: list[Machine]) -> None:
    room = ray.util.placement_group([{"CPU": 2}] * 2)
    ray.get(room.ready())
    options = [{"scheduling_strategy": PlacementGroupSchedulingStrategy(room, bundle)} for bundle in range(2)]

    def actors(tag: str, seed: int) -> list[Any]:
        rank = ray.remote(Member)
        return [rank.options(**each).remote("", tag, PART, seed + index) for index, each in enumerate(options)]

    engines = actors("weights", 10)
    ray.get([each.pause.remote() for each in engines])
    trainers = actors("params", 20)
    where = ray.get([each.do.remote(WHERE) for each in engines])
    assert where == ray.get([each.do.remote(WHERE) for each in trainers])
    assert len({(node, uuid) for node, pooled, uuid in where if pooled}) == 2
    assert [len(each.brokers()) for each in machines if each.id in {node for node, _, _ in where}] == [1, 1]

    # No timeout is given: a turn that hands memory over waits for it by default.
    group = Group(engine=engines, trainer=trainers, phases=PHASES)
    for _ in range(2):
        for name, coming, away in (("rollout", engines, trainers), ("train", trainers, engines)):
            turn = group.enter(name)
            assert turn.side_by_side and turn.seconds > 0
            assert look(*coming, *away) == ["active"] * 2 + ["paused"] * 2

    ray.get(trainers[1].do.remote(LIMIT.format(0)))
    with pytest.raises(memsaver.Error, match="trainer 1 could not prepare to pause") as raised:
        group.enter("rollout")
    assert isinstance(raised.value.__cause__, memsaver.BackupError)
    assert look(*trainers, *engines) == ["active"] * 2 + ["paused"] * 2
    ray.get(trainers[1].do.remote(LIMIT.format(None)))

    # After the commit outgoing regions are paused, and regions that were resumed are paused again.
    ray.get(engines[0].set.remote(breaks=True))
    with pytest.raises(memsaver.Error, match="engine 0 could not resume 'weights': BackupError"):
        group.enter("rollout")
    assert look(*trainers, *engines) == ["paused"] * 4
    group.enter("train")
    assert look(*trainers) == ["active"] * 2

    # A node dies, and its actors are replaced on another. Not the driver's node: its actors end with it.
    own = ray.get_runtime_context().get_node_id()
    lost = 1 if where[1][0] != own else 0
    left = 1 - lost
    next(each for each in machines if each.id == where[lost][0]).raylet.kill_raylet()
    until(lambda: all(is_dead(each[lost]) for each in (engines, trainers)))  # workers end a moment after their raylet
    with pytest.raises(memsaver.Error, match=f"[a-z]+ {lost} could not prepare") as raised:
        group.enter("rollout")
    assert isinstance(raised.value.__cause__, ray.exceptions.RayError)
    assert look(trainers[left], engines[left]) == ["active", "paused"]
    spare = next(each.id for each in machines if each.id not in {node for node, _, _ in where})
    here = {"num_cpus": 0, "scheduling_strategy": NodeAffinitySchedulingStrategy(spare, soft=False)}
    engines[lost] = ray.remote(Member).options(**here).remote("", "weights", PART)
    ray.get(engines[lost].pause.remote())
    trainers[lost] = ray.remote(Member).options(**here).remote("", "params", PART)
    group.replace("engine", lost, engines[lost])
    group.replace("trainer", lost, trainers[lost])
    for name, coming in (("rollout", engines), ("train", trainers)):
        assert group.enter(name).side_by_side
        assert look(*coming) == ["active"] * 2
