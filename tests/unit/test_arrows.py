"""The layers of csrc/ and of the examples, and the modules that `import memsaver` loads.

The layers of the Python package are in pyproject.toml; `make lint` checks them. docs/source-tree.md has the same order.
"""

from __future__ import annotations

import graphlib
import re
import tomllib
from pathlib import Path

import pytest

from tests.support import ROOT, run_clean

# C++: a file includes headers of its own folder and of the folders before it. Within a folder there are no circles.
FOLDERS = ["base", "driver", "host", "memory", "backup", "pool", "regions", "transitions", "torch", "bindings"]
APART = "preload"  # a library of its own: it includes its own headers alone, and no other file includes them
# Headers that only these files include.
PRIVATE = {
    "contexts": {"driver"}, "physical": {"broker_bindings", "pool_bindings"},
    "calls": {"core", "broker_bindings"}, "addresses": {"calls"}, "ledger": {"addresses", "calls"}, "stream": {"calls"},
    "disk_backup": {"transfer", "device"},
    "host_memory": {"pinned_memory", "process_bindings"},
    "link": {"pool_request", "shared_pool", "shared_pool_thread", "pool_bindings"}, "pool_request": {"shared_pool"},
}  # fmt: skip
# The files that may make a system call: device memory only in the drivers, host memory in backups and the ledger.
SYSTEM = {
    r"\bcu(?:Mem|Ctx|Device|Stream|Event|Init)\w*": {"calls", "contexts", "cuda_api", "driver", "physical"}
    | {"default_pools"},
    r"\bnvml[A-Z]\w*": {"cuda_api"},
    r"\bdlopen\b": {"cuda_api", "preload", "default_pools"},
    r"\bmemfd_create\b": {"addresses", "common_memory"},
    r"\bMAP_FIXED\b": {"pinned_memory", "addresses"},
    r"\bmmap\(": {"pinned_memory", "addresses", "ledger", "common_memory"},
    r"\bp(?:read|write)\b": {"files"},
    r"\bstd::thread\b": {"pinned_memory", "threads", "stream", "disk_backup", "resting"} | {"transition"},
    r"#include <nanobind|#include <Python\.h>": {path.stem for path in (ROOT / "csrc" / "bindings").iterdir()},
    r"\b(?:gil_scoped_\w+|PyGILState_Ensure|PyEval_RestoreThread|PyErr_CheckSignals|PyObject_Call\w*)": {"gil"},
    # These have no caller that takes an error.
    r"\bfprintf\(": {"preload", "tagged_hooks"},
    r"\bstd::c(?:out|err)\b|\bprintf\(|\b_?exit\(|\bstd::abort\b|\bassert\(": set(),
}

# The examples: the engine and the trainer do not import each other, only the modules above import both.
COLOCATE = {"engine": {"engine", "model"}, "trainer": {"trainer", "model", "grpo"}, "model": {"model"}}


def code_of(path: Path) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)


def sources() -> list[Path]:
    return sorted(ROOT.glob("csrc/*/*"))


def includes(path: Path) -> list[Path]:
    """The headers of the project that a source includes, by their paths below csrc/."""
    return [Path(header) for header in re.findall(r'#include "([^"]+)"', code_of(path))]


def rows_of_the_source_tree(folder: str) -> list[list[str]]:
    """The parts of a folder that each row of docs/source-tree.md names in its first column."""
    text = (ROOT / "docs/source-tree.md").read_text()
    rows = re.findall(rf"^\| (`{folder}/[^|]*) \|", text, flags=re.MULTILINE)
    return [[part.removesuffix(".py") for part in re.findall(rf"`{folder}/([\w.]+)`", row)] for row in rows]


def test_the_source_tree_has_the_folders_and_the_layers_in_their_order() -> None:
    assert {path.name for path in (ROOT / "csrc").iterdir()} == {*FOLDERS, APART}
    assert rows_of_the_source_tree("csrc") == [[folder] for folder in (*FOLDERS, APART)]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [re.split(r" [|:] ", layer) for layer in reversed(contracts[0]["layers"])]
    height = {module: index for index, layer in enumerate(layers) for module in layer if module != "__main__"}
    named = [part for row in rows_of_the_source_tree("memsaver") for part in row]
    assert sorted(named) == sorted(height)
    assert [height[part] for part in named] == sorted(height.values())


def test_a_source_includes_only_lower_layers() -> None:
    for path in sources():
        for header in includes(path):
            if path.parent.name == APART:
                assert header.parent == Path(APART), path
                continue
            assert FOLDERS.index(str(header.parent)) <= FOLDERS.index(path.parent.name), (path, header)
            assert header.stem == path.stem or path.stem in PRIVATE.get(header.stem, {path.stem}), (path, header)


def test_no_headers_include_each_other_in_a_circle() -> None:
    included = {path.relative_to(ROOT / "csrc"): includes(path) for path in sources() if path.suffix == ".h"}
    order = graphlib.TopologicalSorter(included)
    order.prepare()  # raises CycleError, which names the circle


def test_a_source_makes_only_the_system_calls_of_its_folder() -> None:
    for path in sources():
        # Names in messages are no calls.
        code = re.sub(r'(?<!#include )"(?:[^"\\]|\\.)*"', '""', code_of(path))
        for pattern, allowed in SYSTEM.items():
            found = re.search(pattern, code)
            assert found is None or path.stem in allowed, (path, found)


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/colocate/**/*.py")), ids=lambda path: path.stem)
def test_engine_and_trainer_do_not_import_each_other(path: Path) -> None:
    parts = path.relative_to(ROOT / "examples/colocate").parts
    part, up, text = parts[0].removesuffix(".py"), r"\." * len(parts), path.read_text()
    named = re.findall(rf"^ *(?:from|import) (?:{up}|examples\.colocate\.)(\w+)", text, flags=re.MULTILINE)
    whole = re.search(rf"^ *(?:from {up} import|(?:from|import) examples(?:\.colocate)? )", text, flags=re.MULTILINE)
    if part in COLOCATE:
        assert {*named} <= COLOCATE[part] and whole is None, path
    if part != "trainer":  # its other modules import FSDP2 into processes that have no trainer
        assert set(re.findall(rf"^from {up}trainer(\S*)", text, flags=re.MULTILINE)) <= {".interface"}, path


def test_importing_memsaver_loads_neither_torch_nor_ray() -> None:
    """And at most 120 modules, of the broker those of its clients alone. Its use loads none of them either."""
    out = run_clean("""
        import sys
        before = set(sys.modules)
        import memsaver
        loaded = set(sys.modules) - before
        assert len(loaded) <= 120
        print(*sorted(name for name in loaded if name.startswith(("memsaver.broker", "memsaver.cli"))))
        region = memsaver.region("a", device="cpu")
        held = region._core.allocate_array(100)
        region.pause(); region.resume(); memsaver.trim()
        print([row.kind for row in memsaver.stats().devices["cpu"].ledger.rows], memsaver.guests.__all__ != [])
        memsaver.define_phase("p", resident=["a"])
        with memsaver.phase("p"): pass
        print(sorted({"torch", "ray", "numpy"} & set(sys.modules)))
    """)
    broker, rows, libraries = out.splitlines()
    assert broker.split() == ["memsaver.broker", "memsaver.broker.pool_client", "memsaver.broker.queries"]
    assert (rows, libraries) == ("['region'] True", "[]")
