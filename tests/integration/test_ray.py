"""Real Ray actors that take turns on a host device that cannot hold them all."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs ray")

import torch  # noqa: E402

import memsaver  # noqa: E402
from memsaver.ray import Colocated, Group  # noqa: E402
from tests.ray_support import cluster_of_one_machine  # noqa: E402

MIB = 1 << 20
DEVICE_BYTES = 162 * MIB  # a size of its own: processes that name the same size share the device
SHARE_BYTES = 64 * MIB  # of one rank, in whole chunks: two fit, three do not
PHASES = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params", "scratch"]}}

Spawn = Callable[..., list[Any]]
Ranks = tuple[list[Any], list[Any]]  # the engines and the trainers
Colocation = tuple[Group, list[Any], list[Any]]


class Worker(Colocated):
    """A rank with one tensor that is backed up and one that is not."""

    def __init__(self, backed_up: str, discarded: str) -> None:
        self.tags = (backed_up, discarded)
        self.told: list[tuple[str, int, str]] = []
        self.breaks = False

    def make(self, seed: int) -> int:
        backed_up, discarded = self.tags
        self.tensor = memsaver.region(backed_up, device="cpu", backup="host").empty(SHARE_BYTES // 2, torch.uint8)
        self.scratch = memsaver.region(discarded, device="cpu").empty(SHARE_BYTES // 2, torch.uint8)
        self.fill(seed)
        return self.tensor.data_ptr()

    def fill(self, seed: int) -> None:
        self.tensor.random_(generator=torch.Generator().manual_seed(seed))

    def intact(self, seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed)
        return torch.equal(self.tensor, torch.empty_like(self.tensor).random_(generator=generator))

    def address(self) -> int:
        return self.tensor.data_ptr()

    def states(self) -> dict[str, str]:
        return {each.tag: each.state for each in memsaver.regions.all_regions()}

    def free_bytes(self) -> int | None:
        memsaver.region(self.tags[0], device="cpu", backup="host")
        return memsaver.stats().devices["cpu"].free_bytes

    def break_next_resume(self) -> None:
        self.breaks = True

    def resume(self, tags: Any = None, restore: Any = True, **bounds: Any) -> memsaver.Transition:
        if self.breaks:
            self.breaks = False
            raise memsaver.BackupError("broken for the test", needed_bytes=1, held_bytes=0)
        return super().resume(tags, restore=restore, **bounds)

    def colocated_failed(self, role: str, rank: int, error: Exception) -> None:
        self.told.append((role, rank, type(error).__name__))

    def heard(self) -> list[tuple[str, int, str]]:
        told, self.told = self.told, []
        return told

    def pid(self) -> int:
        return os.getpid()


class Bystander:
    """Not derived from Colocated: it has only the methods that a group needs."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []

    def pause(self, tags: list[str]) -> None:
        self.calls.append(("pause", tags))

    def resume(self, tags: list[str]) -> None:
        self.calls.append(("resume", tags))

    def seen(self) -> list[tuple[str, list[str]]]:
        return self.calls


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    variables = {"MEMSAVER_HOST_DEVICE": str(DEVICE_BYTES), "OMP_NUM_THREADS": "1"}
    with cluster_of_one_machine(runtime_env={"env_vars": variables}):
        yield


@contextmanager
def spawning() -> Iterator[Spawn]:
    """Makes actors that end with the block."""
    actors = []

    def make(kind: type, count: int, *args: object) -> list[Any]:
        new = [ray.remote(kind).options(num_cpus=0).remote(*args) for _ in range(count)]
        actors.extend(new)
        return new

    yield make
    for actor in actors:
        ray.kill(actor)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    with spawning() as make:
        yield make


@pytest.fixture(scope="module")
def ranks(cluster: None) -> Iterator[Ranks]:
    """Two engines and two trainers with contents, all paused."""
    with spawning() as make:
        engines, trainers = make(Worker, 2, "weights", "kv_cache"), make(Worker, 2, "params", "scratch")
        for actors, seed in ((engines, 10), (trainers, 20)):
            ray.get([each.make.remote(seed + rank) for rank, each in enumerate(actors)])
            ray.get([each.pause.remote() for each in actors])
        yield engines, trainers


@pytest.fixture
def colocated(ranks: Ranks) -> Iterator[Colocation]:
    """A group of these ranks in the "rollout" phase: there is room for one pair. Afterwards all is free again."""
    engines, trainers = ranks
    group = Group(engine=engines, trainer=trainers, phases={**PHASES, "none": {}})
    with group.enter("rollout"):
        yield group, engines, trainers
    with group.enter("none"):
        pass


def test_roles_take_turns_and_keep_addresses_and_contents(colocated: Colocation) -> None:
    group, engines, trainers = colocated
    addresses = ray.get([each.address.remote() for each in engines + trainers])
    for _ in range(2):
        with group.enter("train") as outcome:
            assert group.entered == "train"
            assert ray.get([each.intact.remote(20 + rank) for rank, each in enumerate(trainers)]) == [True, True]
            assert ray.get(engines[0].states.remote())["weights"] == "paused"
            assert [set(each.resumed) for each in outcome.resumed["trainer"]] == [{"params", "scratch"}] * 2
            assert [each.paused for each in outcome.paused["engine"]] == [("weights",)] * 2
            assert sum(each.restored_bytes for each in outcome.transitions) >= 2 * SHARE_BYTES
            assert ray.get(engines[0].free_bytes.remote()) < SHARE_BYTES
        with group.enter("rollout") as outcome:
            assert ray.get([each.intact.remote(10 + rank) for rank, each in enumerate(engines)]) == [True, True]
            assert outcome.seconds > 0
    assert ray.get([each.address.remote() for each in engines + trainers]) == addresses
    with group.enter("none"):
        assert ray.get(engines[0].free_bytes.remote()) == DEVICE_BYTES
    assert ray.get(engines[0].states.remote()) == {"weights": "paused", "kv_cache": "paused"}


def test_the_error_of_one_rank_undoes_the_turn_and_can_be_retried(colocated: Colocation) -> None:
    group, engines, trainers = colocated
    ray.get(trainers[1].break_next_resume.remote())
    with pytest.raises(memsaver.Error, match="phase 'train'.*trainer 1.*'params', 'scratch'.*broken for") as raised:
        with group.enter("train"):
            pytest.fail("entered")
    error: Any = raised.value
    assert (error.phase, error.role, error.rank) == ("train", "trainer", 1)
    assert isinstance(error.__cause__, memsaver.BackupError)
    assert pickle.loads(pickle.dumps(error)).rank == 1
    assert group.entered is None
    others = [engines[0], engines[1], trainers[0]]
    assert ray.get([each.heard.remote() for each in others]) == [[("trainer", 1, "BackupError")]] * 3
    assert ray.get(trainers[1].heard.remote()) == []
    assert set(ray.get(trainers[0].states.remote()).values()) == {"paused"}
    with group.enter("train"):
        assert ray.get([each.intact.remote(20 + rank) for rank, each in enumerate(trainers)]) == [True, True]
    assert group.entered == "train"


def test_a_turn_without_memory_names_the_holder_and_can_be_retried(colocated: Colocation, spawn: Spawn) -> None:
    group, engines, _ = colocated
    (stranger,) = spawn(Worker, 1, "stranger", "stranger_scratch")
    ray.get(stranger.make.remote(1))
    with pytest.raises(memsaver.Error, match="trainer . could not resume.*OutOfMemoryError") as raised:
        with group.enter("train"):
            pytest.fail("entered")
    cause = raised.value.__cause__
    assert isinstance(cause, memsaver.OutOfMemoryError)
    assert cause.free_bytes < cause.needed_bytes
    assert ray.get(engines[0].free_bytes.remote()) == DEVICE_BYTES - SHARE_BYTES  # the trainer that fitted is out again
    leaves = stranger.pause.remote()
    with group.enter("train", memory_timeout=30.0):
        assert ray.get(leaves).released_bytes == SHARE_BYTES


def test_a_dead_actor_gives_a_clear_error(spawn: Spawn) -> None:
    first, second = spawn(Worker, 2, "params", "scratch")
    group = Group(trainer=[first, second], phases={"train": {"trainer": ["params"]}, "none": {}})
    ray.get(second.make.remote(1))
    with group.enter("none"):
        pass
    os.kill(ray.get(first.pid.remote()), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(memsaver.Error, match="trainer 0 could not prepare to resume 'params': .*died") as raised:
            with group.enter("train"):
                pytest.fail("entered")
        error: Any = raised.value
        assert isinstance(error.__cause__, ray.exceptions.RayActorError)
        assert (error.role, error.rank) == ("trainer", 0)
    assert ray.get(second.states.remote()) == {"params": "paused", "scratch": "active"}
    assert len(ray.get(second.heard.remote())) == 2


def test_a_turn_pauses_missing_regions_but_does_not_resume_them(spawn: Spawn) -> None:
    engines, (trainer,) = spawn(Worker, 1, "weights", "kv_cache"), spawn(Worker, 1, "params", "scratch")
    group = Group(engine=engines, trainer=trainer, phases=PHASES)
    ray.get(trainer.make.remote(1))
    with group.enter("train"):  # the engine has no regions yet
        pass
    with pytest.raises(memsaver.Error, match="engine 0.*no region 'weights'") as raised, group.enter("rollout"):
        pytest.fail("entered")
    assert isinstance(raised.value.__cause__, ValueError)
    assert ray.get(trainer.states.remote()) == {"params": "active", "scratch": "active"}  # no pause for it


def test_members_need_only_pause_and_resume(spawn: Spawn) -> None:
    (bystander,) = spawn(Bystander, 1)
    group = Group(engine=bystander, phases={"on": {"engine": ["a"]}, "off": {}})
    with group.enter("on"), group.enter("off"):
        pass
    assert ray.get(bystander.seen.remote()) == [("resume", ["a"]), ("pause", ["a"])]


def test_wrong_arguments_raise_and_name_the_expectation(spawn: Spawn) -> None:
    (actor,) = spawn(Bystander, 1)
    phases: Any
    roles: Any
    for error, text, phases, roles in [
        (ValueError, "no roles", PHASES, {}),
        (ValueError, "'engine' has no members", PHASES, {"engine": []}),
        (TypeError, "no pause\\(\\)", PHASES, {"engine": [object()]}),
        (TypeError, "is a class", PHASES, {"engine": [Bystander]}),
        (TypeError, "is a class", PHASES, {"engine": ray.remote(Bystander)}),
        (ValueError, "phases is empty", {}, {"engine": actor}),
        (ValueError, "no phase names a tag", {"on": {}}, {"engine": actor}),
        (ValueError, "names the role 'trainer', expected one of 'engine'", PHASES, {"engine": actor}),
        (TypeError, "expected a list of tags", {"on": {"engine": "weights"}}, {"engine": actor}),
        (TypeError, "expected a string", {"on": {"engine": [1]}}, {"engine": actor}),
        (
            TypeError,
            "phase 'on' for 'engine' has \\['a'\\], expected a string",
            {"on": {"engine": [["a"]]}},
            {"engine": actor},
        ),
        (TypeError, "expected a dict", {"on": ["weights"]}, {"engine": actor}),
        (TypeError, "expected a dict", ["on"], {"engine": actor}),
    ]:
        with pytest.raises(error, match=text):
            Group(phases=phases, **roles)

    group = Group(engine=actor, phases={"on": {"engine": ["a"]}})
    options: Any
    for error, text, name, options in [
        (ValueError, "no phase 'off'; there are 'on'", "off", {}),
        (ValueError, "^timeout is -1, expected seconds of 0 or more", "on", {"timeout": -1}),
        (ValueError, "^memory_timeout is nan, expected seconds of 0 or more", "on", {"memory_timeout": float("nan")}),
        (TypeError, "^reader_timeout is '1', expected seconds", "on", {"reader_timeout": "1"}),
        (TypeError, "^reader_timeout is None, expected seconds", "on", {"reader_timeout": None}),
        (ValueError, "role 'x', expected one of 'engine'", "on", {"restore": {"x": True}}),
        (TypeError, "expected True or False", "on", {"restore": "engine"}),
    ]:
        with pytest.raises(error, match=text), group.enter(name, **options):
            pytest.fail("entered")
    assert ray.get(actor.seen.remote()) == []
