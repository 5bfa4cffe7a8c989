"""The engine's sizes and switches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """Sizes in sequences, blocks and tokens. Raises ValueError for what cannot be."""

    max_batch_size: int = 32  # sequences that run together
    block_size: int = 16  # tokens in a KV block
    num_blocks: int = 256  # KV blocks, one of which is padding's scratch
    max_model_len: int | None = None  # tokens, prompt and completion together; None: the model's max_position
    max_prefill_tokens: int = 8192  # in one step; a longer prompt is a step of its own
    graph_batch_sizes: tuple[int, ...] | None = None  # None: powers of two up to max_batch_size, and that itself
    use_graphs: bool = True
    seed: int = 0
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "block_size", "num_blocks", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected a positive integer")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len!r}; expected 2 tokens or more, or None")
        for size in self.graph_batch_sizes or ():
            if not 1 <= size <= self.max_batch_size:
                raise ValueError(f"graph batch size {size!r} is out of range; expected 1 to {self.max_batch_size}")

    def batch_sizes(self) -> tuple[int, ...]:
        """The sizes that decode steps are padded to, ascending."""
        if self.graph_batch_sizes is not None:
            return tuple(sorted(set(self.graph_batch_sizes)))
        powers = {1 << exponent for exponent in range(self.max_batch_size.bit_length())}
        return tuple(sorted(powers | {self.max_batch_size}))
