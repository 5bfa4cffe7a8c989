"""The allocator of vLLM's sleep mode over regions, on the host driver."""

from __future__ import annotations

import importlib
import logging
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memsaver
from memsaver import drop_in
from memsaver.drop_in import DropInError
from memsaver.drop_in.vllm import sources
from tests.drop_in.fake_vllm import CUMEM, Load, load
from tests.support import MIB, Fill

__all__ = ["load"]  # a fixture

DEFERRABLE = 'DEFERRABLE_TAGS = ("weights", "kv_cache")\n'
COUNT = 3 * MIB // 4  # floats in 3 MiB


@pytest.fixture
def allocator(load: Load) -> Any:
    return load().CuMemAllocator.get_instance()


def full(allocator: Any, tag: str | None, value: float = 1.0) -> torch.Tensor:
    with allocator.use_memory_pool(tag):
        return torch.full((COUNT,), value)


def awake(allocator: Any) -> set[str]:
    """The tags with mapped memory, as vLLM's tests count it."""
    return {data.tag for data in allocator.pointer_to_data.values() if not data.is_asleep}


class TestInstallation:
    def test_importing_the_module_activates_the_drop_in(self, load: Load, caplog: pytest.LogCaptureFixture) -> None:
        assert drop_in.status() == {}
        with caplog.at_level(logging.INFO, "vllm"):
            module = load()
        status = drop_in.status()["vllm"]
        assert (status.state, status.version) == ("active", "9.9.9")
        assert status.replaced == tuple(f"{sources.MODULE}.{name}" for name in sources.REPLACED)
        assert [each.name for each in caplog.records if "replaces" in each.getMessage()] == ["vllm"]
        replaced = module.CuMemAllocator
        assert replaced.get_instance() is replaced.instance
        assert (replaced.__name__, replaced.__module__) == ("CuMemAllocator", sources.MODULE)

    def test_unset_variable_changes_nothing(self, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("MEMSAVER_DROP_IN")
        module = load()
        assert drop_in.status() == {}
        with pytest.raises(NotImplementedError):
            module.create_and_map((0, 0, 0, 0))

    def test_source_that_differs_is_refused(self, load: Load, tmp_path: Path) -> None:
        path = tmp_path / CUMEM
        path.write_text(path.read_text().replace("def wake_up(self, tags=None)", "def wake_up(self, tags, level)"))
        text = r"vLLM 9.9.9 differs .*cumem.py: CuMemAllocator has no line 'def wake_up.*or unset MEMSAVER_DROP_IN"
        with pytest.raises(DropInError, match=text):
            load()
        assert drop_in.status() == {}

    def test_allocator_in_use_is_refused(self, load: Load) -> None:
        original = importlib.import_module(sources.MODULE)
        original.CuMemAllocator.instance = original.CuMemAllocator()
        for _ in range(2):
            with pytest.raises(DropInError, match="is in use already"):
                load()
        assert drop_in.status() == {}

    @pytest.mark.parametrize("moment", ["installation", "sleep"])
    def test_other_patch_of_the_allocator_is_refused(
        self, load: Load, moment: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        other = "unsloth_zoo", ModuleType("unsloth_zoo")
        if moment == "installation":
            monkeypatch.setitem(sys.modules, *other)
        with pytest.raises(DropInError, match="unsloth_zoo patches"):
            allocator = load().CuMemAllocator.get_instance()
            weights = full(allocator, "weights")
            monkeypatch.setitem(sys.modules, *other)
            try:
                allocator.sleep()
            finally:
                assert bool((weights == 1).all())


TAGS = (None, "weights", "weights.2")  # None: the default tag. The last one looks like a second region of "weights"


class Tensor:
    """A tensor of the allocator, and the contents that it has by the calls so far."""

    def __init__(self, allocator: Any, tag: str | None, value: int) -> None:
        self.tag, self.value = tag or "default", value
        self.is_asleep = self.is_kept = False
        with allocator.use_memory_pool(tag):
            self.tensor = torch.full((MIB,), value, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()

    def sleep(self, is_kept: bool) -> None:
        if not self.is_asleep:
            self.is_asleep, self.is_kept = True, is_kept

    def wake(self) -> None:
        if self.is_asleep and not self.is_kept:
            self.value = 0
        self.is_asleep = False

    def check(self) -> None:
        assert self.is_asleep or bool((self.tensor == self.value).all())


@pytest.mark.parametrize("seed", range(4))
def test_tags_sleep_and_wake_in_any_order(allocator: Any, seed: int) -> None:
    """A tag that sleeps can be allocated in, and keeps its policy when it is put to sleep again."""
    choose = random.Random(seed)
    held: list[Tensor] = []
    for turn in range(60):
        some = tuple(tag for tag in ("default", *TAGS[1:]) if choose.random() < 0.5)
        act = choose.choice(["allocate", "allocate", "free", "sleep", "sleep by default", "discard", "wake"])
        if act == "allocate":
            held.append(Tensor(allocator, choose.choice(TAGS), turn + 1))
        elif act == "free" and held:
            held.pop(choose.randrange(len(held)))
        elif act == "sleep":
            allocator.sleep(some)
        elif act == "sleep by default":
            allocator.sleep()
            some = ("default",)
        elif act == "discard":
            allocator.discard(some)
        elif act == "wake":
            allocator.wake_up(list(some) if some else None)
        for number in range(len(held)):  # a name for an element would keep it
            if act.startswith("sleep") or (act == "discard" and held[number].tag in some):
                held[number].sleep(act != "discard" and held[number].tag in some)
            elif act == "wake" and (held[number].tag in some or not some):
                held[number].wake()
            held[number].check()
        datas = allocator.pointer_to_data
        assert {address: (data.tag, data.is_asleep, data.handle[:3]) for address, data in datas.items()} == {
            each.address: (each.tag, each.is_asleep, (0, MIB, each.address)) for each in held
        }
        assert allocator.get_current_usage() == MIB * len(held)
        # A region with tensors asleep alone is unmapped.
        assert all(each.mapped_bytes == 0 for each in memsaver.regions.all_regions() if each.state != "active")


@pytest.mark.parametrize("more", ["", DEFERRABLE], ids=["older", "newer"])
def test_wake_up_by_tag(load: Load, more: str) -> None:
    """Newer versions wake the tags that cannot be deferred in any case."""
    allocator = load(more).CuMemAllocator.get_instance()
    weights, _cache, _scratch = (full(allocator, tag, 3.0) for tag in ("weights", "kv_cache", "workspace"))
    allocator.sleep(("weights",))
    for _ in range(2):  # again: no-op
        allocator.wake_up(["weights"])
        assert awake(allocator) == {"weights", "workspace"} - ({"workspace"} if not more else set())
        assert bool((weights == 3).all())
    allocator.wake_up(["kv_cache"])
    assert "kv_cache" in awake(allocator)
    allocator.wake_up()


def test_with_the_option_lazy_a_sleep_copies_nothing(allocator: Any, caplog: pytest.LogCaptureFixture) -> None:
    weights, cache = full(allocator, "weights", 3.0), full(allocator, "kv_cache")
    regions = [each for each in memsaver.regions.all_regions() if each.owns(weights.data_ptr())]
    memsaver.configure(lazy=True)
    allocator.sleep(("weights",))
    assert [(each.state, each.offered_bytes > 0, each.backup_bytes) for each in regions] == [("paused", True, 0)]
    with caplog.at_level(logging.WARNING, "vllm"):
        allocator.sleep(("weights",))
        assert not caplog.records
        allocator.sleep(())  # which would discard the contents
    assert "cannot change the policy" in caplog.text
    allocator.wake_up()
    assert memsaver.history()[-1].copied_bytes == 0
    assert bool((weights == 3).all())
    del cache


def test_nested_context_has_its_own_tag(allocator: Any) -> None:
    with allocator.use_memory_pool("runtime"):
        first, inner = torch.ones(COUNT), full(allocator, "kv_cache")
        second = torch.ones(COUNT)
        assert allocator.current_tag == "runtime"
    with pytest.raises(KeyError), allocator.use_memory_pool("weights"):
        raise KeyError
    assert allocator.current_tag == "default"
    tags = {address: data.tag for address, data in allocator.pointer_to_data.items()}
    assert tags == {first.data_ptr(): "runtime", inner.data_ptr(): "kv_cache", second.data_ptr(): "runtime"}


def test_lack_of_memory_at_wake_up_is_a_runtime_error_and_changes_nothing(allocator: Any) -> None:
    weights = full(allocator, "weights", 3.0)
    allocator.sleep(("weights",))
    with Fill(leave=2 * MIB):
        with pytest.raises(memsaver.OutOfMemoryError, match="out of memory on cpu"):
            allocator.wake_up()
        assert awake(allocator) == set()
    allocator.wake_up()
    assert bool((weights == 3).all())


def test_each_discarded_segment_passes_create_and_map_after_its_mapping(load: Load) -> None:
    module = load()
    allocator = module.CuMemAllocator.get_instance()
    weights, cache = full(allocator, "weights", 3.0), [full(allocator, "kv_cache") for _ in range(2)]
    original, seen = module.create_and_map, []

    def poison(handle: tuple[int, int, int, int]) -> None:
        original(handle)
        seen.append(handle[2])

    module.create_and_map = poison  # type: ignore[attr-defined]
    allocator.sleep(("weights",))
    allocator.wake_up()
    assert sorted(seen) == sorted(each.data_ptr() for each in cache)
    assert bool((weights == 3).all())
    allocator.sleep(("weights",))
    memsaver.resume("vllm.weights")  # not by the allocator
    allocator.sleep(())
    seen.clear()
    allocator.wake_up(["weights"])
    assert seen == [weights.data_ptr()]
    with pytest.raises(DropInError, match="releases whole tags"):
        module.unmap_and_release((0, 2 * MIB, 0x1000, 0))


def test_number_of_pools_by_tag(allocator: Any) -> None:
    tensors = [full(allocator, "workspace") for _ in range(2)]
    assert len(allocator.allocator_and_pools["workspace"]) == 2
    tensors.clear()
    allocator.close()
    assert allocator.allocator_and_pools == {}


@pytest.mark.parametrize("tags", [["weights"], 3])
def test_tags_of_another_type_raise(allocator: Any, tags: object) -> None:
    for act in (allocator.sleep, allocator.discard):
        with pytest.raises(TypeError, match="expected a string or a tuple"):
            act(tags)
    with pytest.raises(TypeError, match="tag is 3"), allocator.use_memory_pool(3):
        pass
