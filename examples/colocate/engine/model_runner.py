"""The device's side of a step: prefill and decode, by graphs or eagerly, each with the choice of the next tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from . import ops
from .attention import Caches, PagedAttention
from .batches import Batch, Readback
from .decoder import Decoder
from .engine_config import EngineConfig, padded_to
from .engine_memory import EngineMemory, borrowed
from .prefill_graphs import PrefillGraphs
from .scheduler import Counts, Step
from .sequence import Sequence

BACKEND = "inductor"  # of torch.compile


class ModelRunner:
    """Launches steps on the current stream. Graphs and eager steps are padded to the same sizes, and run the same
    kernels.
    """

    def __init__(self, model: Decoder, config: EngineConfig, memory: EngineMemory, counts: Counts) -> None:
        """The KV cache and static tensors are made in the regions."""
        self.model, self.config, self.counts = model, config, counts
        shape = (model.config.num_layers, 2, config.num_blocks, config.block_size, model.num_kv_heads)
        self.kv_cache: Tensor = memory.kv_cache.empty((*shape, model.config.head_dim), model.config.dtype)
        # Taken apart once: to index a tensor costs as much as to launch a kernel. Each with a storage of its own: of
        # several that a kernel writes to in one storage, torch.compile copies all but the first. Such a tensor has its
        # address for good: without graphs the memory may move.
        taken = borrowed if memory.captures_graphs else Tensor.detach
        self.kv_caches: Caches = [(taken(layer[0]), taken(layer[1])) for layer in self.kv_cache]
        max_blocks = -(-model.config.max_position // config.block_size)
        self.batch = Batch(config.max_batch_size, max_blocks, config.block_size, config.seed, memory.buffers)
        prefill_sizes = config.prefill_sizes(self.kv_cache.is_cuda)
        self.prefill_graphs = PrefillGraphs(model, prefill_sizes, memory.buffers)
        self.max_prefill_tokens = prefill_sizes[-1] if prefill_sizes else config.max_prefill_tokens
        self.decode_graphs: dict[int, Any] = {}
        self.batch_sizes = config.batch_sizes()

    def launch(self, step: Step, use_graphs: bool) -> Readback | None:
        """Queue a step. Returns its samples, on their way to the host; None if no token comes of it."""
        if step.prefill:
            self.prefill(step, use_graphs)
        elif step.chunks:
            self.decode(step.sampling, padded_to(len(step.sampling), self.batch_sizes), use_graphs)
        return self.batch.read_back() if step.sampling else None

    def prefill(self, step: Step, use_graphs: bool) -> None:
        """K and V of the chunks' tokens, and a token for each sequence that samples."""
        num_tokens = padded_to(sum(chunk.stop - chunk.start for chunk in step.chunks), self.prefill_graphs.sizes)
        num_samples = padded_to(len(step.sampling), self.batch_sizes) if step.sampling else 0
        use_graphs = use_graphs and num_tokens in self.prefill_graphs.pieces
        self.counts.prefill_replays += use_graphs
        hidden_TC, last_B = self.hidden(step, num_tokens, num_samples, use_graphs)
        if num_samples:
            # The row after the samples may be of a chunk that does not end its prompt. It is sampled as padding is: its
            # sequence gets its token with its last chunk.
            self._sample(self.model.logits(hidden_TC.index_select(0, last_B)))

    def hidden(self, step: Step, num_tokens: int, num_samples: int, use_graphs: bool) -> tuple[Tensor, Tensor]:
        """Hidden states of the tokens of a prefill, padded to so many, and where those are that samples follow from."""
        sequences = [chunk.sequence for chunk in step.chunks]
        size = max(len(sequences), num_samples)
        self.batch.start(sequences)
        self.batch.fill(sequences, size)
        tokens_T, positions_T, slots_T, last_B, chunks = self.batch.lay_out(step.chunks, num_tokens, num_samples)
        inputs = self.batch.columns(size)
        attention = PagedAttention(self.kv_caches, slots_T, inputs.block_table, inputs.lengths_B, chunks)
        return self.prefill_graphs.run(tokens_T, positions_T, attention, use_graphs), last_B

    def decode(self, sequences: list[Sequence], size: int, use_graphs: bool) -> None:
        """One token of each sequence, padded to `size` of them."""
        self.batch.fill(sequences, size)
        if use_graphs and size in self.decode_graphs:
            self.decode_graphs[size].replay()
            self.counts.decode_replays += 1
        else:
            self.decode_step(size)

    def decode_step(self, size: int) -> None:
        """The work of a graph of this size: from the static inputs to the static outputs of `batch`."""
        compiled = size in self.config.compile_batch_sizes
        self._sample(self._compiled_logits(self, size) if compiled else self.decode_logits(size))

    def decode_logits(self, size: int) -> Tensor:
        """The part of `decode_step` that may go through torch.compile: logits [size, V]."""
        inputs = self.batch.columns(size)
        attention = PagedAttention(self.kv_caches, inputs.slots_B, inputs.block_table, inputs.lengths_B)
        tokens_B = self.batch.latest.index_select(0, inputs.rows_B)
        return self.model.logits(self.model.forward(tokens_B, inputs.positions_B, attention))

    @cached_property
    def _compiled_logits(self) -> Callable[[ModelRunner, int], Tensor]:
        """`decode_logits`, compiled anew for each size when it is first called with it. Torch takes up to 8."""
        return torch.compile(ModelRunner.decode_logits, backend=BACKEND, fullgraph=True, dynamic=False)

    def capture(self, memory: EngineMemory) -> None:
        """Capture graphs of prefill and decode, the largest temporaries first."""
        self.batch.fill([], self.config.max_batch_size)
        with memory.capturing():
            self.prefill_graphs.capture(memory)
            steps = {size: partial(self.decode_step, size) for size in reversed(self.batch_sizes)}
            memory.warm_up(list(steps.values()))
            for size, step in steps.items():
                self.decode_graphs[size], _ = memory.capture(step)

    def _sample(self, logits_BV: Tensor) -> None:
        inputs = self.batch.columns(len(logits_BV))
        self.batch.store(inputs.rows_B, *ops.sample(logits_BV, inputs.temperatures_B, self.batch.random_state))
