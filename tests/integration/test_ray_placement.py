"""Roles on shares of GPUs that Ray is configured with, though there are none: the assigned device in each setting."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="needs ray")

import memsaver  # noqa: E402
from memsaver.ray import device, placement, start_brokers  # noqa: E402
from tests.ray_support import cluster_of_one_machine  # noqa: E402

NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


class Actor:
    def device(self) -> tuple[str, str | None]:
        return device(), os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture(scope="module")
def room() -> Iterator[tuple[Any, list[Any]]]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import this file
    with cluster_of_one_machine(num_gpus=2):
        group, options = placement(ranks=2, roles=2, num_cpus=1)
        yield group, options
        ray.util.remove_placement_group(group)


@pytest.mark.parametrize("noset", ["0", "1"])
def test_the_roles_of_a_rank_have_one_gpu(room: tuple[Any, list[Any]], noset: str) -> None:
    group, options = room
    variables = {"env_vars": {NOSET: noset}} if noset == "1" else {}  # for older versions of Ray "0" is set, too
    actors = [ray.remote(Actor).options(**each, runtime_env=variables).remote() for each in options for _ in range(2)]
    found = ray.get([each.device.remote() for each in actors])
    assert found[0] == found[1]
    assert found[2] == found[3]
    if noset == "1":
        assert {name for name, _ in found} == {"cuda:0", "cuda:1"}
        assert {visible for _, visible in found} == {os.environ.get("CUDA_VISIBLE_DEVICES")}
    else:
        assert {name for name, _ in found} == {"cuda:0"}
        assert {visible for _, visible in found} == {"0", "1"}
    if memsaver._core.cuda_device_count() == 0:
        # The actors have taken their shares, and the starting tasks still find room; but no GPU.
        with pytest.raises(memsaver.DriverError, match="libcuda"):
            start_brokers(group)
    for actor in actors:
        ray.kill(actor)
