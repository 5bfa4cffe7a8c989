"""Agreement of vLLM's ranks on the drop-in: two threads stand for two ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from memsaver import drop_in
from memsaver.drop_in.errors import DropInError
from memsaver.drop_in.vllm import ranks
from memsaver.errors import OutOfMemoryError


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A world group of ranks 4 and 5 with a store; `rank` is this one's."""
    group = SimpleNamespace(rank=4, ranks=[4, 5])
    parallel_state = ModuleType("vllm.distributed.parallel_state")
    parallel_state._WORLD = group  # type: ignore[attr-defined]
    package, distributed = ModuleType("vllm"), ModuleType("vllm.distributed")
    distributed.parallel_state = parallel_state  # type: ignore[attr-defined]
    for module in (package, distributed, parallel_state):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    store = dist.HashStore()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    be(4, group, monkeypatch)
    yield group


def be(rank: int, group: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Go on as the process of this rank."""
    group.rank = rank
    own = drop_in.DropIn("vllm", "0.25.0", "active", ("a", "b"))
    monkeypatch.setitem(drop_in._states, "vllm", drop_in.DropIn(**{**vars(own), **changes}))
    monkeypatch.setattr(ranks, "_published_in", None)
    monkeypatch.setattr(ranks, "_checked_in", None)


def test_equal_ranks_agree(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.publish()
    be(5, world, monkeypatch)
    ranks.check()


def test_rank_without_drop_in_is_named(world: SimpleNamespace) -> None:
    with pytest.raises(DropInError, match="rank 5 has no drop-in: set MEMSAVER_DROP_IN") as raised:
        ranks.check()
    assert raised.value.rank == 5


def test_rank_with_another_version_is_named(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks.publish()
    be(5, world, monkeypatch, version="0.26.0")
    with pytest.raises(DropInError, match=r"rank 4 has the drop-in .*0.25.0.*, and rank 5 has .*0.26.0") as raised:
        ranks.check()
    assert raised.value.rank == 4


def test_failed_check_is_repeated(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        with pytest.raises(DropInError):
            ranks.check()
    be(5, world, monkeypatch)
    ranks.publish()
    be(4, world, monkeypatch)
    ranks.check()


def test_ranks_of_a_second_process_group_are_compared_again(
    world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks.publish()
    be(5, world, monkeypatch)
    ranks.check()
    second = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: second)
    with pytest.raises(DropInError, match="rank 4 has no drop-in"):
        ranks.check()


def test_one_rank_compares_nothing(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ranks = [4]
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", pytest.fail)
    ranks.check()


def test_errors_name_the_rank_and_the_call(world: SimpleNamespace) -> None:
    with pytest.raises(OutOfMemoryError, match="^rank 4, wake-up of weights: 3 GiB are missing$"):
        with ranks.naming("wake-up of weights"):
            raise OutOfMemoryError("3 GiB are missing")


def test_errors_of_one_rank_alone_stay_as_they_are(world: SimpleNamespace) -> None:
    world.ranks = [4]
    with pytest.raises(OutOfMemoryError, match="^3 GiB are missing$"), ranks.naming("wake-up of weights"):
        raise OutOfMemoryError("3 GiB are missing")
