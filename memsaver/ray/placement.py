"""Placement of the roles of a group: shares of GPUs, the device of each actor, and the brokers of shared pools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from memsaver import _core
from memsaver.broker import daemon
from memsaver.config import parse_size
from memsaver.errors import Error

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_STEPS = 10_000  # the resolution of Ray's shares of a GPU
_SPARE_STEPS = 10  # of each GPU, left for the tasks of start_brokers()
_STARTING_S = 30.0  # bound of the start of a broker
_NOSET = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"


def placement(
    ranks: int = 1, roles: int = 2, *, num_cpus: float = 1.0, timeout: float = 60.0
) -> tuple[PlacementGroup, list[dict[str, Any]]]:
    """Reserves room for actors of several roles: one actor of each role on every GPU.

    In an actor, ``device()`` returns its GPU. On a cluster without GPUs only CPUs are reserved.

    Args:
        ranks: The number of GPUs, and of actors of each role.
        roles: The number of roles that share a GPU.
        num_cpus: CPUs of each actor.
        timeout: Seconds to wait for room.

    Returns:
        Ray's placement group, and by rank the options of its actors: ``Engine.options(**options[rank]).remote()``. The
            placement group lasts until ``ray.util.remove_placement_group()`` or the end of the driver.

    Raises:
        ValueError: ``ranks`` or ``roles`` is not a number of 1 or more.
        memsaver.Error: There is no room within ``timeout``.

    Examples:
        >>> room, options = memsaver.ray.placement(ranks=1, roles=2)
        >>> sorted(options[0])
        ['num_cpus', 'num_gpus', 'scheduling_strategy']
    """
    for name, count in (("ranks", ranks), ("roles", roles)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} is {count!r}, expected a number of 1 or more")
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
class BrokerAddress:
    """The address of the broker of a device.

    Attributes:
        node: Ray's id of the node.
        device: ``"cuda:N"`` in the task that started the broker, or ``"cpu"``.
        uuid: The driver's name of the device.
        path: The path of the broker's socket on the node.

    Examples:
        >>> (address,) = memsaver.ray.start_brokers(capacity="64MiB")
        >>> address.path.endswith(address.uuid + ".sock")
        True
    """

    node: str
    device: str
    uuid: str
    path: str


def start_brokers(
    group: PlacementGroup | None = None, *, capacity: int | str | None = None, timeout: float = 60.0
) -> list[BrokerAddress]:
    """Starts the brokers of shared pools that do not run yet: one for each GPU, on every node.

    Call it right before the actors start. A broker that an actor started keeps its capacity, and a broker without
    clients ends after 30 seconds.

    Args:
        group: A placement group: brokers start for the GPUs of its bundles. None: for all GPUs of all nodes. A node
            without GPUs has one broker, for the host driver's device.
        capacity: Capacity of each broker that is started, in bytes or as ``"110GiB"``. None: all of the device.
        timeout: Seconds to wait for the tasks that start the brokers.

    Returns:
        The addresses of the brokers, in the order of the bundles. Each device is listed once.

    Raises:
        ConfigError: The capacity is wrong.
        BrokerError: A broker cannot be started.
        memsaver.Error: Ray has no room for the tasks within ``timeout``, or a node dies.

    Examples:
        >>> brokers = memsaver.ray.start_brokers(capacity="64MiB")
        >>> [each.device for each in brokers]
        ['cpu']
    """
    nbytes = None if capacity is None else parse_size(capacity, "capacity")
    starter = ray.remote(max_calls=1)(_start)  # a process of its own: its exit releases the memory of the driver
    if group is None:
        tasks = [
            starter.options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                # Ray assigns no GPU to the task, and leaves all of them visible.
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
    found: list[BrokerAddress] = []
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
    """Returns the torch device of the GPU that Ray assigned to this actor or task.

    The result is also right if Ray does not set CUDA_VISIBLE_DEVICES (RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1).

    Returns:
        ``"cuda:N"``, or ``"cpu"`` if Ray assigned no GPU.

    Raises:
        memsaver.Error: This process is not part of a Ray cluster, Ray assigned several GPUs, or CUDA_VISIBLE_DEVICES
            does not list the GPU.

    Examples:
        >>> memsaver.ray.device()
        'cpu'
    """
    found = _devices()
    if len(found) > 1:
        raise Error(f"Ray assigned {len(found)} GPUs to this process ({', '.join(found)}), expected one")
    return found[0] if found else "cpu"


def _devices() -> list[str]:
    """The devices of all GPUs that Ray assigned."""
    if not ray.is_initialized():
        raise Error("this process is not part of a Ray cluster, so no GPU is assigned to it")
    assigned = sorted(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = None if visible is None else [each.strip() for each in visible.split(",")]
    return [f"cuda:{_index(each, shown)}" for each in assigned]


def _index(assigned: str, shown: Sequence[str] | None) -> int:
    """CUDA's number of a GPU. Ray's name is its number on the node, or its entry in CUDA_VISIBLE_DEVICES."""
    if shown is not None and shown.count(assigned) == 1:
        return shown.index(assigned)
    if shown is None and assigned.isdecimal():
        return int(assigned)
    shows = "is not set" if shown is None else f"is {','.join(shown)!r}"
    raise Error(f"Ray assigned the GPU {assigned!r}, and CUDA_VISIBLE_DEVICES {shows}: which one is it?")


def _start(everywhere: bool, capacity: int | None) -> list[BrokerAddress]:
    """A task. ``everywhere``: for all GPUs of the node; otherwise for the assigned GPUs, else for the host's device."""
    count = _core.cuda_device_count() if everywhere else 0
    devices = [f"cuda:{index}" for index in range(count)] or _devices() or ["cpu"]
    node = ray.get_runtime_context().get_node_id()
    return [BrokerAddress(node, name, *_ensured(name, capacity)) for name in devices]


def _ensured(name: str, capacity: int | None) -> tuple[str, str]:
    # Neither call makes a CUDA context.
    uuid = _core.open_host_memory().uuid() if name == "cpu" else _core.cuda_uuid(int(name.removeprefix("cuda:")))
    return str(uuid), str(daemon.ensure(uuid, name, capacity, _STARTING_S))
