"""torch_memory_saver's API on memsaver: a package ``torch_memory_saver`` in place of the original."""

from __future__ import annotations

import functools
import os
import sys
import weakref
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from memsaver_drop_in import when_imported

from memsaver import _moves
from memsaver.drop_in import DropInError, Hook
from memsaver.drop_in.startup import PACKAGES

PACKAGE: Final = "torch_memory_saver"
# Processes of SGLang receive weights from others, through torch.multiprocessing. SGLang's unpickler refuses classes and
# functions of modules that are not in its list.
SGLANG: Final = "sglang.srt.utils.common"
HANDLES: Final = "memsaver._torch.ipc."  # of the names in a pickled handle
RUNNER: Final = "sglang.srt.model_executor.model_runner"


def version() -> str:
    """Of the API."""
    return "0.0.10"


def check(version: str) -> None:
    """Raises DropInError if the original package has been imported."""
    if PACKAGE in sys.modules:
        raise DropInError(
            f"{PACKAGE} ({getattr(sys.modules[PACKAGE], '__file__', None)}) is imported already: set MEMSAVER_DROP_IN "
            "before Python starts"
        )


def hooks() -> list[Hook]:
    """The next import of the package finds memsaver's."""
    if os.environ.get("TMS_INIT_ENABLE"):
        when_imported("torch", _manage)
    return [(PACKAGE, lambda module: (PACKAGE,), _find), (SGLANG, _allow_handles, None)]


def _find(name: str) -> ModuleSpec | None:
    return PathFinder.find_spec(name, [str(PACKAGES)])


def _manage(torch: ModuleType) -> None:
    from memsaver.drop_in.tms.routing import manage

    manage()


def _allow_handles(module: ModuleType) -> tuple[()]:
    unpickler = getattr(module, "SafeUnpickler", None)
    prefixes = getattr(unpickler, "ALLOWED_MODULE_PREFIXES", None)
    if isinstance(prefixes, set):  # else this version of SGLang has no such list
        prefixes.add(HANDLES)
    return ()


def check_passes(check: Callable[[Callable[[], dict[str, Any]]], None]) -> None:
    """With ``MEMSAVER_STALE``, replaces two methods of SGLang's ``ModelRunner``: ``check(models)`` precedes each pass.

    SGLang first uses the saver when it loads the model. Hooks of torch's modules would not do: SGLang calls their
    ``forward()`` itself, and replays graphs of torch. Raises DropInError if there are no such methods.
    """
    module = sys.modules.get(RUNNER)
    if module is None or _moves.stale() == "off":
        return
    runner: Any = getattr(module, "ModelRunner", None)
    if not (hasattr(runner, "load_model") and hasattr(runner, "forward")):
        raise DropInError(
            f"{RUNNER}.ModelRunner is {runner!r}, expected a class with load_model() and forward(), as in SGLang "
            "0.5.17 and 0.5.23: unset MEMSAVER_STALE"
        )
    runners: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process: draft models have their own

    def models() -> dict[str, Any]:
        found = {}
        for each in runners:
            layer = getattr(each, "draft_model_idx", None)  # None: the only draft model
            draft = "draft." if layer is None else f"draft.{layer}."
            found[draft if each.is_draft_worker else ""] = each.model
        return found

    def noted(original: Callable[..., Any], is_pass: bool) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            runners.add(self)
            if is_pass:
                check(models)
            return original(self, *args, **kwargs)

        return method

    runner.load_model, runner.forward = noted(runner.load_model, False), noted(runner.forward, True)
