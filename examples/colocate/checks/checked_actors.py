"""The actors of a run with checks: the methods for checks, checkpoints and recovery."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import memsaver

from ..engine import Completion, Engine, SamplingParams
from ..loop import EngineActor, TrainerActor
from ..trainer.interface import Sample, StepMetrics, TokenStatistics
from ..worker import Worker

_POLL_S = 0.05
_IN_FLIGHT = 4  # steps of requests before the pause in which they are running


class CheckError(RuntimeError):
    """A check failed. The message begins with its name."""


class Memory(Worker):
    """Figures of the device, for both roles."""

    def mapped_bytes(self, tags: Sequence[str]) -> int:
        """That the regions of these tags hold, or the guests of another saver."""
        stats = memsaver.stats()
        rows = [row for each in stats.devices.values() for row in each.regions if row.tag in tags]
        guests = [guest for guest in stats.guests if guest.name in tags]
        return sum(row.mapped_bytes for row in rows) + sum(guest.nbytes or 0 for guest in guests)

    def free_bytes(self) -> int:
        """That the pool has left. Other savers have none."""
        if self.options.memory != "memsaver":
            return 0
        memsaver.region("overwrite", device=str(self.device))  # the first region joins the pool
        pool = memsaver.stats().devices[str(self.device)].pool
        return pool.available_bytes or 0 if pool else 0

    def await_memory(self, seconds: float) -> None:
        """Wait until all memory is free, as dead processes' is after a while; no longer than this."""
        until = time.monotonic() + seconds
        while self.options.memory == "memsaver" and self.free_bytes() < self.capacity and time.monotonic() < until:
            time.sleep(_POLL_S)

    def overwrite(self) -> int:
        """Make all free memory NaN in every floating type. One rank of a device does. Returns the bytes."""
        count = self.free_bytes() if self.rank % self.sharers == 0 else 0
        if count == 0:
            return 0
        region = memsaver.region("overwrite", device=str(self.device))
        region.resume()  # a recovery pauses all regions
        taken = region.empty((count,), torch.uint8)
        taken.fill_(0xFF)
        del taken
        memsaver.trim("overwrite")
        return count


class CheckedEngine(EngineActor, Memory):
    _requests: Sequence[Any] = ()

    def start(self, prompts: list[list[int]], sampling: SamplingParams) -> None:
        """Begin requests, and leave them running."""
        self._requests = [self.engine.submit(prompt, sampling) for prompt in prompts]
        for _ in range(_IN_FLIGHT):  # each step is a prefill of some, or a token of each that runs
            self.engine.step()

    def finish(self) -> list[tuple[int, Completion]]:
        """Those requests, each with the number of its tokens at the pause."""
        requests, self._requests = self._requests, ()
        had = [len(each.logprobs) for each in requests]
        while any(each.finish_reason is None for each in requests):
            self.engine.step()
        return [(count, each.completion()) for count, each in zip(had, requests)]

    def set_random_state(self, states: Sequence[list[int]]) -> None:
        """The sampler's, to that of this rank: a seed, and a number of calls."""
        assert isinstance(self.engine, Engine)
        self.engine.random_state.copy_(torch.tensor(states[self.rank]))


class CheckedTrainer(TrainerActor, Memory):
    _kept: Mapping[str, int] = {}  # checksums of the last phase "train", until the first update of the next one

    def setup(self, addresses: Sequence[str]) -> list[str]:
        tags = super().setup(addresses)
        self.trainer.optimizer.register_step_pre_hook(lambda *_: self._check_kept())
        return tags

    def keep(self) -> None:
        """Remember all contents at the end of the phase "train"."""
        self._kept = self.trainer.checksums()

    def _check_kept(self) -> None:
        kept, self._kept = self._kept, {}
        wrong = [name for name, found in self.trainer.checksums().items() if found != kept[name]] if kept else []
        if wrong:
            raise CheckError(f"parameters and moments outlast a pause: others in {', '.join(wrong[:4])}")

    def train(self, samples: Sequence[Sample], rate: float) -> tuple[StepMetrics, TokenStatistics]:
        """The first update starts from the contents of the last phase "train", and has the gradients of the samples.

        Of the loss by a token's log-probability: -advantage x min(exp(trainer - engine), cap) x ratio, over the number
        of tokens. The ratio of the first update is 1 but for rounding.
        """
        trainer, cap = self.trainer, self.recipe.trainer.weight_cap
        first = trainer.deal(samples[:: self.recipe.minibatches])
        micro_batches = iter(first.micro_batches)

        def watch(_: Any, given: tuple[Any, ...], output: Tensor) -> None:
            own = next(micro_batches, None) if output.requires_grad else None
            if own is None:  # another update, or a forward pass that no update follows
                return
            part = given[0]
            weights_N = (part.behaviour_N - own.behaviour_N).exp().clamp(max=cap)
            ratio_N = (output[0].detach() - part.behaviour_N).exp()
            expected_N = -own.advantages_N * weights_N * ratio_N * trainer.world_size / first.num_targets

            def check(gradients: Tensor) -> None:
                off_N = (gradients[0] - expected_N).abs() > 1e-3 * expected_N.abs() + 1e-8
                if off_N.any():  # not of NaN: the step refuses it
                    raise CheckError("gradients are those of the samples: they are not -advantage x weight")

            output.register_hook(check)

        with trainer.model.register_forward_hook(watch):
            return super().train(samples, rate)
