"""Who may know whom. Each table is the whole truth: a file or a module that it does not name fails the test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# C++: layer of each file's stem. A file includes its own header and headers of layers below its own.
LAYERS = {
    "errors": 0, "ranges": 0, "wire": 0, "physical": 0,
    "driver": 1, "copy_engine": 1, "states": 1, "faults": 2, "cuda_api": 2, "files": 2,
    "host_ledger": 3, "host_memory": 3, "cuda_driver": 4, "cuda_physical": 4, "host_chunk": 4, "host_budget": 4,
    "host_driver": 5, "host_physical": 5,
    "arena": 5, "backup": 5, "chunk": 5, "disk_store": 5, "link": 5,
    "host_backup": 6, "disk_backup": 6, "pool_request": 6,
    "shared_pool": 7,
    "shared_pool_thread": 8, "region": 8,
    "core": 9, "transfer": 9, "residents": 9, "attachment": 9,
    "transition": 10, "torch_hooks": 10,
    "bindings": 11,
    "broker_bindings": 12, "driver_bindings": 12, "error_bindings": 12, "pool_bindings": 12, "process_bindings": 12,
    "region_bindings": 12, "transition_bindings": 12, "module": 12,
}  # fmt: skip
BINDINGS = {stem for stem, layer in LAYERS.items() if layer >= LAYERS["bindings"]}
# What few files alone include.
PRIVATE = {
    "cuda_api": {"cuda_driver", "cuda_physical"}, "host_ledger": {"host_driver", "host_chunk"},
    "host_chunk": {"host_driver", "host_physical"}, "copy_engine": {"host_driver"},
    "host_backup": {"transfer"}, "disk_backup": {"transfer"}, "host_budget": {"arena"},
    "link": {"pool_request", "shared_pool", "shared_pool_thread"}, "pool_request": {"shared_pool"},
    "bindings": BINDINGS,
}  # fmt: skip
# Who calls what of the system: device memory behind the seam alone, and host memory where backups and the ledger live.
SYSTEM = {
    r"\bcu(?:Mem|Ctx|Device|Stream|Event|Init)\w*": {"cuda_api", "cuda_driver", "cuda_physical"},
    r"\bnvml[A-Z]\w*": {"cuda_api"},
    r"\bdlopen\b": {"cuda_api"},
    r"\bmemfd_create\b": {"host_chunk"},
    r"\bMAP_FIXED\b": {"arena", "host_driver"},
    r"\bmmap\(": {"arena", "host_driver", "host_ledger"},
    r"\bp(?:read|write)\b": {"files"},
    r"\bstd::thread\b": {"arena", "copy_engine", "disk_backup", "shared_pool", "shared_pool_thread", "transition"},
    r"#include <nanobind|#include <Python\.h>": BINDINGS,
    r"\bstd::c(?:out|err)\b|\bf?printf\(|\b_?exit\(|\bstd::abort\b|\bassert\(": set(),
}

# Python: what each module imports of memsaver, and of what is neither memsaver nor the standard library.
MODULES: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), {"psutil"}),
    "membership": ({"_core", "errors", "sockets"}, set()),
    "config": ({"_core", "errors", "membership"}, set()),
    "transitions": ({"errors"}, set()),
    "regions": ({"_core", "errors", "membership", "transitions"}, set()),
    "backups": ({"_core", "regions"}, set()),
    "phases": ({"regions", "transitions"}, set()),
    "stats": ({"_core", "config", "errors"}, set()),
    "__init__": ({"_core", "backups", "config", "errors", "phases", "regions", "stats", "transitions"}, set()),
    "torch_pools": ({"_core", "errors", "regions"}, {"torch"}),
    "torch": ({"_core", "errors", "regions", "torch_pools"}, {"torch"}),
    "sharing": ({"_core", "errors", "membership", "regions"}, {"torch"}),
    "graphs": ({"_core", "errors", "regions"}, {"torch"}),
    "colocated": ({"", "_core", "errors", "regions", "transitions"}, set()),
    "members": ({"transitions"}, {"ray"}),
    "placement": ({"_core", "config", "errors", "sockets"}, {"ray"}),
    "ray": ({"colocated", "errors", "members", "placement", "regions", "transitions"}, {"ray"}),
    "protocol": ({"_core"}, set()),
    "records": ({"_core"}, set()),
    "demands": ({"errors", "protocol", "records"}, set()),
    "pool": ({"demands", "errors", "protocol", "records"}, set()),
    "sockets": ({"errors"}, set()),
    "connection": ({"protocol"}, set()),
    "watches": (set(), set()),
    "server": ({"connection", "protocol", "sockets"}, set()),
    "clients": ({"connection", "pool", "protocol", "records"}, set()),
    "lender": ({"clients", "demands", "pool", "protocol", "records"}, set()),
    "leases": ({"clients", "pool", "protocol", "watches"}, set()),
    "reports": ({"clients", "errors", "pool", "protocol"}, set()),
    "broker": (
        {"clients", "connection", "errors", "leases", "lender", "pool", "protocol", "reports", "server", "sockets"}
        | {"watches"},
        set(),
    ),
    "visitor": ({"errors", "protocol", "sockets"}, set()),
    "cli": ({"_core", "broker", "config", "errors", "records", "sockets", "visitor"}, set()),
    "__main__": ({"cli"}, set()),
}

# The examples: the engine and the trainer do not know each other, only what stands above knows both.
COLOCATE = {
    "engine": {"arguments", "engine", "model", "provenance"},
    "trainer": {"trainer", "model", "grpo"},
    "model": {"model"},
}


def code_of(path: Path) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def sources() -> list[Path]:
    return sorted(ROOT.glob("csrc/*"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_a_source_includes_what_is_below_it(path):
    for header in re.findall(r'#include "([^"]+)\.h"', code_of(path)):
        assert header == path.stem or LAYERS[header] < LAYERS[path.stem]
        assert path.stem in PRIVATE.get(header, {path.stem}) or header == path.stem


@pytest.mark.parametrize("path", sources(), ids=lambda path: path.name)
def test_a_source_calls_of_the_system_what_is_its_own(path):
    # Names in messages are no calls.
    code = re.sub(r'(?<!#include )"(?:[^"\\]|\\.)*"', '""', code_of(path))
    for pattern, allowed in SYSTEM.items():
        found = re.search(pattern, code)
        assert found is None or path.stem in allowed, found


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, also within functions, and not for type checkers alone."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            # `from memsaver import regions` names modules, `from memsaver.regions import Region` does not.
            yield from (f"{module}.{alias.name}" for alias in node.names) if is_package(module) else [module]


def is_package(module: str) -> bool:
    return (ROOT / module.replace(".", "/") / "__init__.py").exists()


@pytest.mark.parametrize("path", sorted(ROOT.glob("memsaver/*.py")), ids=lambda path: path.stem)
def test_a_module_imports_what_is_below_it(path):
    ours, others = MODULES[path.stem]
    for name in imports(path):
        top, _, rest = name.partition(".")
        if top == "memsaver":
            assert rest.partition(".")[0] in ours, name
        else:
            assert top in others or top in sys.stdlib_module_names, name


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/colocate/**/*.py")), ids=lambda path: path.stem)
def test_engine_and_trainer_do_not_know_each_other(path):
    part = path.relative_to(ROOT / "examples/colocate").parts[0].removesuffix(".py")
    for name in imports(path):
        if part in COLOCATE and name.startswith("examples."):
            assert name.startswith("examples.colocate."), name
            assert name.split(".")[2] in COLOCATE[part], name


def test_importing_memsaver_loads_neither_torch_nor_ray():
    program = "import sys, memsaver; sys.exit(', '.join({'torch', 'ray', 'numpy'} & set(sys.modules)) or None)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
