"""Derived regions: a pause copies nothing, a resume computes the contents again from other regions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

import memsaver
from memsaver import Derived
from memsaver.regions import all_regions

SIZE = 3 << 17  # elements of each parameter


class Trainer:
    """bf16 parameters, fp32 masters and AdamW, in three regions."""

    def __init__(self, tag: str) -> None:
        self.tags = [f"{tag} {name}" for name in ("master", "optimizer", "weights")]
        cast = Derived(self.cast, after=self.tags[:1])
        policies: list[str | Derived] = ["host", "host", cast]
        masters, states, weights = (memsaver.region(tag, "cpu", policy) for tag, policy in zip(self.tags, policies))
        generator = torch.Generator().manual_seed(0)
        first = [torch.randn(SIZE, generator=generator) for _ in range(2)]
        self.masters = [torch.nn.Parameter(masters.empty(SIZE).copy_(each)) for each in first]
        self.weights = [weights.empty(SIZE, torch.bfloat16).copy_(each) for each in first]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.1, foreach=False)
        self.step(0)
        for state in self.optimizer.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = states.empty(SIZE).copy_(state[name])

    def cast(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters):
                weight.copy_(master)

    def step(self, number: int) -> None:
        for weight, master in zip(self.weights, self.masters):
            master.grad = (weight.float() * 0.5 + number).cos()
        self.optimizer.step()
        self.cast()


def test_no_byte_of_cast_parameters_is_saved_and_training_is_bit_identical(tag: str) -> None:
    resident, managed = Trainer(f"{tag} resident"), Trainer(tag)
    kept = 2 * 3 * 4 * SIZE  # two masters with two moments each, in fp32
    for turn in range(4):
        for trainer in (resident, managed):
            trainer.step(turn)
        done = memsaver.pause(managed.tags)
        assert done.copied_bytes == kept
        assert memsaver.region(managed.tags[2], "cpu").backup_bytes == 0
        assert memsaver.resume(managed.tags).copied_bytes == kept
        for one, other in zip([*resident.weights, *resident.masters], [*managed.weights, *managed.masters]):
            assert torch.equal(one, other)


@pytest.fixture(autouse=True)
def ended(tag: str) -> Iterator[None]:
    """Other tests resume all regions, and close those without tensors."""
    yield
    for each in all_regions():
        if each.tag.startswith(tag):
            each.backup = "none"
            each.resume()


@pytest.fixture
def pair(tag: str) -> Callable[..., tuple[memsaver.Region, memsaver.Region]]:
    def make(rebuild: Callable[[], object]) -> tuple[memsaver.Region, memsaver.Region]:
        source = memsaver.region(f"{tag} source", "cpu", "host")
        return source, memsaver.region(f"{tag} copy", "cpu", Derived(rebuild, after=[source.tag]))

    return make


Pair = Callable[..., tuple[memsaver.Region, memsaver.Region]]


def test_verify_names_the_tensors_that_a_wrong_rebuild_wrote(pair: Pair) -> None:
    def rebuild() -> None:
        for tensor in tensors:
            tensor.fill_(1)
        tensors[1][5] = 2
        tensors[2].fill_(0)

    _, copy = pair(rebuild)
    tensors = [copy.empty(SIZE).fill_(1) for _ in range(3)]
    memsaver.configure(verify=True)
    copy.pause()
    with pytest.raises(memsaver.VerifyError) as raised:
        copy.resume()
    wrong = [(each.data_ptr(), each.nbytes) for each in tensors[1:]]
    assert raised.value.parts == wrong
    assert all(f"{address:#x} of {nbytes} bytes" in str(raised.value) for address, nbytes in wrong)


def test_a_source_that_stays_away_is_refused_before_anything_moves(pair: Pair) -> None:
    def rebuild() -> None:
        made.copy_(first)

    source, copy = pair(rebuild)
    first, made = source.empty(SIZE).fill_(3), copy.empty(SIZE)
    other = memsaver.region(f"{source.tag} other", "cpu", "host")
    memsaver.pause([source, copy])
    with pytest.raises(memsaver.RegionPausedError, match=f"derived from {source.tag!r}, which is paused") as raised:
        memsaver.switch(pause=other, resume=copy)
    assert raised.value.tag == source.tag
    with pytest.raises(memsaver.RegionPausedError, match=f"derived from {source.tag!r}, which comes without contents"):
        memsaver.resume([source, copy], restore={source.tag: False})
    assert [each.state for each in (source, copy, other)] == ["paused", "paused", "active"]
    source.resume()
    with pytest.raises(memsaver.RegionPausedError):
        memsaver.switch(pause=source, resume=copy)
    assert [each.state for each in (source, copy)] == ["active", "paused"]
    copy.resume()
    assert torch.equal(made, first)
    copy.pause()
    source.pause(backup="none")
    with pytest.raises(memsaver.RegionPausedError):  # its contents are lost
        memsaver.resume([source, copy])
    copy.resume(restore=False)  # needs no source


@pytest.mark.parametrize("lazy", [False, True])
def test_a_rebuild_that_fails_leaves_all_regions_of_the_resume_paused_with_their_contents(
    pair: Pair, lazy: bool
) -> None:
    fails = True

    def rebuild() -> None:
        rebuilt.append([source.state, copy.state])
        made.copy_(first)
        if fails:
            raise LookupError("no scales")

    rebuilt: list[list[str]] = []
    source, copy = pair(rebuild)
    first, made = source.empty(SIZE).fill_(3), copy.empty(SIZE)
    memsaver.pause([source, copy], lazy=lazy)
    with pytest.raises(memsaver.RebuildError, match="could not be rebuilt: LookupError") as raised:
        memsaver.resume([source, copy])
    assert rebuilt == [["resuming", "resuming"]]  # nothing else uses them yet
    assert raised.value.tag == copy.tag and isinstance(raised.value.__cause__, LookupError)
    assert [source.state, copy.state, source.mapped_bytes, copy.mapped_bytes] == ["paused", "paused", 0, 0]
    assert lazy or source.backup_bytes == first.nbytes
    fails = False
    memsaver.resume([source, copy])
    assert bool((first == 3).all()) and torch.equal(made, first) and len(rebuilt) == 2
    copy.pause(backup="host", lazy=lazy)
    copy.resume()  # its contents were kept
    assert torch.equal(made, first) and len(rebuilt) == 2


def test_no_pause_takes_a_source_during_a_rebuild(pair: Pair) -> None:
    def rebuild() -> None:
        with pytest.raises(memsaver.WaitTimeoutError):
            memsaver.pause(source, timeout=0.01)
        made.copy_(first)

    source, copy = pair(rebuild)
    first, made = source.empty(SIZE).fill_(3), copy.empty(SIZE)
    copy.pause()
    copy.resume()
    assert torch.equal(made, first)
    source.pause(timeout=5)


def test_regions_derived_from_derived_regions_are_rebuilt_in_order(tag: str) -> None:
    regions, calls = {}, list[str]()
    for name, after in (("c", ["b"]), ("b", ["a"]), ("a", [])):  # the first is made first, and depends on the others
        policy = Derived(partial(calls.append, name), after=[f"{tag} {each}" for each in after])
        regions[name] = memsaver.region(f"{tag} {name}", "cpu", policy)
    for _ in range(2):
        memsaver.pause(list(regions.values()))
        memsaver.resume(list(regions.values()))
    assert calls == ["a", "b", "c"] * 2
    around = memsaver.region(f"{tag} d", "cpu", Derived(lambda: None, after=[f"{tag} d"]))
    around.pause()
    with pytest.raises(ValueError, match="derived from each other"):
        around.resume()


def test_wrong_policies_are_refused(tag: str) -> None:
    with pytest.raises(TypeError, match="rebuild is 3, expected a function"):
        Derived(3, after=[])  # type: ignore[arg-type]

    async def rebuild() -> None:
        pass

    with pytest.raises(TypeError, match="a coroutine function, expected one that does not await"):
        Derived(rebuild, after=[])
    with pytest.raises(TypeError, match="after is 'master', expected a list"):
        Derived(print, after="master")
    policy = Derived(print, after=["nothing"])
    region = memsaver.region(tag, "cpu", policy)
    assert region is memsaver.region(tag, "cpu") and region is memsaver.region(tag, "cpu", Derived(print, ["nothing"]))
    with pytest.raises(ValueError, match="was made with Derived"):
        memsaver.region(tag, "cpu", "none")
    with pytest.raises(ValueError, match="frozen is True and backup is Derived"):
        memsaver.region(f"{tag} 2", "cpu", policy, frozen=True)
    region.pause()
    with pytest.raises(ValueError, match="derived from 'nothing', and there is no region"):
        region.resume()
    assert region.state == "paused"


def test_a_turn_in_which_a_source_has_no_contents_is_refused_before_anything_moves(tag: str) -> None:
    ray = pytest.importorskip("memsaver.ray", reason="needs ray")
    master, weights, other = (f"{tag} {name}" for name in ("master", "weights", "other"))
    regions = [memsaver.region(tag, "cpu", "host") for tag in (master, other)]
    regions.append(memsaver.region(weights, "cpu", Derived(lambda: calls.append(1), after=[master])))
    calls: list[int] = []
    phases = {
        "train": {"trainer": [master, weights]},
        "sync": {"trainer": [weights], "engine": [other]},
        "rollout": {"engine": [other]},
    }
    group = ray.Group(trainer=ray.Colocated(), engine=ray.Colocated(), phases=phases)
    with group.enter("train"):
        states = [each.state for each in regions]
    for phase, options in (("rollout", {}), ("sync", {}), ("train", {"restore": {"trainer": {master: False}}})):
        if phase == "rollout":
            group.enter("rollout")
            states = [each.state for each in regions]
            continue
        with pytest.raises(memsaver.Error, match="trainer 0 could not prepare to resume .* is derived from") as raised:
            group.enter(phase, **options)
        assert isinstance(raised.value.__cause__, memsaver.RegionPausedError)
        assert [each.state for each in regions] == states
    group.enter("train")
    assert [each.state for each in regions] == ["active", "paused", "active"] and calls == [1]
    group.enter("sync", restore={"trainer": {weights: False}})
    assert [each.state for each in regions] == ["paused", "active", "active"]
    group.enter("train")
