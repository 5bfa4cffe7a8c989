"""Where the roles of a group live: shares of GPUs, the device of each actor, and the brokers of shared pools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from memsaver import _core, sockets
from memsaver.config import parse_size
from memsaver.errors import Error

_STEPS = 10_000  # in which Ray counts shares of a GPU
_SPARE_STEPS = 10  # of each GPU that no role gets, so that start_brokers() finds room beside them
_STARTING_S = 30.0  # how long a broker may take
_NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def placement(ranks: int = 1, roles: int = 2, num_cpus: float = 1.0, timeout: float = 60.0) -> tuple[Any, list[Any]]:
    """Room for actors of several roles, one of each on every one of ``ranks`` GPUs.

    Returns Ray's placement group, which lasts until ``ray.util.remove_placement_group`` or the end of the driver, and
    for each rank the options of its actors: ``Engine.options(**options[rank]).remote()``. On a cluster without a GPU
    there are CPUs only, ``num_cpus`` for each actor. Raises memsaver.Error if there is no room within ``timeout``
    seconds.

    The GPU of an actor is :func:`device`.
    """
    for what, count in (("ranks", ranks), ("roles", roles)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{what} is {count!r}, expected a number of 1 or more")
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    bundle = {"CPU": num_cpus * roles, **({"GPU": 1.0} if on_gpu else {})}
    group = ray.util.placement_group([bundle] * ranks)
    if not group.wait(timeout):
        ray.util.remove_placement_group(group)
        raise Error(f"no room for {ranks} times {bundle} within {timeout} s; free are {ray.available_resources()}")
    fraction = (_STEPS - _SPARE_STEPS) // roles / _STEPS if on_gpu else 0.0
    return group, [
        {
            "num_cpus": num_cpus,
            "num_gpus": fraction,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
        }
        for rank in range(ranks)
    ]


@dataclass(frozen=True)
class Broker:
    """The broker of a device, as the processes of its node find it."""

    node: str  # Ray's id
    device: str  # "cuda:N" as the starting task saw it, or "cpu"
    uuid: str  # of the device
    path: str  # of the socket


def start_brokers(group: Any = None, capacity: int | str | None = None, timeout: float = 60.0) -> list[Broker]:
    """Starts the brokers of shared pools, where they do not run yet: one for each GPU, on every node.

    - ``group``: a placement group, for the GPUs of its bundles; without one all GPUs of all nodes. On a node without
      GPUs it is the host driver's device that gets a broker, one for the node.
    - ``capacity``: of each that has to be started, in bytes or as ``"110GiB"``; by default all of the device.

    Returns them in the order of the bundles, each device once. Call it before the actors start: a broker that an actor
    started by itself keeps its capacity. One without clients ends after 30 seconds, so not long before.

    Raises ConfigError for the capacity, BrokerError where one cannot be started, memsaver.Error where Ray finds no room
    for the starting tasks within ``timeout`` seconds or a node dies.
    """
    nbytes = None if capacity is None else parse_size(capacity, "capacity")
    starter = ray.remote(max_calls=1)(_start)  # a process of its own, which gives back what the driver took in it
    if group is None:
        tasks = [
            starter.options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                # Ray assigns none of the GPUs, and leaves all of them to be seen.
                runtime_env={"env_vars": {_NOSET: "1"}} if node["Resources"].get("GPU") else None,
            ).remote(bool(node["Resources"].get("GPU")), nbytes)
            for node in ray.nodes()
            if node["Alive"]
        ]
    else:
        tasks = [
            starter.options(
                num_cpus=0,
                num_gpus=_SPARE_STEPS / _STEPS if bundle.get("GPU") == 1 else bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote(False, nbytes)
            for index, bundle in enumerate(group.bundle_specs)
        ]
    _, late = ray.wait(tasks, num_returns=len(tasks), timeout=timeout)
    if late:
        for task in tasks:
            ray.cancel(task)
        raise Error(f"brokers could not be started within {timeout} s: have actors taken all of the GPUs?")
    found: list[Broker] = []
    errors: list[Error] = []
    for task in tasks:
        try:
            found += ray.get(task)
        except RayTaskError as error:
            cause = error.cause
            errors.append(cause if isinstance(cause, Error) else Error(f"a broker could not be started: {cause}"))
        except RayError as error:
            errors.append(Error(f"a broker could not be started: {error}"))
    if errors:
        raise errors[0]
    return list(dict.fromkeys(found))


def device() -> str:
    """The torch device of the GPU that Ray assigned to this actor or task: ``"cuda:N"``, or ``"cpu"`` without one.

    Right also where Ray leaves CUDA_VISIBLE_DEVICES alone (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1). Raises
    memsaver.Error outside of Ray, where Ray assigned several, and where CUDA_VISIBLE_DEVICES does not show the one.
    """
    found = _devices()
    if len(found) > 1:
        raise Error(f"Ray assigned {len(found)} GPUs to this process ({', '.join(found)}), expected one")
    return found[0] if found else "cpu"


def _devices() -> list[str]:
    """Those of all GPUs that Ray assigned."""
    if not ray.is_initialized():
        raise Error("this process is not part of a Ray cluster, so no GPU is assigned to it")
    assigned = sorted(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = None if visible is None else [each.strip() for each in visible.split(",")]
    return [f"cuda:{_index(each, shown)}" for each in assigned]


def _index(assigned: str, shown: Sequence[str] | None) -> int:
    """CUDA's number of a GPU. Ray names it by its number on the node, or by its entry in CUDA_VISIBLE_DEVICES."""
    if shown is not None and shown.count(assigned) == 1:
        return shown.index(assigned)
    if shown is None and assigned.isdecimal():
        return int(assigned)
    shows = "is not set" if shown is None else f"is {','.join(shown)!r}"
    raise Error(f"Ray assigned the GPU {assigned!r}, and CUDA_VISIBLE_DEVICES {shows}: which one is it?")


def _start(everywhere: bool, capacity: int | None) -> list[Broker]:
    """Runs as a task. ``everywhere``: on all GPUs of the node; otherwise on those that are assigned, or the host's."""
    count = _core.cuda_device_count() if everywhere else 0
    devices = [f"cuda:{index}" for index in range(count)] or _devices() or ["cpu"]
    node = ray.get_runtime_context().get_node_id()
    return [Broker(node, name, *_ensured(name, capacity)) for name in devices]


def _ensured(name: str, capacity: int | None) -> tuple[str, str]:
    # Neither makes a CUDA context.
    uuid = _core.open_host_memory().uuid() if name == "cpu" else _core.cuda_uuid(int(name.removeprefix("cuda:")))
    return str(uuid), str(sockets.ensure(uuid, name, capacity, _STARTING_S))
