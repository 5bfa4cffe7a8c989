"""The command line of the loop."""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import replace
from typing import NamedTuple

import torch

from .arguments import integer, share
from .recipes import RECIPES, Recipe
from .summary import STDOUT

_DESCRIPTION = "The RL loop: an engine and a trainer, two Ray actors on one device, take turns through memsaver."


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m examples.colocate.loop", description=_DESCRIPTION)
    flag = argparse.BooleanOptionalAction
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    parser.add_argument("--recipe", choices=tuple(RECIPES), help="sizes and settings; by default the device's")
    parser.add_argument("--ranks", type=integer(1), default=1, help="engines and trainers, a pair for each GPU")
    parser.add_argument("--ranks-per-gpu", type=integer(1), default=1, help="pairs that share a GPU")
    parser.add_argument("--pool", choices=("shared", "process"), default="shared", help="source of device memory")
    parser.add_argument(
        "--sync", choices=("attach", "buckets"), help="way of the weights; by default attach, with a shared pool"
    )
    parser.add_argument("--engine-dtype", choices=("float32", "bfloat16"), help="by default the recipe's")
    parser.add_argument("--steps", type=integer(0), help="steps of reinforcement learning")
    parser.add_argument("--warm-up-steps", type=integer(0), help="supervised steps before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero-advantages", action="store_true", help="control: no weight changes")
    parser.add_argument("--pause", action=flag, default=True, help="release memory; without, both stay resident")
    parser.add_argument("--prove-overwrite", action=flag, default=True, help="overwrite all free memory at the end")
    parser.add_argument("--kv-share", type=share, help="of the device's memory, for the engine's KV cache")
    parser.add_argument("--workspace-share", type=share, help="of the device's memory, for the trainer's workspace")
    parser.add_argument("--eval-every", type=integer(0), default=0, help="steps between held-out evaluations")
    parser.add_argument(
        "--checkpoint-dir", type=_folder, metavar="DIR", help="folder for checkpoints, shared by all nodes"
    )
    parser.add_argument("--checkpoint-every", type=integer(1), default=5, help="steps between two checkpoints")
    parser.add_argument("--resume", action="store_true", help="continue the run from its newest checkpoint")
    parser.add_argument("--stop-after", type=integer(1), metavar="STEP", help="end after this step, with a checkpoint")
    parser.add_argument(
        "--kill", type=_kills, default=[], metavar="ROLE:STEP,...", help="drill: kill an engine or a trainer in a step"
    )
    parser.add_argument(
        "--deterministic", action="store_const", const=True, help="the trainers use torch's deterministic algorithms"
    )
    parser.add_argument("--address", help="of a Ray cluster to join; by default a local one is started")
    parser.add_argument(
        "--json",
        type=_json,
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write the figures as JSON, or print them",
    )
    parser.add_argument(
        "--picture", type=_picture, metavar="FILE", help="draw device memory over the last steps: .svg or .png"
    )
    parser.add_argument("--picture-steps", type=integer(1), default=2, metavar="N", help="steps to draw, the last ones")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not on_gpu and options.address is None:
        parser.error(
            "--device is 'cuda' and this machine has no CUDA device, expected 'cpu', or --address of a cluster"
        )
    if options.ranks % options.ranks_per_gpu:
        parser.error(f"--ranks-per-gpu is {options.ranks_per_gpu}, expected a divisor of --ranks, {options.ranks}")
    options.sync = options.sync or ("attach" if options.pool == "shared" else "buckets")
    if options.sync == "attach" and options.pool != "shared":
        parser.error("--sync attach needs --pool shared: other memory cannot be attached to")
    for name in ("resume", "stop_after", "kill"):
        if getattr(options, name) and options.checkpoint_dir is None:
            parser.error(f"--{name.replace('_', '-')} needs --checkpoint-dir")
    steps = chosen_recipe(options).steps
    for kill in options.kill:
        if kill.step > steps:
            parser.error(f"--kill: {kill.role}:{kill.step}, expected a step of the run, 1 to {steps}")
    return options


class Kill(NamedTuple):
    """The death of an actor of this role in this step, counted from 1."""

    role: str
    step: int


def _kills(text: str) -> list[Kill]:
    found = []
    for part in text.split(","):
        role, _, step = part.partition(":")
        if role not in ("engine", "trainer") or not step.isdecimal() or int(step) < 1:
            raise argparse.ArgumentTypeError(f"{part!r}, expected engine:STEP or trainer:STEP, from step 1 on")
        found.append(Kill(role, int(step)))
    return found


def _folder(text: str) -> str:
    """A folder that can be written to, or made."""
    path = os.path.abspath(text)
    there = path if os.path.exists(path) else os.path.dirname(path)
    if not (os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a directory that can be written to, or made")
    return path


def _picture(text: str) -> str:
    """A file for a picture. matplotlib has to be installed, since the run would find its absence at the end only."""
    if not text.endswith((".svg", ".png")):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a name that ends in .svg or .png")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"{text!r} needs matplotlib, expected the extra: pip install '.[picture]'")
    return _file(text)


def _json(text: str) -> str:
    """A file, or "-" for the standard output; argparse reads the default of `--json` without a value through this."""
    return text if text == STDOUT else _file(text)


def _file(text: str) -> str:
    """A file that can be written. The check comes before the run, not after it."""
    path = os.path.abspath(text)
    folder = os.path.dirname(path)
    if os.path.exists(path):
        fit = not os.path.isdir(path) and os.access(path, os.W_OK)
    else:
        fit = os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
    if not fit:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a file that can be written, in a directory that exists")
    return path


def chosen_recipe(options: argparse.Namespace) -> Recipe:
    """The named recipe, with the figures that the options replace."""
    recipe = RECIPES[options.recipe or ("gpu" if options.device == "cuda" else "cpu")]
    named = {
        name: getattr(options, name)
        for name in ("steps", "warm_up_steps", "kv_share", "workspace_share", "deterministic")
    }
    if options.engine_dtype is not None:
        recipe = replace(recipe, model=replace(recipe.model, dtype=getattr(torch, options.engine_dtype)))
    return replace(recipe, **{name: value for name, value in named.items() if value is not None})
