"""Changes of other libraries: none by an import or a region, and each of the others in the table."""

from __future__ import annotations

import re

import memsaver
from memsaver import _adapter
from tests.support import ROOT, run_clean

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
# A first use of torch itself fills caches of torch, so it comes before.
USED = """
torch.empty(1)
keep = torch.zeros(3)
"""


def test_a_region_changes_nothing_in_other_libraries() -> None:
    program = f"""
{SEEN}
{USED}
before = seen()
kept = [thing for module in list(sys.modules.values()) for thing in vars(module).values()]  # no id comes again
import memsaver
region = memsaver.region("x", device="cpu", backup="host")
tensor = region.empty(4).fill_(1)
with region:
    other = torch.ones(3)
memsaver.pause(); memsaver.resume()
print(differences(before, seen()), memsaver._adapter.touched())
memsaver.configure(patches="captures,multiprocessing")
print(sorted(key for _, key in set(differences(before, seen())) if isinstance(key, str)))
print(sorted(memsaver._adapter.touched()))
"""
    nothing, methods, names = run_clean(program).splitlines()
    assert nothing == "[] set()"
    assert set(eval(methods)) >= {
        "_new_shared_cuda", "_release_ipc_counter_cuda", "_share_cuda_", "capture_begin", "capture_end",
        "reduce_storage",
    }  # fmt: skip
    assert eval(names) == ["captures", "multiprocessing"]


def test_each_change_is_noted_and_on_its_page() -> None:
    page = (ROOT / "docs/what-it-touches.md").read_text()
    rows = re.findall(r"^\| ([\w ]+) \| [^|]+ \| ([^|]+) \| [^|]+ \| [^|]+ \|$", page, flags=re.MULTILINE)[1:]
    assert {name: by.replace("`", "") for name, by in rows} == _adapter.TOUCHES
    sources = "".join(path.read_text() for path in (ROOT / "memsaver").rglob("*.py"))
    for each in _adapter.TOUCHES:
        assert f'note("{each}")' in sources or each in memsaver.config.DROP_INS, each
