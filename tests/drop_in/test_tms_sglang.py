"""SGLang's unpickler takes the handles of tensors in regions, and refuses other names of memsaver."""

from __future__ import annotations

import io
import pickle
import sys
import types
from multiprocessing.reduction import ForkingPickler

import pytest

import memsaver
from memsaver.drop_in import tms
from memsaver.drop_in.tms import sglang

# The unpickler of SGLang 0.5.17, in short.
SOURCE = """
import pickle
class SafeUnpickler(pickle.Unpickler):
    ALLOWED_MODULE_PREFIXES = {"builtins.", "copyreg.", "torch."}
    def find_class(self, module, name):
        if any((module + ".").startswith(prefix) for prefix in self.ALLOWED_MODULE_PREFIXES):
            return super().find_class(module, name)
        raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
"""


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType(sglang.MODULE)
    exec(SOURCE, module.__dict__)
    monkeypatch.setitem(sys.modules, sglang.MODULE, module)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return module


def test_the_unpickler_takes_handles_after_the_drop_in(common: types.ModuleType) -> None:
    memsaver.configure(patches="multiprocessing")
    tensor = memsaver.region("sglang", device="cpu", backup="host").empty((4,)).fill_(2)
    sent = bytes(ForkingPickler.dumps({"weight": tensor}))
    with pytest.raises(RuntimeError, match="Blocked unsafe class loading .memsaver"):
        common.SafeUnpickler(io.BytesIO(sent)).load()
    tms.replace(lambda *_: None)
    assert common.SafeUnpickler(io.BytesIO(sent)).load()["weight"].data_ptr() == tensor.data_ptr()
    with pytest.raises(RuntimeError, match="Blocked unsafe class loading .memsaver.errors"):
        common.SafeUnpickler(io.BytesIO(pickle.dumps(memsaver.Error("text")))).load()


def test_a_version_without_the_list_stays_as_it_is(common: types.ModuleType) -> None:
    del common.SafeUnpickler
    tms.replace(lambda *_: None)
    assert not hasattr(common, "SafeUnpickler")
