"""Checkpoints of a run, and the replacement of actors that have died."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import ray
from ray.exceptions import RayActorError

from ..options import Options
from ..recipes import Recipe
from ..task import Task
from .checked_loop import CheckedLoop
from .checkpoints import Checkpoints

_MOST_LOSSES = 3  # deaths since the last checkpoint; more have a cause that a restart does not remove
_ANSWER_S = 60.0  # an actor that answers later counts as lost if another has died
_RETURN_S = 60.0  # the wait for the memory of dead actors
_WORK = {("engine", "generate"), ("trainer", "train")}  # in which the drill kills


class RecoverableLoop(CheckedLoop):
    """Continues from the newest checkpoint, at its start with `--resume`, and when actors have died."""

    def __init__(self, options: Options, recipe: Recipe, task: Task) -> None:
        """Raises CheckpointError, before any actor is made, if the run cannot continue from the checkpoints."""
        self.checkpoints = Checkpoints(options.checkpoint_dir) if options.checkpoint_dir else None
        # What the curve depends on. Steps and their number do not matter to those that are done, but for the rates.
        names = ("device", "ranks", "engines", "engine_ranks", "seed", "zero_advantages", "model", "task", "reward")
        self._settings = {"format": "2"} | {name: str(getattr(options, name)) for name in names}
        self._settings |= {f"recipe.{name}": repr(value) for name, value in vars(recipe).items()}
        if self.checkpoints is not None:
            self.checkpoints.check_start(self._settings, options.resume)
        super().__init__(options, recipe, task)
        self.last = min(recipe.steps, options.stop_after or recipe.steps)
        self.goes_back = options.resume  # to the newest checkpoint
        self._kills, self._losses = list(options.kill), 0

    def run(self) -> None:
        """All steps, up to `last`. Raises the error of an actor that died if there is no checkpoint to go on from."""
        while True:
            try:
                self._go_on()
                return
            except Exception as error:
                self._replace_lost(error)

    def _go_on(self) -> None:
        if self.tags.keys() != self.kinds.keys():
            self.set_up()
        if self.goes_back:
            self._go_back()
        elif self.steps_done == 0:
            self.begin()
            sizes = self.ask("engine.config")[:: self.options.engine_ranks]
            tokens = sum(each.num_blocks * each.block_size for each in sizes)
            self.write_log({"held_out": sum(self.warm) / len(self.warm), "after": "warm-up", "kv_tokens": tokens})
            self._commit()
        while self.steps_done < self.last:
            self.step()
            if self._is_due(self.steps_done):
                self._commit()

    def set_up(self) -> None:
        """Build the roles that are missing; the others are paused."""
        for role in self.tags:
            self.call(role, "colocated_abort")  # of a turn that failed
            self.pause(role)
        for role in self.kinds.keys() - self.tags.keys() if self._losses else ():
            self.call(role, "await_memory", _RETURN_S)
        super().set_up()

    def call(self, role: str, method: str, *arguments: Any, **named: Any) -> list[Any]:
        """In the drill, the last actor of the role dies when its work begins."""
        kill = (role, self.steps_done + 1)
        if kill in self._kills and (role, method) in _WORK:
            self._kills.remove(kill)
            self.say(f"drill: killing the last {role} in step {self.steps_done + 1}")
            ray.kill(self.actors[role][-1])
        return super().call(role, method, *arguments, **named)

    def bring_weights(self) -> None:
        """The trainers write their part of a checkpoint at the end of their turn."""
        step = self.steps_done + 1 if self.warm else 0
        if self.checkpoints is not None and not self.goes_back and self._is_due(step):
            self.ask("trainer.save", self.checkpoints.begin(step))
        super().bring_weights()

    def _is_due(self, step: int) -> bool:
        return step % self.options.checkpoint_every == 0 or step == self.last

    def _commit(self) -> None:
        """Write the rest of the checkpoint and give it its name, after the whole step."""
        if self.checkpoints is None:
            return
        state = {
            "step": self.steps_done,  # from which the learning rate follows
            "settings": self._settings,
            "task": self.task.draws.getstate(),
            "engines": self.ask("engine.random_state.tolist"),
            "warm": self.warm,
            "surprise": self.surprise,
            "counts": self.counts,
        }
        self.say(f"checkpoint: {self.checkpoints.commit(state)}")
        self._losses = 0

    def _go_back(self) -> None:
        """Load the newest checkpoint, in any phase."""
        assert self.checkpoints is not None
        path, state = self.checkpoints.newest()
        self.enter("train")
        self.ask("trainer.load", path)
        self.steps_done, self.warm = state["step"], state["warm"]
        self.surprise, self.counts = state["surprise"], Counter(state["counts"])
        self.bring_weights()
        self.call("engine", "set_random_state", state["engines"])
        self.task.set_random_state(state["task"])
        self.goes_back = False
        self.write_log({"went_back_to": self.steps_done})
        self.say(f"going on after step {self.steps_done}, from {path}")

    def _replace_lost(self, error: Exception) -> None:
        """Replace all actors of each role in which one has died. Raises the error if none has."""
        if self.checkpoints is None or not self.checkpoints.complete or self._losses >= _MOST_LOSSES:
            raise error
        lost = self._lost()
        if not lost:
            raise error
        self._losses += 1
        self.say(f"lost {', '.join(sorted(lost))} in step {self.steps_done + 1}: {type(error).__name__}")
        self.write_log({"lost": sorted(lost), "in_step": self.steps_done + 1})
        self.goes_back = True
        for role in lost:  # a collective group cannot replace a single rank
            self.tags.pop(role, None)
            for actor in self.actors[role]:
                ray.kill(actor)
            self.actors[role] = self.make(role)

    def _lost(self) -> set[str]:
        """The roles of actors that have died, and then of those that do not answer either."""
        calls = {actor.__ray_ready__.remote(): role for role, actors in self.actors.items() for actor in actors}
        dead: set[str] = set()
        waiting, deadline = list(calls), time.monotonic() + _ANSWER_S
        while waiting and time.monotonic() < deadline:
            answered, waiting = ray.wait(waiting, num_returns=1, timeout=deadline - time.monotonic())
            for call in answered:
                try:
                    ray.get(call)
                except RayActorError:
                    dead.add(calls[call])
            # Other ranks of a dead actor's role may wait for it in a collective. They are replaced with it.
            waiting = [call for call in waiting if calls[call] not in dead]
        return dead | {calls[call] for call in waiting if dead}
