"""The parts that use torch: loaded on the first use, and the changes of torch that the program asked for."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from memsaver import _core

if TYPE_CHECKING:
    from memsaver._torch.routing import Router


@dataclass(frozen=True)
class Touch:
    """A change of another library's state. docs/what-it-touches.md shows the table of these.

    ``what``: the names that change. ``switch``: the call, option or command that asks for it. ``check``: the condition
    under which the change is made, or else raises.
    """

    name: str
    what: str
    switch: str
    versions: str
    check: str


TOUCHES: Final = (
    Touch(
        "captures",
        "`torch.cuda.CUDAGraph.capture_begin` and `capture_end`: methods that tell memsaver of each capture, and call"
        " the former ones",
        "`configure(patches=\"captures\")`, `default_pool()`, a drop-in",
        "torch 2.8 and newer", "none: arguments are passed on",
    ),
    Touch(
        "multiprocessing",
        "`torch.UntypedStorage._share_cuda_`, `_new_shared_cuda` and `_release_ipc_counter_cuda`,"
        " `torch.multiprocessing.reductions.reduce_storage`, and the reducer of `UntypedStorage` in"
        " `multiprocessing`'s `ForkingPickler`: storages in regions are sent without a copy, others as before",
        "`configure(patches=\"multiprocessing\")`, a drop-in, the receipt of such a tensor",
        "torch 2.8 and newer", "the reducer is replaced only where it is torch's",
    ),
    Touch(
        "default pool",
        "the table of the driver's functions in torch's `libc10_cuda`, and the setting `expandable_segments` of torch's"
        " allocator",
        "`default_pool()`", "torch 2.10 and newer",
        "each entry of the table has the expected function, else `Error`",
    ),
    Touch(
        "process groups",
        "the tables of process groups in `torch.distributed.distributed_c10d`: objects that open their connections anew"
        " take the places of the groups",
        "`register(memsaver.guests.ProcessGroups())`", "torch 2.8 and newer", "the tables have the group, else `Error`",
    ),
    Touch(
        "vllm",
        "`CuMemAllocator` and functions of its module, and methods of vLLM's worker; a finder in `sys.meta_path` until"
        " their import; the handler of SIGTERM during a wake-up",
        "`MEMSAVER_DROP_IN=vllm`", "vLLM 0.23 to 0.33", "vLLM's sources have the known parts, else `DropInError`",
    ),
    Touch(
        "tms",
        "finders in `sys.meta_path`: `import torch_memory_saver` finds memsaver's package; a prefix in the list of"
        " SGLang's `SafeUnpickler`",
        "`MEMSAVER_DROP_IN=tms`", "torch_memory_saver 0.0.10",
        "the original is not imported yet, else `DropInError`",
    ),
)  # fmt: skip
Ranges = list[tuple[int, int]]  # (offset, bytes) within a region
PATCHES: Final = ("captures", "multiprocessing")

_noted: set[str] = set()


def note(name: str) -> None:
    """Notes that a change of the table was made in this process."""
    _noted.add(next(each.name for each in TOUCHES if each.name == name))


def touched() -> list[Touch]:
    """The changes of other libraries' state that were made in this process."""
    return [each for each in TOUCHES if each.name in _noted]


_adapter: Router | None = None
_loading = threading.Lock()
_wanted: set[str] = set()


def with_torch(module: str) -> Any:
    """A module that needs torch. Raises ModuleNotFoundError with the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        text = "this part of memsaver needs torch; expected it from pip install 'memsaver[torch]'"
        raise ModuleNotFoundError(text, name="torch") from None


def adapter() -> Router:
    """The adapter; loads torch on the first call."""
    global _adapter
    if _adapter is None:
        _core.region_count()  # raises in a forked child: another thread may have had the lock
        with _loading:
            if _adapter is None:
                router = with_torch("memsaver._torch.routing").Router()
                router.patch(_wanted)
                _adapter = router
    return _adapter


def loaded() -> Router | None:
    """The adapter, or None before the first use of torch."""
    return _adapter


def patch(names: Iterable[str]) -> None:
    """Replaces functions of torch, now or when the adapter is loaded. They stay replaced until the process ends."""
    _wanted.update(names)
    with _loading:
        if _adapter is not None:
            _adapter.patch(_wanted)


def wanted() -> set[str]:
    """The changes of torch that the program has asked for: they are made when it uses regions with torch."""
    return set(_wanted)
