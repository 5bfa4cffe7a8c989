"""The engine's sizes."""

from __future__ import annotations

from dataclasses import dataclass

_PREFILL_SIZES = (512, 1024, 2048, 4096)  # 8,192 are not faster on an H100 at 8B parameters


@dataclass(frozen=True)
class EngineConfig:
    """Sizes in sequences, blocks and tokens."""

    max_batch_size: int = 32  # sequences that run together
    block_size: int = 16  # tokens in a KV block
    num_blocks: int = 256  # KV blocks, one of which is padding's scratch
    max_prefill_tokens: int = 8192  # in one step, or as the largest prefill size has; longer prompts take several
    graph_batch_sizes: tuple[int, ...] | None = None  # of decode, beside max_batch_size; None: 1 to 32, then every 32
    prefill_graph_sizes: tuple[int, ...] | None = None  # tokens; None: on CUDA 512 to 4096, as far as there is room
    compile_batch_sizes: tuple[int, ...] = ()  # decode steps of these go through torch.compile
    seed: int = 0  # of sampling, 64 bits; of random weights, modulo 2**32

    def prefill_sizes(self, on_cuda: bool) -> tuple[int, ...]:
        """The token counts that prefill steps are padded to, ascending."""
        if self.prefill_graph_sizes is not None:
            return tuple(sorted(set(self.prefill_graph_sizes)))
        most = min(self.max_prefill_tokens, self.num_blocks * self.block_size)
        return tuple(size for size in _PREFILL_SIZES if size <= most and on_cuda)

    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes that decode steps are padded to, and graphs are captured for, ascending."""
        limit, chosen = self.max_batch_size, self.graph_batch_sizes
        if chosen is None:
            chosen = (*range(1, min(32, limit) + 1), *range(64, limit + 1, 32))
        return tuple(sorted({*chosen, limit}))


def padded_to(count: int, sizes: tuple[int, ...]) -> int:
    """The next of the ascending `sizes`, or the count itself where there is none."""
    return next((size for size in sizes if size >= count), count)
