"""Which requests the next step works on: continuous batching with preemption by recompute."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from .block_manager import BlockManager
from .sequence import Sequence


@dataclass(frozen=True)
class Step:
    """Sequences to run together: a prefill of all tokens not computed yet, or one token of each."""

    sequences: list[Sequence]
    prefill: bool


class Scheduler:
    """Requests wait, run, and leave when finished; one that is preempted waits again, first in line."""

    def __init__(self, blocks: BlockManager, max_batch_size: int, max_prefill_tokens: int) -> None:
        self.blocks, self.max_batch_size, self.max_prefill_tokens = blocks, max_batch_size, max_prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a request. One that could not finish alone in the whole cache is a ValueError."""
        # K and V of the very last token are never written.
        needed = self.blocks.blocks_for(sequence.max_tokens - 1)
        if needed > self.blocks.num_usable:
            raise ValueError(
                f"a request of up to {sequence.max_tokens} tokens needs {needed} KV blocks; "
                f"expected at most the cache's {self.blocks.num_usable}"
            )
        self.waiting.append(sequence)

    def schedule(self, admit: bool = True) -> Step:
        """The next step: new requests before running ones. Without `admit` the waiting ones stay where they are."""
        admitted = self._admit() if admit else []
        if admitted:
            return Step(admitted, prefill=True)
        self._make_room()
        return Step(list(self.running), prefill=False)

    def update(self, sequences: list[Sequence], tokens: list[int], logprobs: list[float]) -> None:
        """Take a step's outcome: one sampled token for each of its sequences."""
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.num_computed = len(sequence.tokens)
            self.blocks.publish(sequence, sequence.num_computed)
            sequence.append(token, logprob)
            if sequence.finish_reason is not None:
                self.running.remove(sequence)
                self.blocks.free(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Forget a request, between two steps; nothing happens if it is not here, or no longer."""
        if sequence in self.running:
            self.running.remove(sequence)
            self.blocks.free(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def abort(self) -> None:
        """Forget every request and what was cached, after a step that failed half-way."""
        for sequence in self.running:
            self.blocks.free(sequence)
        self.running.clear()
        self.waiting.clear()
        self.blocks.drop_prefix_cache()

    def _admit(self) -> list[Sequence]:
        admitted: list[Sequence] = []
        budget = self.max_prefill_tokens
        while self.waiting and len(self.running) < self.max_batch_size:
            sequence = self.waiting[0]
            cached = self.blocks.cached_blocks(sequence.tokens)
            cost = len(sequence.tokens) - len(cached) * self.blocks.block_size
            if (admitted and cost > budget) or not self.blocks.can_allocate(sequence):
                break
            self.blocks.allocate(sequence)
            # Published before they are computed: this step writes them before any of its sequences reads them.
            self.blocks.publish(sequence, len(sequence.tokens))
            budget -= cost
            admitted.append(sequence)
            self.running.append(self.waiting.popleft())
        return admitted

    def _make_room(self) -> None:
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if self.blocks.can_append(sequence):
                self.blocks.append(sequence)
                index += 1
            else:
                # The youngest gives way, which may be this very one; the oldest always gets on.
                victim = self.running.pop()
                self.blocks.free(victim)
                self.waiting.appendleft(victim)
                self.preemptions += 1
