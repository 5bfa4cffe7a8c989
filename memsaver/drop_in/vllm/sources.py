"""The parts of vLLM's sources that the drop-in replaces or relies on, and their comparison with an installed vLLM.

All else in a module may change. The files are read, not imported: nothing has changed when a difference is found.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from memsaver.drop_in import DropInError

MODULE: Final = "vllm.device_allocator.cumem"
REPLACED: Final = ("CuMemAllocator", "create_and_map", "unmap_and_release")
WORKER_MODULE: Final = "vllm.v1.worker.gpu_worker"

# By module and class: texts with which a line begins, in the format of ast.unparse() without annotations. "?": only if
# there is a function of this name, which versions lack. "*": within a line.
NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "vllm.device_allocator:AllocationData": ("handle", "tag", "cpu_backup_tensor"),
    MODULE: ("logger =", "def create_and_map(allocation_handle):", "def unmap_and_release(allocation_handle):"),
    f"{MODULE}:CuMemAllocator": (
        "instance", "default_tag", "def __init__(self):", "def get_instance():",
        "def use_memory_pool(self, tag=None):", "?def cudagraph_pool(self):", "def get_current_usage(self):",
        "?def release_pools(self):", "?def close(self):", "def sleep(self, offload_tags=None):",
        "?def discard(self, tags):", "def wake_up(self, tags=None):",
    ),
    WORKER_MODULE: ("logger =",),
    f"{WORKER_MODULE}:Worker": (
        "def __init__(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False):",
        "def sleep(self, level=1):", "assert freed_bytes >= 0, 'Memory usage increased after sleeping.'",
        "def wake_up(self, tags=None):", "?def discard(self, tags):",
    ),
    "vllm.v1.worker.worker_base:WorkerBase": ("self.vllm_config", "self.parallel_config", "self.rank"),
    "vllm.v1.executor.multiproc_executor:MultiprocExecutor": (),
    "vllm.config.vllm:VllmConfig": ("model_config", "kv_transfer_config"),
    "vllm.config.model:ModelConfig": ("enable_cumem_allocator",),
    "vllm.config.kv_transfer:KVTransferConfig": ("kv_connector", "def is_kv_transfer_instance(self):"),
    "vllm.config.parallel:ParallelConfig": ("world_size", "data_parallel_rank", "distributed_executor_backend"),
    "vllm.distributed.parallel_state": ("_WORLD",),
    "vllm.distributed.parallel_state:GroupCoordinator": ("rank", "ranks"),
}  # fmt: skip

# All names of vLLM in methods of CuMemAllocator. A method with another one has learned something that its replacement
# has not.
KNOWN: Final[Mapping[str, Collection[str]]] = {
    "get_current_usage": ("self.pointer_to_data",),
    "release_pools": ("self.allocator_and_pools",),
    "close": ("self.release_pools",),
    "sleep": (
        "CuMemAllocator", "PIN_MEMORY", "is_pin_memory_available", "libcudart", "logger", "unmap_and_release",
        "self.pointer_to_data",
    ),
    "discard": ("logger", "unmap_and_release", "self.pointer_to_data"),
    "wake_up": ("DEFERRABLE_TAGS", "create_and_map", "current_platform", "libcudart", "self.pointer_to_data"),
}  # fmt: skip


def check(version: str) -> None:
    """Compares the installed vLLM with texts that its modules and classes need.

    Raises:
        DropInError: It names each file and text that differs.
    """
    package = find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        raise DropInError("there is no package vllm")
    found = list(differences(Path(package.submodule_search_locations[0])))
    if found:
        raise DropInError(f"vLLM {version} differs from the versions that memsaver knows: {'; '.join(found)}")


def differences(folder: Path) -> Iterator[str]:
    """The differences of a package vllm, each with its file."""
    for place, texts in NEEDED.items():
        module, _, name = place.partition(":")
        path = file_of(folder, module)
        if not path.is_file():
            yield f"there is no {path}"
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                node.annotation = None
            elif isinstance(node, ast.FunctionDef):
                node.returns = None
        classes = {each.name: each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)}
        scope = classes.get(name) if name else tree
        yield from (f"{path}: {each}" for each in _in_scope(scope, name, texts, tree))


def file_of(folder: Path, module: str) -> Path:
    """The file of a module. Not by find_spec(module), which imports the packages above it."""
    path = folder.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _in_scope(scope: ast.AST | None, name: str, texts: Collection[str], tree: ast.Module) -> Iterator[str]:
    if scope is None:
        yield f"there is no class {name}"
        return
    source = ast.unparse(scope)
    for text in texts:
        is_optional, text = text[0] == "?", text.lstrip("?")
        if is_optional and not re.search(rf"^\s*{re.escape(text.partition('(')[0])}\(", source, re.M):
            continue
        if not re.search(rf"^\s*{re.escape(text)}(?!\w)", source, re.M):
            yield f"{name or 'the module'} has no line {text!r}"
    for method in ast.iter_child_nodes(scope):
        if name == "CuMemAllocator" and isinstance(method, ast.FunctionDef) and method.name in KNOWN:
            unknown = sorted(_names_of_vllm(method, tree) - set(KNOWN[method.name]))
            if unknown:
                yield f"{name}.{method.name} uses {', '.join(unknown)}, which memsaver does not know"
        if name == "Worker" and isinstance(method, ast.FunctionDef) and method.name == "sleep":
            yield from _after_assertion(method)


def _names_of_vllm(method: ast.FunctionDef, tree: ast.Module) -> set[str]:
    """The names that a method reads, and attributes of self, without those of Python and of other libraries."""
    others = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.level or f"{node.module}.".startswith("vllm.")):
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            others |= {(each.asname or each.name).partition(".")[0] for each in node.names}
    used = set()
    for node in ast.walk(method):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Name):
            others.add(node.id)
        elif isinstance(node, ast.arg):
            others.add(node.arg)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            used.add(f"self.{node.attr}")
    return used - others


def _after_assertion(sleep: ast.FunctionDef) -> Iterator[str]:
    """With a shared pool memsaver ends a sleep at its assertion: only lines of the log may follow."""
    last = max((number for number, each in enumerate(sleep.body) if isinstance(each, ast.Assert)), default=-1)
    for each in sleep.body[last + 1 :]:
        if not ast.unparse(each).startswith("logger.info("):
            yield f"Worker.sleep has {ast.unparse(each)!r} after its assertion, expected lines of the log alone"
