"""The engine's sizes."""

from __future__ import annotations

from dataclasses import dataclass

_PREFILL_SIZES = (512, 1024, 1536, 2048)  # more tokens at once are not faster on an H200, at 0.6B nor at 8B parameters


@dataclass(frozen=True)
class EngineConfig:
    """Sizes in sequences, blocks and tokens. Raises ValueError for an invalid one."""

    max_batch_size: int = 32  # sequences that run together
    block_size: int = 16  # tokens in a KV block
    num_blocks: int = 256  # KV blocks, one of which is padding's scratch
    max_model_len: int | None = None  # tokens, prompt and completion together; None: the model's max_position
    max_prefill_tokens: int = 8192  # in one step, or as the largest prefill size has; longer prompts take several
    graph_batch_sizes: tuple[int, ...] | None = None  # of decode; None: 1 to 32, then every 32, and max_batch_size
    prefill_graph_sizes: tuple[int, ...] | None = None  # tokens; None: on CUDA 512 to 2048, as far as there is room
    compile_batch_sizes: tuple[int, ...] = ()  # decode steps of these go through torch.compile
    seed: int = 0  # of sampling, 64 bits; of random weights, modulo 2**32
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "block_size", "max_prefill_tokens"):
            check_integer(name, getattr(self, name))
        check_integer("num_blocks", self.num_blocks, least=2)
        check_integer("seed", self.seed, least=-(1 << 63), most=(1 << 63) - 1)
        if self.max_model_len is not None:
            check_integer("max_model_len", self.max_model_len, least=2)
        for size in self.graph_batch_sizes or ():
            check_integer("a size in graph_batch_sizes", size, most=self.max_batch_size)
        for size in self.prefill_graph_sizes or ():
            check_integer("a size in prefill_graph_sizes", size, most=self.max_prefill_tokens)
        if not set(self.compile_batch_sizes) <= set(self.batch_sizes()):
            raise ValueError(
                f"compile_batch_sizes are {self.compile_batch_sizes}; expected some of {self.batch_sizes()}"
            )

    def prefill_sizes(self, on_cuda: bool) -> tuple[int, ...]:
        """The token counts that prefill steps are padded to, ascending."""
        if self.prefill_graph_sizes is not None:
            return tuple(sorted(set(self.prefill_graph_sizes)))
        most = min(self.max_prefill_tokens, self.num_blocks * self.block_size)
        return tuple(size for size in _PREFILL_SIZES if size <= most and on_cuda)

    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes of decode steps that graphs are captured for, ascending. Smaller batches are padded to them."""
        limit, chosen = self.max_batch_size, self.graph_batch_sizes
        if chosen is None:
            chosen = (*range(1, min(32, limit) + 1), *range(64, limit + 1, 32), limit)
        return tuple(sorted(set(chosen)))

    def padded_batch_sizes(self) -> tuple[int, ...]:
        """The sizes that decode steps are padded to, ascending: those of graphs, and the largest batch."""
        return tuple(sorted({*self.batch_sizes(), self.max_batch_size}))


def padded_to(count: int, sizes: tuple[int, ...]) -> int:
    """The next of the ascending `sizes`, or the count itself where there is none."""
    return next((size for size in sizes if size >= count), count)


def check_integer(name: str, value: object, least: int = 1, most: int | None = None) -> None:
    """Raise ValueError for a value that is not an integer in the range."""
    if not isinstance(value, int) or value < least or (most is not None and value > most):
        expected = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} is {value!r}; expected an integer {expected}")
