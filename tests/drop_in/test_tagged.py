"""Regions by the tags of another library, on the host driver."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from memsaver.drop_in.tagged import TaggedRegions
from tests.support import MIB, run_clean

numbers = itertools.count()


@pytest.fixture
def tagged() -> Iterator[TaggedRegions]:
    found = TaggedRegions(f"library{next(numbers)}")
    yield found
    for _, region in found.all():
        region.resume()
        region.close()


def test_tag_has_one_active_region_for_each_policy(tagged: TaggedRegions) -> None:
    kept, scratch = tagged.active("weights", "host"), tagged.active("weights")
    assert tagged.active("weights", "host") is kept and tagged.active("weights") is scratch
    assert {kept.backup, scratch.backup} == {"host", "none"}
    assert tagged.of("weights") == [kept, scratch]


def test_paused_tag_gets_another_region_and_returns_to_the_first(tagged: TaggedRegions) -> None:
    first = tagged.active("weights", "host")
    for _ in range(3):
        first.pause()
        assert tagged.active("weights", "host").tag == f"{first.tag}.2"
        first.resume()
        assert tagged.active("weights", "host") is first
    assert len(tagged.of("weights")) == 2


def test_region_that_is_set_aside_is_passed_over(tagged: TaggedRegions) -> None:
    first = tagged.active("weights")
    tagged.set_aside([first], True)
    second = tagged.active("weights")
    assert second.tag == f"{first.tag}.2"
    tagged.set_aside([first], False)
    assert tagged.active("weights") is first


def test_closed_region_is_not_listed_and_is_made_again(tagged: TaggedRegions) -> None:
    first = tagged.active("weights")
    first.close()
    assert tagged.of("weights") == [] and tagged.all() == []
    again = tagged.active("weights")
    assert again is not first and again.tag == first.tag


def test_tag_that_looks_like_the_name_of_a_second_region_has_its_own(tagged: TaggedRegions) -> None:
    theirs = tagged.active("weights.2")
    first = tagged.active("weights")
    first.pause()
    second = tagged.active("weights")
    assert second is not theirs and second.tag == f"{first.tag}.3"
    assert tagged.of("weights") == [first, second] and tagged.of("weights.2") == [theirs]


def test_tag_that_is_too_long_is_named(tagged: TaggedRegions) -> None:
    with pytest.raises(ValueError, match="expected at most 200 printable characters"):
        tagged.active("x" * 200)


def test_memory_of_torch_memory_saver_has_little_slack() -> None:
    said = run_clean(
        """
        import torch
        import memsaver
        from memsaver.drop_in.tagged import TaggedRegions
        MIB = 1 << 20
        slacks = []
        for region in TaggedRegions("tms").active("kv_cache"), memsaver.region("kv_cache", device="cpu"):
            caches = [region.empty(900 * MIB, torch.uint8) for _ in range(3)]
            region.pause()
            region.resume()
            slacks.append((region.mapped_bytes - region.allocated_bytes) // MIB)
            del caches
            region.pause()
        print(*slacks)
        """,
        MEMSAVER_HOST_DEVICE="4GiB",
    )
    ours, others = map(int, said.split())
    assert ours <= 32 < others, said  # the bound matters for this size


def test_torch_allocates_in_the_active_region(tagged: TaggedRegions) -> None:
    with tagged.active("weights"):
        tensor = torch.ones(MIB)
    assert tagged.active("weights").owns(tensor.data_ptr())
    del tensor
