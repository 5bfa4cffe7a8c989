"""Regions by the tags of another library, on the host driver."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

import memsaver
from memsaver.drop_in.tagged import TaggedRegions
from tests.support import MIB

numbers = itertools.count()


@pytest.fixture
def tagged() -> Iterator[TaggedRegions]:
    found = TaggedRegions(f"library{next(numbers)}")
    yield found
    for _, region in found.all():
        region.resume()
        region.close()


def test_region_that_is_set_aside_is_passed_over(tagged: TaggedRegions) -> None:
    first = tagged.active("weights")
    tagged.set_aside([first], True)
    assert tagged.active("weights").tag == f"{first.tag}.2"
    tagged.set_aside([first], False)
    assert tagged.active("weights") is first


def test_closed_region_is_not_listed_and_is_made_again(tagged: TaggedRegions) -> None:
    first = tagged.active("weights")
    first.close()
    assert tagged.of("weights") == [] and tagged.all() == []
    again = tagged.active("weights")
    assert again is not first and again.tag == first.tag


def test_tag_that_is_too_long_is_named(tagged: TaggedRegions) -> None:
    with pytest.raises(ValueError, match="expected at most 200 printable characters"):
        tagged.active("x" * 200)


def test_regions_have_little_slack(tagged: TaggedRegions) -> None:
    def slack(region: memsaver.Region) -> int:
        kept = region.empty(200 * MIB, torch.uint8)
        region.pause()
        region.resume()
        found = region.mapped_bytes - region.allocated_bytes
        del kept
        return found

    others = memsaver.region("tagged slack", device="cpu")
    assert slack(tagged.active("kv_cache")) <= 32 * MIB < slack(others)  # the bound matters for this size
    others.close()
