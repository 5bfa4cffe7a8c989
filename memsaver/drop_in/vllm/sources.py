"""The versions of vLLM that were reviewed, by the source of every replaced name."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from memsaver.drop_in.errors import DropInError

MODULE: Final = "vllm.device_allocator.cumem"
REPLACED: Final = ("CuMemAllocator", "create_and_map", "unmap_and_release")
WORKER_MODULE: Final = "vllm.v1.worker.gpu_worker"
WRAPPED: Final = ("sleep", "wake_up")  # methods of its class Worker


@dataclass(frozen=True)
class Behaviour:
    """The differences between the reviewed versions of ``CuMemAllocator``."""

    since: str  # the first version with this source
    several_pools: bool  # allocator_and_pools has a list for each tag
    deferrable: tuple[str, ...] | None  # tags that wake_up(tags) may leave asleep; None: all
    discards: bool  # has discard() and cudagraph_pool()


# By the digest of the replaced names, see digest().
REVIEWED: Final = {
    "298617b47a7983d2d75c00744aa51bfd5b490f23720748d2abd1f87ccbe84dd2": Behaviour("0.24.0", False, None, False),
    "4e19add2add9d6c75233b17d181ab85ca6d43be84b8fb15bd159811be708f1c2": Behaviour("0.25.0", False, None, False),
    "737692e03611b6afa5999e19bd78649cf5f3331185d09e5be53a087ec6af40d0": Behaviour("0.27.1", False, None, False),
    "931c5cddf42d2e8ddf385080cccafaf5ca83c8b66a7a4f33aece5130196af44b": Behaviour(
        "0.33.0", True, ("weights", "kv_cache"), True
    ),
}


def digest(source: str) -> str:
    """SHA-256 of the source text of the replaced names, in the order of REPLACED.

    Raises:
        DropInError: A name is missing.
    """
    tree = ast.parse(source)
    found = {
        node.name: ast.get_source_segment(source, node) or ""
        for node in tree.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
    }
    missing = [name for name in REPLACED if name not in found]
    if missing:
        raise DropInError(f"{MODULE} has no {', '.join(missing)}: it is not a module that memsaver knows")
    return hashlib.sha256("\n".join(found[name] for name in REPLACED).encode()).hexdigest()


def check(version: str) -> Behaviour:
    """The behaviour of the installed vLLM.

    Raises:
        DropInError: Its source is not one that was reviewed.
    """
    package = find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        raise DropInError("there is no package vllm")
    folder = Path(package.submodule_search_locations[0])
    path = _path(folder, MODULE, version)
    behaviour = REVIEWED.get(digest(path.read_text(encoding="utf-8")))
    if behaviour is None:
        known = ", ".join(sorted({each.since for each in REVIEWED.values()}))
        raise DropInError(
            f"the allocator of vLLM {version} ({path}) is not one that was reviewed (first versions with a reviewed "
            f"source: {known}); use one of these, or MEMSAVER_DROP_IN=vllm:warn to go on without memsaver"
        )
    check_worker(_path(folder, WORKER_MODULE, version).read_text(encoding="utf-8"))
    return behaviour


def check_worker(source: str) -> None:
    """Raises DropInError if vLLM's worker lacks a method that memsaver wraps."""
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "Worker"]
    methods = {node.name for found in classes for node in found.body if isinstance(node, ast.FunctionDef)}
    missing = [name for name in WRAPPED if name not in methods]
    if missing:
        raise DropInError(f"{WORKER_MODULE}.Worker has no {', '.join(missing)}: it is not a worker that memsaver knows")


def _path(folder: Path, module: str, version: str) -> Path:
    """The file of a module. Not by find_spec(module), which imports the packages above it."""
    path = folder.joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not path.is_file():
        raise DropInError(f"vLLM {version} has no {path}")
    return path
