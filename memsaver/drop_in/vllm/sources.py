"""The parts of vLLM's sources that the drop-in replaces or relies on, and their comparison with an installed vLLM.

An outline is Python: each name in it has to be in the module, each function with the same signature (annotations do not
count). All else in a module may change. In the body of a function of an outline

- ``uses(a, self.b)`` has all names of vLLM that the function may use: code that is replaced and uses another one has
  learned something that the replacement has not;
- any other statement has to be in the function's body.

``@optional`` marks a function that versions lack. A string has to be a constant of the module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from memsaver.drop_in.errors import DropInError

MODULE: Final = "vllm.device_allocator.cumem"
REPLACED: Final = ("CuMemAllocator", "create_and_map", "unmap_and_release")
WORKER_MODULE: Final = "vllm.v1.worker.gpu_worker"

SLEEP: Final[Mapping[str, str]] = {
    "vllm.device_allocator": """
class AllocationData:
    handle
    tag
    cpu_backup_tensor
""",
    MODULE: """
logger
AllocationData
def create_and_map(allocation_handle): ...
def unmap_and_release(allocation_handle): ...
class CuMemAllocator:
    instance
    default_tag
    def __init__(self): ...
    def get_instance():
        CuMemAllocator.instance = CuMemAllocator()
    @optional
    def _shutdown_singleton(): uses(CuMemAllocator, logger)
    def use_memory_pool(self, tag=None): ...
    @optional
    def cudagraph_pool(self): ...
    def get_current_usage(self): uses(self.pointer_to_data)
    @optional
    def release_pools(self): uses(self.allocator_and_pools)
    @optional
    def close(self): uses(self.release_pools)
    def sleep(self, offload_tags=None):
        uses(CuMemAllocator, PIN_MEMORY, is_pin_memory_available, libcudart, logger)
        uses(unmap_and_release, self.pointer_to_data)
    @optional
    def discard(self, tags): uses(logger, unmap_and_release, self.pointer_to_data)
    def wake_up(self, tags=None):
        uses(DEFERRABLE_TAGS, create_and_map, current_platform, libcudart, self.pointer_to_data)
""",
    WORKER_MODULE: """
logger
class Worker:
    def __init__(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False): ...
    def sleep(self, level=1):
        assert freed_bytes >= 0, "Memory usage increased after sleeping."
    def wake_up(self, tags=None): ...
    @optional
    def discard(self, tags): ...
""",
    "vllm.v1.worker.worker_base": """
class WorkerBase:
    vllm_config
    parallel_config
    rank
""",
    "vllm.v1.executor.multiproc_executor": """
class MultiprocExecutor: ...
"DeathPipeMonitor"
""",
    "vllm.config.vllm": """
class VllmConfig:
    model_config
    kv_transfer_config
""",
    "vllm.config.model": """
class ModelConfig:
    enable_cumem_allocator
""",
    "vllm.config.kv_transfer": """
class KVTransferConfig:
    kv_connector
    is_kv_transfer_instance
""",
    "vllm.config.parallel": """
class ParallelConfig:
    world_size
    data_parallel_rank
    distributed_executor_backend
""",
    "vllm.distributed.parallel_state": """
_WORLD
class GroupCoordinator:
    rank
    ranks
""",
}

# Modules with the layers whose weights vLLM processes after a load: it rearranges parameters, or derives other tensors
# from them. memsaver.drop_in.vllm.weights refuses layers of classes from there, whatever their names are.
PROCESSED: Final[Mapping[str, str]] = {
    "vllm.model_executor.layers.attention.mla_attention": "",
    "vllm.model_executor.layers.fused_moe": "",
    "vllm.model_executor.layers.mla": "",
}


def check(version: str, outlines: Mapping[str, str] = SLEEP) -> None:
    """Compares the installed vLLM with outlines, by module.

    Raises:
        DropInError: It names each file and name that differs.
    """
    package = find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        raise DropInError("there is no package vllm")
    found = differences(Path(package.submodule_search_locations[0]), outlines)
    if found:
        raise DropInError(f"vLLM {version} differs from the versions that memsaver knows: {'; '.join(found)}")


def differences(folder: Path, outlines: Mapping[str, str] = SLEEP) -> list[str]:
    """The differences between a package vllm and outlines, each with file and name."""
    found = []
    for module, outline in outlines.items():
        path = file_of(folder, module)
        if not path.is_file():
            found.append(f"there is no {path}")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{path}: {each}" for each in _compared(ast.parse(outline).body, tree, "", _names_of_vllm(tree))]
        if module == WORKER_MODULE:
            found += [f"{path}: {each}" for each in _after_assertion(tree)]
    return found


def file_of(folder: Path, module: str) -> Path:
    """The file of a module. Not by find_spec(module), which imports the packages above it."""
    path = folder.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _compared(outline: Iterable[ast.stmt], scope: ast.AST, prefix: str, vllms: set[str]) -> Iterator[str]:
    """The differences of a module or of a class."""
    bound = _bound(scope)
    for node in outline:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if value is not ... and not any(isinstance(x, ast.Constant) and x.value == value for x in ast.walk(scope)):
                yield f"there is no {value!r}"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Name):
            if node.value.id not in bound:
                yield f"there is no {prefix}{node.value.id}"
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            name, there = prefix + node.name, bound.get(node.name)
            if there is None and node.decorator_list:
                continue
            if not isinstance(there, type(node)):
                yield f"there is no {'class' if isinstance(node, ast.ClassDef) else 'function'} {name}"
            elif isinstance(node, ast.ClassDef):
                yield from _compared(node.body, there, f"{name}.", vllms)
            elif isinstance(there, ast.FunctionDef):
                yield from _of_function(node, there, name, vllms)


def _of_function(node: ast.FunctionDef, there: ast.FunctionDef, name: str, vllms: set[str]) -> Iterator[str]:
    found, expected = _signature(there), _signature(node)
    if found != expected:
        yield f"{name}({found}), expected {name}({expected})"
    known: set[str] = set()
    for each in node.body:
        call = each.value if isinstance(each, ast.Expr) else None
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "uses":
            known |= {ast.unparse(argument) for argument in call.args}
        elif not isinstance(call, ast.Constant) and all(ast.dump(each) != ast.dump(x) for x in ast.walk(there)):
            yield f"{name} has no statement {ast.unparse(each)!r}"
    unknown = sorted(_used(there, vllms) - known) if known else []
    if unknown:
        yield f"{name} uses {', '.join(unknown)}, which memsaver does not know"


def _after_assertion(tree: ast.Module) -> Iterator[str]:
    """With a shared pool memsaver ends a sleep at its assertion: only lines of the log may follow."""
    worker = _bound(tree).get("Worker")
    sleep = _bound(worker).get("sleep") if worker is not None else None
    body = sleep.body if isinstance(sleep, ast.FunctionDef) else []
    last = max((number for number, each in enumerate(body) if isinstance(each, ast.Assert)), default=len(body))
    for each in body[last + 1 :]:
        if not ast.unparse(each).startswith("logger.info("):
            yield f"Worker.sleep has {ast.unparse(each)!r} after its assertion, expected lines of the log alone"


def _bound(scope: ast.AST) -> dict[str, ast.AST]:
    """The names of a module or class with their nodes. Those of a class include attributes that its methods set."""
    bound: dict[str, ast.AST] = {}
    waiting = list(ast.iter_child_nodes(scope))
    for node in waiting:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            bound[node.name] = node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(each.asname or each.name).partition(".")[0]: node for each in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound[node.id] = node
        else:  # also the parts of try and if
            waiting.extend(ast.iter_child_nodes(node))
    if isinstance(scope, ast.ClassDef):
        attributes = [node for node in ast.walk(scope) if isinstance(node, ast.Attribute)]
        for node in attributes:
            if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                bound.setdefault(node.attr, node)
    return bound


def _names_of_vllm(scope: ast.AST) -> set[str]:
    """The names of a module that are its own, or imported from vLLM: not those of Python and of other libraries."""
    return {name for name, node in _bound(scope).items() if _is_of_vllm(node)}


def _is_of_vllm(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or (node.module or "").partition(".")[0] == "vllm"
    return not isinstance(node, ast.Import)


def _used(function: ast.FunctionDef, vllms: set[str]) -> set[str]:
    """The names of vLLM that a function reads, and those that it imports, and attributes of self."""
    used = set()
    for node in ast.walk(function):
        if isinstance(node, ast.ImportFrom):
            if _is_of_vllm(node):
                used |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Name) and node.id in vllms and isinstance(node.ctx, ast.Load):
            used.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            used.add(f"self.{node.attr}")
    return used - {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}


def _signature(function: ast.FunctionDef) -> str:
    """The parameters without annotations."""
    arguments = ast.parse(ast.unparse(function.args).join(("def f(", "): ..."))).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(arguments.args)
