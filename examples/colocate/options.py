"""The command line."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from .arithmetic import arithmetic
from .countdown import countdown
from .prompts import TextTokenizer, prompts
from .recipes import GIB, MIB, RECIPES, Recipe, of_folder
from .savers import REGIONS, import_saver
from .task import Task, TaskError

_DESCRIPTION = "The RL loop: an engine and a trainer, two Ray actors on one device, take turns through memsaver."


class Options(argparse.Namespace):
    """All arguments, which `parse` explains, and `host_device`: bytes of the run's own device of the host driver."""

    def count(self, role: str) -> int:
        """Actors of a role."""
        return self.ranks if role == "trainer" else self.engines * self.engine_ranks

    @property
    def in_regions(self) -> bool:
        """Both actors' memory is in regions of memsaver."""
        return self.memory in ("memsaver", "driver")

    @property
    def pairs(self) -> int:
        """Places for an actor of each role."""
        return max(map(self.count, ("engine", "trainer")))

    @property
    def sharers(self) -> int:
        """Pairs on one device: each has a GPU, and all share the host device."""
        return 1 if self.device == "cuda" else self.pairs


def parse(arguments: list[str] | None = None) -> tuple[Options, Recipe, Task]:
    """Wrong arguments end the program, before it starts its work."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m examples.colocate", description=_DESCRIPTION)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default="cuda" if on_gpu else "cpu")
    add("--recipe", choices=tuple(RECIPES), help="by default the device's; tiny is for tests, and learns little")
    add("--model", type=_path, metavar="DIR", help="a Hugging Face folder: Qwen2.5, Qwen3 or Llama")
    add("--engine", choices=("own", "vllm"), default="own", help="vllm needs --model and a GPU")
    add("--task", type=_path, metavar="FILE", help="JSON lines with prompts, in place of countdown")
    add("--reward", type=_path, metavar="FILE", help="Python file with reward(fields, completion), for --task")
    add("--memory", choices=tuple(REGIONS), default="memsaver", help="the memory of both; see savers.py")
    add("--late", action="store_true", help="the optimizer's state moves while both work; with memory in regions")
    add("--ranks", type=_number(1), default=1, help="ranks of the trainer, one for each GPU")
    add("--engines", type=_number(1), help="number of engines; by default as many as there are ranks for")
    add("--engine-ranks", type=_number(1), default=1, help="of each engine, by tensor parallel")
    add("--engine-dtype", choices=("float32", "bfloat16"), help="by default the recipe's")
    for name, least in (("steps", 1), ("warm_up_steps", 0), ("prompts", 1), ("held_out", 2), ("rate", 0.0)):
        add(f"--{name.replace('_', '-')}", type=_number(least), help="by default the recipe's")
    add("--max-new-tokens", type=_number(1), help="tokens of a completion, with --model; by default the recipe's")
    add("--kv-blocks", type=_number(2), help="of each engine; by default the recipe's, or all that fit")
    add("--seed", type=int, default=0)
    add("--zero-advantages", action="store_true", help="control: no weight changes")
    add("--deterministic", action="store_true", help="the trainers use torch's deterministic algorithms")
    add("--answer-within", type=_number(0.1), default=600.0, metavar="S", help="a slower actor counts as hung")
    add("--checkpoint-dir", type=_path, metavar="DIR", help="folder for checkpoints, shared by all nodes")
    add("--checkpoint-every", type=_number(1), default=5, help="steps between two checkpoints")
    add("--resume", action="store_true", help="continue the run from its newest checkpoint")
    add("--stop-after", type=_number(1), metavar="STEP", help="end after this step, with a checkpoint")
    add("--kill", type=_kills, default=(), metavar="ROLE:STEP,...", help="drill: kill an actor in a step")
    add("--log", type=_path, metavar="FILE", help="one JSON line per step, written at once")
    found = parser.parse_args(arguments, namespace=Options())
    if found.device == "cuda" and not on_gpu and "RAY_ADDRESS" not in os.environ:
        parser.error("--device is 'cuda' and this machine has no CUDA device; expected 'cpu', or RAY_ADDRESS")
    found.engines = found.engines or max(1, found.ranks // found.engine_ranks)
    if found.device == "cuda" and found.engines * found.engine_ranks > found.ranks:
        parser.error(f"--ranks is {found.ranks}; expected as many as ranks of engines: a trainer writes on its own GPU")
    if bool(found.task) != bool(found.reward) or (found.task and not found.model):
        parser.error("--task needs --reward and --model")
    savers = ("memsaver", "driver", "to-cpu")
    fits_vllm = found.device == "cuda" and found.model and found.memory in savers and found.engine_ranks == 1
    if found.engine == "vllm" and (not fits_vllm or found.checkpoint_dir):
        needs = "--device cuda and --model, one rank of each engine, no --checkpoint-dir"
        parser.error(f"--engine is 'vllm'; expected it with {needs}, and --memory {', '.join(savers)}")
    if found.max_new_tokens and not found.model:
        parser.error("--max-new-tokens needs --model: completions of arithmetic have as many as their sums")
    if found.late and not found.in_regions:
        parser.error(f"--late needs --memory memsaver or driver; it is {found.memory!r}")
    for name in ("resume", "stop_after", "kill"):
        if getattr(found, name) and found.checkpoint_dir is None:
            parser.error(f"--{name.replace('_', '-')} needs --checkpoint-dir")
    try:
        if found.memory == "torch_memory_saver":
            import_saver(found.device)
        recipe = _recipe(found)
        task = _task(found, recipe)
        _check_task(recipe, task)
        late = [f"{role}:{step}" for role, step in found.kill if step > recipe.steps]
        if late:
            parser.error(f"--kill: {late[0]}; expected a step of the run, 1 to {recipe.steps}")
        if found.log:
            found.log.open("a").close()
        if found.checkpoint_dir:
            found.checkpoint_dir.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    # Processes that name the same size share a device of the host driver: each run has its own. Also other than those
    # of earlier runs, whose broker may live for a moment yet: its pool may have another capacity.
    found.host_device = found.pairs * (2 * recipe.host_bytes + 4 * GIB) + os.getpid() % 1000 * 2 * MIB
    return found, recipe, task


def _recipe(found: argparse.Namespace) -> Recipe:
    recipe = of_folder(found.model) if found.model else RECIPES[found.recipe or ("gpu", "cpu")[found.device == "cpu"]]
    names = ("steps", "warm_up_steps", "prompts", "held_out", "rate", "max_new_tokens", "kv_blocks")
    if found.engine_dtype is not None:
        recipe = replace(recipe, model=replace(recipe.model, dtype=getattr(torch, found.engine_dtype)))
    return replace(recipe, **{name: getattr(found, name) for name in names if getattr(found, name) is not None})


def _task(found: argparse.Namespace, recipe: Recipe) -> Task:
    seed, sizes = found.seed, {"held_out": recipe.held_out, "max_new_tokens": recipe.max_new_tokens}
    if found.task:
        return prompts(found.task, found.reward, TextTokenizer(found.model), **sizes, seed=seed)
    if found.model:
        return countdown(TextTokenizer(found.model), problems=recipe.problems, **sizes, seed=seed)
    return arithmetic(recipe.largest, recipe.terms, recipe.problems, recipe.held_out, recipe.slip_share, seed)


def _check_task(recipe: Recipe, task: Task) -> None:
    """Raises TaskError for a number or a prompt with which a later step would fail."""
    if recipe.prompts > len(task.train):
        raise TaskError(f"--prompts is {recipe.prompts}; expected at most the {len(task.train)} problems to train on")
    if recipe.warm_up_steps and task.demonstrate is None:
        raise TaskError(f"--warm-up-steps is {recipe.warm_up_steps}; expected 0: the task has no demonstrations")
    vocabulary, most, block = recipe.model.vocab_size, recipe.model.max_position, recipe.engine.block_size
    for problem in (*task.train, *task.held_out):
        tokens = task.tokenizer.encode(problem.prompt)
        prompt = f"the prompt {problem.prompt[:40]!r} has {len(tokens)} tokens"
        if not 1 <= len(tokens) < most or max(tokens) >= vocabulary:
            found = f"{prompt}, up to number {max(tokens, default=0)}"
            raise TaskError(f"{found}; expected 1 to {most - 1}, of a vocabulary of {vocabulary}")
        needed = 1 + -(-(min(len(tokens) + task.max_new_tokens, most) - 1) // block)  # one is the engine's own
        if recipe.kv_blocks is not None and recipe.kv_blocks < needed:
            raise TaskError(f"--kv-blocks is {recipe.kv_blocks}; expected {needed} or more: {prompt}")


def _number(least: float) -> Callable[[str], float]:
    """Reads numbers of `least` or more, and of its type."""
    kind = type(least)

    def read(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            expected = "an integer" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r}; expected {expected} of {least} or more")
        return value

    read.__name__ = kind.__name__  # in the parser's message about a text that is no number
    return read


def _kills(text: str) -> tuple[tuple[str, int], ...]:
    found = []
    for part in text.split(","):
        role, _, step = part.partition(":")
        if role not in ("engine", "trainer") or not step.isdecimal() or int(step) < 1:
            raise argparse.ArgumentTypeError(f"{part!r}; expected engine:STEP or trainer:STEP, from step 1 on")
        found.append((role, int(step)))
    return tuple(found)


def _path(text: str) -> Path:
    return Path(text).absolute()  # actors have other working directories
