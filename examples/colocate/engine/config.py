"""The engine's sizes and switches."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_PREFILL_SIZES = (512, 1024, 2048, 4096)
_MOST_COMPILED = 8  # how many variants of one function torch.compile makes before it gives up


@dataclass(frozen=True)
class EngineConfig:
    """Sizes in sequences, blocks and tokens. Raises ValueError or TypeError for an invalid one."""

    max_batch_size: int = 32  # sequences that run together
    block_size: int = 16  # tokens in a KV block
    num_blocks: int = 256  # KV blocks, one of which is padding's scratch
    max_model_len: int | None = None  # tokens, prompt and completion together; None: the model's max_position
    max_prefill_tokens: int = 8192  # in one step, or as the largest prefill size has; longer prompts take several
    use_graphs: bool = True
    graph_batch_sizes: tuple[int, ...] | None = None  # None: 1 to 32, then every 32, and max_batch_size
    prefill_graph_sizes: tuple[int, ...] | None = None  # tokens; None: 512 to 4096, as far as there is room for them
    compile_batch_sizes: tuple[int, ...] = ()  # decode steps of these go through torch.compile
    compile_backend: str = "inductor"
    use_kernel: bool = True  # paged attention in Triton on CUDA; False: in torch, over copies of the contexts
    freeze_gc: bool = True  # no garbage collection during captures
    use_regions: bool = True  # False: torch's own memory, which cannot be paused
    seed: int = 0  # of sampling, 64 bits; of random weights, modulo 2**32
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "block_size", "max_prefill_tokens"):
            check_count(name, getattr(self, name))
        check_count("num_blocks", self.num_blocks, least=2)
        check_count("seed", self.seed, least=-(1 << 63), most=(1 << 63) - 1)
        if self.max_model_len is not None:
            check_count("max_model_len", self.max_model_len, least=2)
        for name in ("use_graphs", "use_kernel", "freeze_gc", "use_regions", "prefix_cache"):
            check_type(name, getattr(self, name), bool)
        check_type("compile_backend", self.compile_backend, str)
        if self.graph_batch_sizes is not None:
            _check_sizes("graph_batch_sizes", self.graph_batch_sizes, self.max_batch_size)
        if self.prefill_graph_sizes is not None:
            _check_sizes("prefill_graph_sizes", self.prefill_graph_sizes, self.max_prefill_tokens)
        _check_sizes("compile_batch_sizes", self.compile_batch_sizes, self.max_batch_size)
        if len(self.compile_batch_sizes) > _MOST_COMPILED:
            raise ValueError(
                f"compile_batch_sizes has {len(self.compile_batch_sizes)} sizes; expected at most {_MOST_COMPILED}"
            )
        for size in self.compile_batch_sizes:
            if size not in self.batch_sizes():
                raise ValueError(f"compile batch size {size!r} is not among {self.batch_sizes()}; expected one of them")

    def prefill_sizes(self, on_cuda: bool) -> tuple[int, ...]:
        """The token counts that prefill steps are padded to, ascending; none without graphs."""
        if not self.use_graphs:
            return ()
        if self.prefill_graph_sizes is not None:
            return tuple(sorted(set(self.prefill_graph_sizes)))
        most = min(self.max_prefill_tokens, self.num_blocks * self.block_size)
        return tuple(size for size in _PREFILL_SIZES if size <= most and on_cuda)

    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes of decode steps that graphs are captured for, ascending. Smaller batches are padded to them."""
        if self.graph_batch_sizes is not None:
            return tuple(sorted(set(self.graph_batch_sizes)))
        limit = self.max_batch_size
        return tuple(sorted({*range(1, min(32, limit) + 1), *range(64, limit + 1, 32), limit}))

    def eager_batch_sizes(self) -> tuple[int, ...]:
        """The sizes that decode steps beyond the largest graph are padded to, ascending."""
        largest, limit = max(self.batch_sizes(), default=0), self.max_batch_size
        beyond = {*range(32, limit, 32), limit}
        return tuple(sorted(size for size in beyond if size > largest))


def padded_to(count: int, sizes: tuple[int, ...]) -> int:
    """The next of the ascending `sizes`, or the count itself where there is none."""
    return next((size for size in sizes if size >= count), count)


def check_count(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError for a value that is not an integer in the range."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value and (most is None or value <= most):
        return
    expected = f"of {least} or more" if most is None else f"from {least} to {most}"
    raise ValueError(f"{name} is {value!r}; expected an integer {expected}")


def check_type(name: str, value: object, kind: type, expected: str | None = None) -> None:
    """Raise TypeError for a value of another type. `expected`: the type in words, for the message."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is {value!r}; expected {expected or kind.__name__}")


def _check_sizes(name: str, sizes: Collection[Any], most: int) -> None:
    check_type(name, sizes, Collection, "a tuple of integers")
    for size in sizes:
        check_count(f"a size in {name}", size, most=most)
