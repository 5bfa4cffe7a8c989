"""Groups of real Ray actors, in one cluster. Most turns are on a host device that cannot hold all ranks."""

from __future__ import annotations

import asyncio
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs ray")

import memsaver  # noqa: E402
from memsaver import config  # noqa: E402
from memsaver.broker import caller  # noqa: E402
from memsaver.ray import AsyncColocated, Group  # noqa: E402
from memsaver.ray.ranks import MemberRank  # noqa: E402
from memsaver.turns import plan as plan_module  # noqa: E402
from memsaver.turns import reports  # noqa: E402
from tests.ray_support import Buffer, Member, cluster_of_one_machine, look, use  # noqa: E402
from tests.support import MIB, fresh_device, until  # noqa: E402

DEVICE_BYTES = 98 * MIB  # a size of its own: processes that name the same size share the device
ENGINE, TRAINER = 32 * MIB, 96 * MIB  # two engines fit, but no engine beside the trainer
PHASES = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params"]}, "none": {}}
START_S = 1.0


class Slow(Member):
    def __init__(self, *arguments: Any) -> None:
        time.sleep(START_S)
        super().__init__(*arguments)


class Hanging(Member):
    """Hangs in the drain, or with a guest that leaves, as long as its folder has a file of that name."""

    folder = ""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)

        class Leaves(memsaver.Guest):
            def leave(guest) -> None:  # noqa: N805
                self.hang("leave")

            def come_back(guest) -> None:  # noqa: N805
                pass

        memsaver.register(Leaves("connections", "weights"))

    def hang(self, name: str) -> None:
        while os.access(f"{self.folder}/{name}", os.F_OK):  # no function of Python, whose frame a report could name
            time.sleep(0.01)

    def colocated_drain(self, tags: Any) -> None:
        self.hang("drain")


class Async(AsyncColocated):
    def __init__(self, device: str, tag: str, nbytes: int) -> None:
        use(device)
        self.buffer = Buffer(tag, nbytes)
        self.buffer.fill(1)
        self.drained = 0

    async def look(self) -> tuple[str, bool, int]:
        state = self.buffer.region.state
        return state, state != "active" or self.buffer.holds(1), self.drained

    async def hold(self) -> None:
        """As a launch does that uses the region: a pause waits for its end."""
        assert memsaver._core.acquire([self.buffer.region._core]) is None

    async def let_go(self) -> None:
        memsaver._core.release([self.buffer.region._core])

    async def colocated_drain(self, tags: Any) -> None:
        await asyncio.sleep(0)
        self.drained += 1


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    with cluster_of_one_machine():
        yield


@pytest.fixture(autouse=True)
def report_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setitem(config._values, "report_dir", str(tmp_path / "reports"))
    return tmp_path / "reports"


Spawn = Callable[..., Any]


@pytest.fixture(scope="module")
def spawn(cluster: None) -> Iterator[Spawn]:
    """Makes actors that end with the file."""
    actors = []

    def make(kind: type, *args: object, **options: object) -> Any:
        actors.append(ray.remote(kind).options(num_cpus=0, **options).remote(*args))
        return actors[-1]

    yield make
    for actor in actors:
        ray.kill(actor)


@pytest.fixture(scope="module")
def actors(spawn: Spawn) -> list[Any]:
    """Two engines and a trainer with contents. Each start of an actor takes 2 s of the processor."""
    device = str(DEVICE_BYTES)
    found = []
    for kind, tag, nbytes, seed in (
        (Member, "weights", ENGINE, 10), (Hanging, "weights", ENGINE, 11), (Member, "params", TRAINER, 20),
    ):  # fmt: skip
        found.append(spawn(kind, device, tag, nbytes, seed, max_restarts=1, max_task_retries=-1))
        ray.get(found[-1].pause.remote())
    return found


@pytest.fixture
def ranks(actors: list[Any]) -> tuple[list[Any], Any]:
    """The engines, and the trainer. All are paused, also after a test that failed."""
    ray.get([each.set.remote(breaks=False, folder="") for each in actors])
    ray.get([each.pause.remote() for each in actors])
    return actors[:2], actors[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Whose files let actors hang, which go on after a test that failed."""
    yield tmp_path
    for path in (tmp_path / "leave", tmp_path / "drain"):
        path.unlink(missing_ok=True)


def fails(group: Group, name: str, text: str, **options: Any) -> Any:
    with pytest.raises(memsaver.Error, match=text) as raised, group.enter(name, **options):
        pytest.fail("entered")
    assert group.entered is None
    error: Any = raised.value
    assert error.phase == name
    return error


def test_roles_take_turns_and_keep_addresses_and_contents(ranks: tuple[list[Any], Any]) -> None:
    engines, trainer = ranks
    group = Group(engine=engines, trainer=trainer, phases=PHASES)
    addresses = ray.get([each.do.remote("self.buffer.address") for each in (*engines, trainer)])
    for _ in range(2):
        with group.enter("rollout") as turn:
            assert look(*engines, trainer) == ["active", "active", "paused"]
            assert [each.resumed for each in turn.resumed["engine"]] == [("weights",)] * 2
        with group.enter("train") as turn:
            assert group.entered == "train"
            assert look(*engines, trainer) == ["paused", "paused", "active"]
            assert [each.paused for each in turn.paused["engine"]] == [("weights",)] * 2
            assert sum(each.restored_bytes for each in turn.transitions) >= TRAINER
            assert turn.seconds >= turn.pause_seconds + turn.resume_seconds > 0 and not turn.side_by_side
    assert ray.get([each.do.remote("self.buffer.address") for each in (*engines, trainer)]) == addresses
    group.enter("none")
    assert look(*engines, trainer) == ["paused"] * 3
    with pytest.raises(TypeError, match="is a class"):
        Group(engine=[*engines, ray.remote(Member)], phases=PHASES | {"train": {}})


def test_an_actor_that_rays_memory_monitor_kills_is_a_dead_rank(ranks: tuple[list[Any], Any]) -> None:
    """Its calls raise no RayActorError."""
    rank, error = MemberRank("engine", 0, ranks[0][0]), ray.exceptions.OutOfMemoryError("killed")
    assert rank.is_lost(error) and "group.replace('engine', 0, actor)" in rank.described(error)


def test_the_error_of_one_rank_undoes_the_turn_and_can_be_retried(ranks: tuple[list[Any], Any]) -> None:
    engines, trainer = ranks
    group = Group(engine=engines, trainer=trainer, phases=PHASES)
    ray.get(engines[1].set.remote(breaks=True))
    error = fails(group, "rollout", "phase 'rollout'.*engine 1.*'weights'.*broken for the test")
    assert (error.role, error.rank) == ("engine", 1)
    assert isinstance(error.__cause__, memsaver.BackupError)
    assert pickle.loads(pickle.dumps(error)).rank == 1
    assert look(*engines, trainer) == ["paused"] * 3
    group.enter("rollout")
    assert look(*engines, trainer) == ["active", "active", "paused"]
    group.enter("none")


def test_a_turn_without_memory_names_the_holder_and_can_be_retried(ranks: tuple[list[Any], Any]) -> None:
    engines, trainer = ranks
    ray.get(engines[0].resume.remote())
    group = Group(trainer=trainer, phases={"train": {"trainer": ["params"]}, "none": {}})
    cause = fails(group, "train", "trainer 0 could not resume.*OutOfMemoryError").__cause__
    assert isinstance(cause, memsaver.OutOfMemoryError)
    assert cause.free_bytes < cause.needed_bytes
    leaves = engines[0].pause.remote()
    with group.enter("train", memory_timeout=30.0):
        assert ray.get(leaves).released_bytes == ENGINE
    group.enter("none")


def test_an_async_actor_goes_on_serving(spawn: Spawn) -> None:
    device = fresh_device()
    engine = spawn(Async, device, "weights", MIB)
    group = Group(engine=engine, phases=PHASES | {"train": {"engine": []}})
    group.enter("rollout")
    ray.get(engine.hold.remote())
    with ThreadPoolExecutor(1) as caller:
        entering = caller.submit(group.enter, "train")
        until(lambda: ray.get(engine.look.remote())[2] == 1)
        for _ in range(20):  # the pause waits, and other methods answer
            assert ray.get(engine.look.remote())[0] in ("active", "pausing")
        assert not entering.done()
        ray.get(engine.let_go.remote())
        assert [each.paused for each in entering.result(60).transitions] == [("weights",)]
    assert ray.get(engine.resume.remote(["weights"])).resumed == ("weights",)
    assert look(engine) == ["active"]
    ray.get(engine.hold.remote())
    pausing = engine.pause.remote(["weights"])
    until(lambda: ray.get(engine.look.remote())[0] == "pausing")
    ray.get(engine.let_go.remote())
    assert ray.get(pausing).paused == ("weights",)


def test_actors_that_hang_in_each_half_lead_to_a_report(
    ranks: tuple[list[Any], Any], monkeypatch: pytest.MonkeyPatch, folder: Path, report_dir: Path
) -> None:
    monkeypatch.setattr(plan_module, "_COMPLETE_S", 0.0)
    monkeypatch.setattr(plan_module, "_ANSWER_S", 0.0)
    monkeypatch.setattr(reports, "_PARTS_S", 60.0)
    engines, _ = ranks
    ray.get(engines[1].set.remote(folder=str(folder)))
    group = Group(engine=engines, phases=PHASES | {"train": {"engine": []}})
    group.enter("rollout")
    (folder / "leave").touch()
    error = fails(group, "none", "engine 1 could not pause 'weights': WaitTimeoutError", timeout=2.0)
    place = r"; it is in colocated_commit\(\): \w+\(\) at .*\.py:\d+; the pause of 'weights' has been in "
    assert re.search(place, str(error)), error
    assert "has been in the stage 'guests leave' of 'connections' for" in str(error)
    assert str(error).endswith(f"; report: {error.report}") and Path(error.report).parent == report_dir
    _, driver, zero, one = Path(error.report).read_text().split("\n== ")
    assert driver.startswith(f"the process of the group ==\npid {os.getpid()} on ")
    assert zero.startswith("engine 0 ==\nit answers") and "pause 'weights': done" in zero
    assert one.startswith("engine 1 ==\nit is in colocated_commit()") and "in hang\n" in one
    fails(group, "none", "engine 1 has not answered a call of an earlier turn", timeout=2.0)
    (folder / "leave").unlink()
    until(lambda: look(*engines) == ["paused", "paused"])
    group.enter("rollout", timeout=60.0)

    (folder / "drain").touch()
    error = fails(group, "none", "engine 1 could not prepare to pause 'weights'", timeout=2.0)
    place = r"; it is in colocated_prepare\(\): hang\(\) at test_ray\.py:\d+; report: "
    assert re.search(place, str(error)), error
    assert "in colocated_drain\n" in Path(error.report).read_text()
    (folder / "drain").unlink()
    assert look(*engines) == ["active", "active"]  # the actor has taken its preparation back
    group.enter("none", timeout=60.0)


def test_the_actors_of_a_ray_job_use_its_broker_by_runtime_env(spawn: Spawn) -> None:
    pools = Path(tempfile.mkdtemp(prefix="pool", dir="/tmp"))  # short: a socket's path holds 107 bytes
    variables = {
        "MEMSAVER_POOL": "shared", "MEMSAVER_POOL_CAPACITY": "64MiB", "MEMSAVER_POOL_DIR": str(pools),
        "MEMSAVER_JOB": "of-ray", "MEMSAVER_HOST_DEVICE": fresh_device(),
    }  # fmt: skip
    options = {"runtime_env": {"env_vars": variables}}
    engine = spawn(Member, "", "weights", 40 * MIB, **options)  # each has more than a half of the pool
    ray.get(engine.pause.remote())
    trainer = spawn(Member, "", "params", 40 * MIB, **options)
    ray.get(trainer.pause.remote())
    group = Group(engine=engine, trainer=trainer, phases=PHASES)
    for phase, states in (("rollout", ["active", "paused"]), ("train", ["paused", "active"])):
        assert group.enter(phase).side_by_side
        assert look(engine, trainer) == states
    (path,) = pools.glob("*/*.sock")
    assert (path.parent.name, len(caller.status(path)["clients"])) == ("job-of-ray", 2)
    shutil.rmtree(pools)


def test_an_actor_exports_its_figures_to_ray(ranks: tuple[list[Any], Any]) -> None:
    text = "[__import__('memsaver.metrics').metrics.export_to_ray(), memsaver.metrics._gauges][1]"
    gauges = ray.get(ranks[0][0].do.remote(text))
    assert gauges["memsaver_process_bytes"].info["tag_keys"] == ("device", "kind", "label")
    assert "memsaver_stages_seconds_total" in gauges


def test_an_actor_that_dies_is_named_and_joins_again(ranks: tuple[list[Any], Any], spawn: Spawn) -> None:
    """The last test: the others use the actor."""
    (engine, _), trainer = ranks
    group = Group(engine=engine, trainer=trainer, phases=PHASES)
    group.enter("rollout")
    ray.get(engine.set.remote(dies="commit"))
    error = fails(group, "train", "engine 0 could not pause 'weights': Actor")
    assert isinstance(error.__cause__, ray.exceptions.RayActorError)
    assert (error.role, error.rank) == ("engine", 0)
    assert look(trainer) == ["paused"]
    for name, states in (("train", ["paused", "active"]), ("rollout", ["active", "paused"])):
        group.enter(name)  # the restarted actor's region is active: it leaves
        assert look(engine, trainer) == states
    ray.kill(engine)
    for _ in range(2):
        error = fails(group, "none", r"engine 0 could not .*died.*; unless Ray .*: group.replace\('engine', 0, actor\)")
    begin = time.perf_counter()
    group.replace("engine", 0, spawn(Slow, str(DEVICE_BYTES), "weights", ENGINE))
    with group.enter("none") as turn:  # its start is no part of the turn
        assert turn.seconds < time.perf_counter() - begin - START_S
        assert turn.paused["engine"][0].paused == ("weights",)
    # An actor that the trainer calls has died, and the trainer has not.
    ray.get(trainer.set.remote(asks=engine))
    text = "trainer 0 could not resume 'params': a call of its own raised ActorDiedError: [^;]*$"
    fails(group, "train", text, restore=False)
    ray.get(trainer.set.remote(asks=None))
    fails(group, "train", "the phase that was to write them failed")
    group.enter("train", restore=False)
