"""Changes of other libraries: none by an import or a region, and each of the others in the table.

The tutorial of docs/index.md runs in the same program, whose exit is clean.
"""

from __future__ import annotations

import re
import subprocess

import pytest

import memsaver
from memsaver import _adapter
from tests.support import ROOT, run_python

# The attributes of modules and of their classes, and the contents of tables, by name.
SEEN = """
import multiprocessing, multiprocessing.reduction, sys, threading
import torch, torch.distributed, torch.multiprocessing, torch.cuda.graphs
from multiprocessing.reduction import ForkingPickler

def of(thing):
    return {name: id(value) for name, value in vars(thing).items() if not name.startswith("__warning")}

def seen():
    names = [name for name in sys.modules if name.partition(".")[0] in ("torch", "multiprocessing", "threading")]
    found = {}
    for name in names:
        module = sys.modules[name]
        found[name] = of(module)
        for each in list(vars(module).values()):
            if issubclass(type(each), type) and each.__module__ in names:
                found[f"{each.__module__}.{each.__qualname__}"] = of(each)
    found["reducers"] = {kind: id(reducer) for kind, reducer in ForkingPickler._extra_reducers.items()}
    found["copyreg"] = {kind: id(reducer) for kind, reducer in __import__("copyreg").dispatch_table.items()}
    found["meta path"] = dict(enumerate(map(id, sys.meta_path)))
    found["hooks"] = dict(enumerate(map(id, sys.path_hooks)))
    return found

def differences(before, after):
    return [
        (name, key)
        for name, values in before.items()
        for key in values.keys() | after[name].keys()
        if values.get(key) != after[name].get(key)
    ]
"""
# A first use of torch itself fills its caches, so it comes before. At the exit there are tensors, views of backups, a
# prepared transition, and a thread inside a region.
PROGRAM = """
import contextlib, io
torch.empty(1)
keep = torch.zeros(3)
before = seen()
kept = [thing for module in list(sys.modules.values()) for thing in vars(module).values()]  # no id comes again
with contextlib.redirect_stdout(io.StringIO()):
    exec(TUTORIAL, {})
import memsaver
region = memsaver.region("x", device="cpu", backup="host")
tensor = region.empty(4).fill_(1)
with region:
    other = torch.ones(3)
region.pause(); region.resume()
print(differences(before, seen()), memsaver._adapter.touched())
memsaver.configure(patches="captures,multiprocessing", retain="64MiB")
print(sorted(key for _, key in set(differences(before, seen())) if isinstance(key, str)))
print(sorted(memsaver._adapter.touched()), flush=True)
regions = [memsaver.region(f"r{i}", device="cpu", backup=("none", "host")[i % 2]) for i in range(4)]
tensors = [region.empty((1000, 1000)) for region in regions for _ in range(3)]
memsaver.pause(["r0", "r1", "r3"])
of_active, of_paused = memsaver.cpu_backup(tensors[-1]), memsaver.cpu_backup(tensors[3])
regions[3].resume()
of_active.zero_()
transition = memsaver._core.Transition([], [regions[1]._core], None, 0.0, 0.0)
transition.begin()
regions[2].__enter__()
inside = torch.ones(100)
"""


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/index.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    return run_python(f"{SEEN}\nTUTORIAL = {''.join(blocks)!r}\n{PROGRAM}", MEMSAVER_HOST_DEVICE="")


def test_a_region_changes_nothing_in_other_libraries(done: subprocess.CompletedProcess[str]) -> None:
    nothing, methods, names = done.stdout.splitlines()
    assert nothing == "[] set()"
    assert set(eval(methods)) >= {
        "_new_shared_cuda", "_release_ipc_counter_cuda", "_share_cuda_", "capture_begin", "capture_end",
        "reduce_storage",
    }  # fmt: skip
    assert eval(names) == ["captures", "multiprocessing"]


def test_exit_with_live_tensors_and_paused_regions_is_clean(done: subprocess.CompletedProcess[str]) -> None:
    assert (done.returncode, done.stderr) == (0, "")


def test_each_change_is_noted_and_on_its_page() -> None:
    page = (ROOT / "docs/what-it-touches.md").read_text()
    rows = re.findall(r"^\| ([\w ]+) \| [^|]+ \| ([^|]+) \| [^|]+ \| [^|]+ \|$", page, flags=re.MULTILINE)[1:]
    assert {name: by.replace("`", "") for name, by in rows} == _adapter.TOUCHES
    sources = "".join(path.read_text() for path in (ROOT / "memsaver").rglob("*.py"))
    for each in _adapter.TOUCHES:
        assert f'note("{each}")' in sources or each in memsaver.config.DROP_INS, each
