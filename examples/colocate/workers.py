"""The actors of both roles: their placement, their deaths, and their replacement."""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from .recipes import MIB, Recipe

_runs = itertools.count()
_ANSWER_S = 60.0  # an actor that answers later counts as lost if another has died
_POLL_S = 0.05
_ROOM_S = 60.0  # the wait for free resources
_RETURN_S = 60.0  # the wait for the memory of dead actors


class Workers:
    """An engine and a rank of the trainer for each rank of the run. Built by `build`, role by role."""

    def __init__(self, kinds: Mapping[str, Any], options: argparse.Namespace, recipe: Recipe) -> None:
        """`kinds`: the class of each role's actors."""
        self._kinds, self._options, self._recipe = kinds, options, recipe
        each = options.ranks_per_gpu
        roles, on_gpu = len(kinds) * each, ray.cluster_resources().get("GPU", 0) > 0
        bundle = {"CPU": float(roles), **({"GPU": 1.0} if on_gpu else {})}
        self._placement = ray.util.placement_group([bundle] * (options.ranks // each))
        if not self._placement.wait(_ROOM_S):
            ray.util.remove_placement_group(self._placement)
            raise RuntimeError(
                f"no room for {options.ranks // each} times {bundle}: {ray.available_resources()} are free"
            )
        self._placed = [
            {
                "num_cpus": 1,
                "num_gpus": 10_000 // roles / 10_000 if on_gpu else 0,  # Ray's shares have four digits
                "scheduling_strategy": PlacementGroupSchedulingStrategy(self._placement, rank // each),
            }
            for rank in range(options.ranks)
        ]
        self.sharers = options.ranks if options.device == "cpu" else each
        # The size identifies a device of the host driver: each run gets a device of its own.
        self._host_device = recipe.host_device_bytes + (os.getpid() + next(_runs)) % 32 * 2 * MIB
        self.by_role: dict[str, list[Any]] = {role: self._made(role) for role in kinds}

    def build(self, role: str) -> list[str]:
        """Build the role's actors. Returns the tags of their regions."""
        actors = self.by_role[role]
        arguments: list[Any] = []
        if role == "trainer":
            arguments = [ray.get(actors[0].meeting_point.remote()) if len(actors) > 1 else None]
        tags: list[str] = ray.get([actor.setup.remote(*arguments) for actor in actors])[0]
        return tags

    def pause(self, role: str, backup: dict[str, str] | None = None) -> None:
        """Pause all regions of the role's actors. A pause that a failed turn has left prepared is aborted first."""
        actors = self.by_role[role]
        ray.get([actor.colocated_abort.remote() for actor in actors])
        ray.get([actor.pause.remote(backup=backup) for actor in actors])

    def lost(self) -> dict[str, list[int]]:
        """The ranks that have died, by role, and ranks of the other role that do not answer. Empty without a death."""
        calls = {
            actor.__ray_ready__.remote(): (role, rank)
            for role, actors in self.by_role.items()
            for rank, actor in enumerate(actors)
        }
        dead: list[tuple[str, int]] = []
        waiting, deadline = list(calls), time.monotonic() + _ANSWER_S
        while waiting and time.monotonic() < deadline:
            answered, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=_POLL_S)
            for call in answered:
                try:
                    ray.get(call)
                except RayActorError:
                    dead.append(calls[call])
            # Other ranks of a dead actor's role may wait for it in a collective. They are replaced with it.
            waiting = [call for call in waiting if calls[call][0] not in {role for role, _ in dead}]
        found: dict[str, list[int]] = {}
        for role, rank in sorted([*dead, *(calls[call] for call in waiting if dead)]):
            found.setdefault(role, []).append(rank)
        return found

    def replace(self, role: str) -> None:
        """End all actors of the role and start others, since a collective group cannot replace a single rank.

        Call `await_memory`, then `build`.
        """
        for actor in self.by_role[role]:
            ray.kill(actor)
        self.by_role[role] = self._made(role)

    def await_memory(self, roles: Collection[str]) -> None:
        """Wait, up to a minute, until the memory of the ended actors of these roles is free.

        Their replacements have no memory yet. If the memory does not become free, `build` raises.
        """
        others = [actor for role, actors in self.by_role.items() if role not in roles for actor in actors]
        held = ray.get([actor.mapped_bytes.remote() for actor in others])
        beside = [sum(held[rank :: self._options.ranks]) for rank in range(self._options.ranks)]  # by rank

        def on_device_of(rank: int) -> int:
            first = rank // self.sharers * self.sharers
            return sum(beside[first : first + self.sharers])

        waits = [
            actor.await_memory.remote(on_device_of(rank), _RETURN_S)
            for role in roles
            for rank, actor in enumerate(self.by_role[role])
        ]
        ray.get(waits)

    def kill(self, role: str, rank: int) -> None:
        """Kill an actor as a crash does, without cleaning up."""
        ray.kill(self.by_role[role][rank])

    def close(self) -> None:
        """End all actors."""
        for actors in self.by_role.values():
            for actor in actors:
                ray.kill(actor)
        ray.util.remove_placement_group(self._placement)

    def _made(self, role: str) -> list[Any]:
        remote, options = ray.remote(self._kinds[role]), self._options
        return [
            remote.options(**placed).remote(
                self._recipe,
                options.device,
                rank,
                options.ranks,
                self.sharers,
                options.seed,
                options.pool,
                self._host_device,
            )
            for rank, placed in enumerate(self._placed)
        ]
