"""Stand-ins for packages that AReaL's test of offload only imports.

A finder at the end of sys.meta_path makes them, so an installed package is used instead of its stand-in. A name of a
stand-in is a class: code can subclass it, subscript it, use it in an annotation. To call it is an error that names the
package, but for the calls in CALLED, which AReaL makes while its modules are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

PACKAGES = (
    "aiofiles",
    "flash_attn",
    "flask",
    "hydra",
    "mbridge",
    "megatron",
    "omegaconf",
    "openai",
    "orjson",
    "pydantic",
    "ray",
    "torchdata",
)


def _decorator(function: Any) -> Any:
    return function


def _nothing(*arguments: Any, **options: Any) -> None:
    return None


def _decorators(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return _decorator


CALLED: dict[str, Callable[..., Any]] = {
    "mbridge.core.register_model": _decorators,
    "megatron.core.tensor_parallel.layers.custom_bwd": _decorator,
    "megatron.core.tensor_parallel.layers.custom_fwd": _decorator,
    "pydantic.Field": _nothing,
    "ray.remote": _decorator,
}


class _Name(type):
    """The class of all names of stand-ins."""

    def __call__(cls, *arguments: Any, **options: Any) -> NoReturn:
        raise RuntimeError(f"{cls.__module__}.{cls.__qualname__} is a stand-in: only imports of it were expected")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _name(cls.__module__, f"{cls.__qualname__}.{name}")

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _name(module: str, qualname: str) -> Any:
    if f"{module}.{qualname}" in CALLED:
        return CALLED[f"{module}.{qualname}"]
    return _Name(qualname.rpartition(".")[2], (), {"__module__": module, "__qualname__": qualname})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _name(self.__name__, name)
        setattr(self, name, value)
        return value


class _FlashAttention(importlib.metadata.Distribution):
    """The metadata by which transformers finds flash-attn. The test loads a model and never runs it."""

    FILES: ClassVar = {
        "METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n",
        "top_level.txt": "flash_attn\n",
    }

    def read_text(self, filename: str) -> str | None:
        return self.FILES.get(filename)

    def locate_file(self, path: str | os.PathLike[str]) -> Any:
        raise FileNotFoundError(path)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes a module for each of PACKAGES and for each module in them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is not None and not isinstance(parent, _Module):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name in (None, "flash-attn", "flash_attn"):
            yield _FlashAttention()

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def install() -> None:
    """Installs the finder. A second call changes nothing."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
