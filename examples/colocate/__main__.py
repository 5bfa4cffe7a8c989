"""The RL loop with its checks: python -m examples.colocate --help"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import closing

import ray
import torch

import memsaver

from .checks.checked_actors import CheckError
from .checks.checked_loop import verdict
from .checks.recovery import RecoverableLoop
from .model.folder import FolderError
from .options import Options, parse
from .rollout import HungError
from .savers import variables
from .task import TaskError
from .trainer.interface import CheckpointError, NonFiniteError

FAILED, NOT_LEARNED = 1, 4  # exit statuses
# They explain themselves.
_EXPECTED = (CheckError, CheckpointError, FolderError, HungError, NonFiniteError, TaskError, memsaver.Error)


def main(arguments: list[str] | None = None) -> int:
    """Run the loop. Returns the exit status: 0 if a run learned or `--stop-after` ended it, NOT_LEARNED, or FAILED."""
    options, recipe, task = parse(arguments)
    started_here = not ray.is_initialized()
    if started_here:
        start_ray(options)
    began = time.perf_counter()
    try:
        with closing(RecoverableLoop(options, recipe, task)) as loop:
            hardware = torch.cuda.get_device_name() if options.device == "cuda" else f"host, {os.cpu_count()} cores"
            loop.write_log({"options": vars(options), "hardware": hardware, "torch": torch.__version__})
            loop.run()
            loop.check_counts()
            learned, text = True, f"stopped after step {loop.steps_done} of {recipe.steps}; --resume goes on"
            if loop.steps_done == recipe.steps:
                after = loop.rollouts.held_out_rewards()
                learned, text = verdict(loop.warm, after)
                loop.write_log({"held_out": sum(after) / len(after), "after": "end", "learned": learned})
    except _EXPECTED as error:
        print(f"FAILED: {str(getattr(error, 'cause', None) or error).strip()}", file=sys.stderr, flush=True)
        return FAILED
    finally:
        if started_here:
            ray.shutdown()
    held = ", ".join(f"{name} ({count})" for name, count in loop.passed.items())
    print(f"checks that held: {held}")
    print("engines: " + ", ".join(f"{name} {count}" for name, count in loop.counts.items()))
    print(f"{time.perf_counter() - began:.1f} s; {text}", flush=True)
    return 0 if learned else NOT_LEARNED


def start_ray(options: Options) -> None:
    """Join the cluster of RAY_ADDRESS, or start a local one with a CPU for each actor."""
    # Without this, Ray hides the GPUs from actors that request no share of a GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    cpus, joins = max(os.cpu_count() or 1, 2 * options.pairs), "RAY_ADDRESS" in os.environ
    local = {} if joins else {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    ray.init(logging_level=logging.ERROR, runtime_env={"env_vars": variables(options.memory)}, **local)


if __name__ == "__main__":
    sys.exit(main())
