"""Wrong changes of the example, each with the check that has to end a run: `test_faults` runs it with small actors.

`python -m tests.examples.faults [name ...]` runs the command itself on a copy with each change, and then without a
change from several seeds: 20 runs of a few steps, and 5 whole runs.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from tests.rewrites import ROOT, UNCHANGED, Rewrite

SHORT = ("--warm-up-steps", "120", "--steps", "4")
SEEDS = range(5)
FP32, BF16 = ("--engine-dtype", "float32"), ("--engine-dtype", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Fault(Rewrite):
    """A change of functions. In bf16 most checks have wider bounds."""

    tests: Sequence[str] = ()
    check: str  # a pattern of its name, which the message has
    arguments: Sequence[str] = BF16

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Change the functions of this process."""
        module = importlib.import_module(self.file.removesuffix(".py").replace("/", "."))
        texts = ((ROOT / self.file).read_text(), self.text())
        old, new = (dict(_functions(compile(text, self.file, "exec"))) for text in texts)
        for name, code in new.items():
            if code != old[name]:
                *owners, last = name.split(".")
                found: Any = vars(reduce(getattr, owners, module))[last]
                patch.setattr(inspect.unwrap(found), "__code__", code)


def _functions(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """Of a module, and of its classes, by qualified name."""
    for each in code.co_consts:
        if isinstance(each, CodeType) and not each.co_name.startswith("<"):
            if each.co_flags & inspect.CO_OPTIMIZED:
                yield each.co_qualname, each
            else:
                yield from _functions(each)


def _weights_of_the_step_before(dtype: str, rate: str) -> Fault:
    return Fault(
        f"weights_of_the_step_before_{dtype}_{rate}",
        "engines get the parameters that the trainer had a step before",
        "examples/colocate/trainer/weights.py",
        "            return sum(_copy(self._rows, engine) for engine in engines)",
        "            now = {name: (rows.clone(), first) for name, (rows, first) in self._rows.items()}\n"
        "            written = sum(_copy(getattr(self, '_last', now), engine) for engine in engines)\n"
        "            self._last = now\n"
        "            return written",
        check="weights are the trainer's",
        arguments=("--engine-dtype", dtype, "--rate", rate),
    )


FAULTS = [
    Fault(
        "weights_sent_once",
        "engines get the weights after the warm-up, and no others",
        "examples/colocate/loop.py",
        "        self.trainer.weights.write(here, gather)",
        "        if not getattr(self, 'wrote', 0):\n            self.wrote = self.trainer.weights.write(here, gather)",
        check="weights are the trainer's",
    ),
    _weights_of_the_step_before("float32", "1e-3"),
    _weights_of_the_step_before("bfloat16", "1e-3"),
    _weights_of_the_step_before("bfloat16", "1e-4"),
    Fault(
        "caches_never_reset",
        "the contents of KV cache and prefix cache outlast pauses and new weights",
        "examples/colocate/engine/block_manager.py",
        "        self._block_of.clear()\n        self._digest_of.clear()",
        "        pass",
        check="tokens are the same after a pause",
    ),
    Fault(
        "samples_at_half_the_temperature",
        "engines sample at another temperature than the trainer's",
        "examples/colocate/rollout.py",
        "temperature = 0.0 if greedy else self.temperature",
        "temperature = 0.0 if greedy else self.temperature / 2",
        check="log-probabilities agree",
    ),
    Fault(
        "trainer_at_temperature_0.9",
        "the trainer computes log-probabilities of another temperature than the engines'",
        "examples/colocate/trainer/trainer.py",
        "*self._tables, temperature, self",
        "*self._tables, 0.9 * temperature, self",
        check="log-probabilities agree",
        arguments=FP32,
    ),
    Fault(
        "loss_of_the_wrong_sign",
        "the policy gets worse",
        "examples/colocate/grpo.py",
        "loss_N = -plain_N.minimum(clipped_N)",
        "loss_N = plain_N.minimum(clipped_N)",
        check="gradients are those of the samples",
    ),
    Fault(
        "advantages_of_the_next_group",
        "each completion has the advantage of one of another group",
        "examples/colocate/rollout.py",
        "group_advantages(rewards, zero_advantages).flatten()",
        "group_advantages(rewards, zero_advantages).roll(1, 0).flatten()",
        check="advantages are of the group",
    ),
    Fault(
        "importance_weights_inverted",
        "a token's weight is exp(engine - trainer)",
        "examples/colocate/grpo.py",
        "(policy_N - sampler_N).detach()",
        "(sampler_N - policy_N).detach()",
        check="gradients are those of the samples",
    ),
    Fault(
        "moments_zeroed_in_each_turn",
        "Adam's first moments are zero at the begin of each turn of the trainer",
        "examples/colocate/loop.py",
        "        prepared = [self.trainer.recompute(part) for part in parts]",
        "        [state['exp_avg'].zero_() for state in self.trainer.optimizer.state.values()]\n"
        "        prepared = [self.trainer.recompute(part) for part in parts]",
        check="parameters and moments outlast a pause",
    ),
    Fault(
        "moments_paused_without_a_backup",
        "Adam's moments are lost when the trainer leaves",
        "examples/colocate/loop.py",
        'return {"train": {"engine": {self.tags["engine"][0]: "none"}}}',
        'return {"train": {"engine": {self.tags["engine"][0]: "none"}}, "sync": {"trainer": {"optimizer": "none"}}}',
        check="the contents of 'optimizer' are not there",
    ),
    Fault(
        "weights_paused_without_a_backup",
        "the engines' weights are lost in a pause that no sync follows",
        "examples/colocate/checks/checked_loop.py",
        '"away": {"engine": {self.tags["engine"][0]: "host"}}',
        '"away": {"engine": {self.tags["engine"][0]: "none"}}',
        check="the contents of 'weights' are not there",
    ),
    # Those above are of a review. Other ones:
    Fault(
        "advantages_in_units_of_the_reward",
        "advantages are not divided by the deviation of their group",
        "examples/colocate/grpo.py",
        " / (deviation_P1 + _SMALLEST_DEVIATION)",
        "",
        check="advantages are of the group",
    ),
    Fault(
        "unlikely_tokens_cut",
        "engines sample from the likely tokens alone, and say the log-probabilities of the whole distribution",
        "examples/colocate/engine/ops.py",
        "torch.argmax(logits - ",
        "torch.argmax(logits.masked_fill(logits < logits.amax(-1, True) - 1, -1e9) - ",
        check="tokens are the policy's",
    ),
    Fault(
        "blocks_known_by_their_own_tokens",
        "a prompt gets cached blocks that follow other tokens",
        "examples/colocate/engine/block_manager.py",
        "key=parent, digest_size=16",
        "digest_size=16",
        check="(log-probabilities agree|tokens are the same after a pause)",
        arguments=FP32,
    ),
    Fault(
        "samples_of_one_minibatch",
        "all updates of a step learn from the same samples",
        "examples/colocate/loop.py",
        "samples[part :: self.recipe.minibatches]",
        "samples[:: self.recipe.minibatches]",
        check="each token is learned from once",
    ),
    Fault(
        "samples_of_a_rank_lost",
        "samples are dealt to more ranks than there are",
        "examples/colocate/trainer/trainer.py",
        "samples, self.rank, self.world_size,",
        "samples, self.rank, 2 * self.world_size,",
        check="each token is learned from once",
    ),
    Fault(
        "updates_applied_twice",
        "each step of the optimizer is two",
        "examples/colocate/trainer/trainer.py",
        "        self.optimizer.step()",
        "        self.optimizer.step()\n        self.optimizer.step()",
        check="each update is applied once",
    ),
    Fault(
        "a_tensor_moves",
        "a static tensor of the engine is made anew after a pause",
        "examples/colocate/engine/engine.py",
        "        self._residence = residence\n        return advanced",
        "        self._residence = residence\n        self.runner.batch.latest = self.runner.batch.latest.clone()\n"
        "        return advanced",
        check="addresses are the same",
    ),
    Fault(
        "buffers_stay",
        "a region of the engine stays in the trainer's turn",
        "examples/colocate/loop.py",
        '"train": {"trainer": train}',
        '"train": {"engine": ["buffers"], "trainer": train}',
        check="the engines' memory is free",
    ),
    Fault(
        "parameters_zeroed_on_the_way_out",
        "a parameter of the trainer is zero when it comes back",
        "examples/colocate/loop.py",
        "        self.sent = ()\n",
        "        self.sent = ()\n"
        "        if self.trainer.memory.params.state == 'active':\n"
        "            next(self.trainer.model.parameters()).detach().zero_()\n",
        check="parameters and moments outlast a pause",
    ),
    Fault(
        "weights_zeroed_on_the_way_out",
        "a weight of the engine is zero when it comes back",
        "examples/colocate/loop.py",
        "        self.engine.drain()",
        "        self.engine.drain()\n"
        "        if self.engine.memory.weights.state == 'active':\n"
        "            self.engine.model.weights['model.norm.weight'].zero_()",
        check="weights outlast a pause",
    ),
]


def run(folder: Path, variables: dict[str, str], *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """The exit status of the command, its log, and the last line that it printed."""
    log = folder / "run.jsonl"
    command = [sys.executable, "-m", "examples.colocate", "--device", "cpu", "--log", str(log), *arguments]
    log.unlink(missing_ok=True)
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    lines = (done.stderr if done.returncode == 1 else done.stdout).strip().splitlines()
    logged = log.read_text().splitlines() if log.exists() else []
    return done.returncode, [json.loads(line) for line in logged], lines[-1] if lines else ""


def main() -> int:
    """Returns how many runs ended otherwise than they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of faults, or 'honest'; all where none is named")
    names, wrong = parser.parse_args().names, 0
    for fault in FAULTS:
        if not names or fault.name in names:
            with fault.applied() as (folder, variables):
                status, log, last = run(folder, variables, *SHORT, *fault.arguments)
            ended = status == 1 and re.search(f"{fault.check}: ", last) is not None
            wrong += not ended
            how, step = "found " if ended else "MISSED", 1 + sum("step" in line for line in log)
            print(f"{how} {fault.name}: exit status {status} in step {step}, {last}", flush=True)
    for seed in SEEDS if not names or "honest" in names else ():
        with UNCHANGED.applied() as (folder, variables):
            status, log, last = run(folder, variables, "--seed", str(seed))
        wrong += status != 0
        figures = "; ".join(
            f"{name} at most {max(abs(line[name]) for line in log if name in line):.3g}" for name in ("z", "gap")
        )
        print(
            f"{'passed' if status == 0 else 'FAILED'} seed {seed}: exit status {status}, {figures}; {last}", flush=True
        )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
