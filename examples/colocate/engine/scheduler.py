"""Which requests the next step works on: continuous batching, prompts in chunks, preemption by recompute.

Steps are scheduled ahead of their results: when a step is chosen, the tokens that the one before it samples may still
be on the device. Decisions that need only lengths are made at once; those that need the tokens wait for a step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .block_manager import BlockManager
from .sequence import Sequence


class Chunk(NamedTuple):
    """Tokens `start` to `stop` of a sequence, whose K and V a step computes."""

    sequence: Sequence
    start: int
    stop: int
    samples: bool  # it ends with the last token there is, so that the next one is sampled


@dataclass(frozen=True)
class Step:
    """Chunks to run together: of prompts, or one token of each sequence that decodes."""

    chunks: list[Chunk]
    prefill: bool

    @cached_property
    def sampling(self) -> list[Sequence]:
        """The sequences that get a token, in the order of the chunks."""
        return [chunk.sequence for chunk in self.chunks if chunk.samples]


@dataclass
class Counts:
    """Figures of an engine since its start."""

    tokens: int = 0  # sampled
    decode_replays: int = 0  # of graphs
    prefill_replays: int = 0
    prefix_hit_tokens: int = 0  # found in the prefix cache, so not computed
    preemptions: int = 0  # of requests, for lack of KV blocks
    recomputed: int = 0  # requests put back, to compute their contents again: by preemptions, drains and pauses


class Scheduler:
    """Requests wait, run, and leave when finished; one that is put back waits again, first in line.

    One that runs holds blocks. Its prompt comes first, perhaps in chunks; then it decodes.
    """

    def __init__(self, blocks: BlockManager, max_batch_size: int, max_prefill_tokens: int, counts: Counts) -> None:
        self.blocks, self.counts = blocks, counts
        self.max_batch_size, self.max_prefill_tokens = max_batch_size, max_prefill_tokens
        self.waiting: deque[Sequence] = deque()  # each could finish alone in the whole cache
        self.running: list[Sequence] = []  # oldest first
        self._rows = list(range(max_batch_size))  # free ones, see Sequence.row

    @property
    def decoding(self) -> list[Sequence]:
        """The requests whose prompts are computed."""
        return [sequence for sequence in self.running if sequence.is_prefilled]

    def schedule(self) -> Step:
        """The next step, taken as launched: prompts first, since each decode step reads all weights.

        A step without chunks has no work before the results in flight are read back.
        """
        prompts = self._prefill()
        chunks = prompts or self._decode()
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.stop
            chunk.sequence.in_flight += chunk.samples
        return Step(chunks, prefill=bool(prompts))

    def update(self, step: Step, tokens: list[int], logprobs: list[float]) -> list[Sequence]:
        """Take a step's outcome, one sampled token for each of its `sampling`. Returns those that got theirs."""
        advanced: list[Sequence] = []
        for sequence, token, logprob in zip(step.sampling, tokens, logprobs, strict=True):
            sequence.in_flight -= 1
            if sequence.finish_reason is not None:
                continue  # known only now: this step was launched in vain
            sequence.append(token, logprob)
            advanced.append(sequence)
            if sequence.finish_reason is not None:
                self.running.remove(sequence)
                self._release(sequence)
            else:
                self.blocks.publish(sequence, min(sequence.num_computed, len(sequence.tokens)))
        self.counts.tokens += len(advanced)
        return advanced

    def put_back_all(self) -> None:
        """Take all blocks back; requests wait again in their order. Nothing may be in flight."""
        while self.running:
            self._put_back_youngest()

    def _prefill(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        budget = self.max_prefill_tokens
        for sequence in self.running:
            if not sequence.is_prefilled:
                budget -= self._next_chunk(sequence, budget, chunks)
        while budget and self.waiting and len(self.running) < self.max_batch_size:
            sequence = self.waiting[0]
            # A block stays free for each that runs: a new request must not take the block that they need next.
            if not self.blocks.allocate(sequence, reserve=len(self.running)):
                break
            self.counts.prefix_hit_tokens += sequence.num_computed
            sequence.row = self._rows.pop()
            self.running.append(self.waiting.popleft())
            budget -= self._next_chunk(sequence, budget, chunks)
        return chunks

    def _next_chunk(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        """Its tokens. None if the budget is used up."""
        start, length = sequence.num_computed, len(sequence.tokens)
        stop = min(length, start + budget)
        if stop == start:
            return 0
        chunks.append(Chunk(sequence, start, stop, samples=stop == length))
        # Published before they are computed: a step writes them before any of its sequences reads them.
        self.blocks.publish(sequence, stop)
        sequence.is_prefilled = stop == length
        return stop - start

    def _decode(self) -> list[Chunk]:
        decoding = [sequence for sequence in self.decoding if sequence.length < sequence.max_tokens]
        while not self.blocks.append(decoding):
            if any(sequence.in_flight for sequence in self.running):
                return []  # recomputing needs the tokens, and one of them may end its sequence
            # The youngest gives way, which may be this very one; the oldest always gets on.
            victim = self._put_back_youngest()
            self.counts.preemptions += 1
            decoding = [sequence for sequence in decoding if sequence is not victim]
        # The GPU starts the work of a batch in its order: the longest contexts first, lest one of them ends alone.
        decoding.sort(key=lambda sequence: sequence.length, reverse=True)
        return [Chunk(sequence, sequence.length - 1, sequence.length, samples=True) for sequence in decoding]

    def _put_back_youngest(self) -> Sequence:
        victim = self.running.pop()
        self._release(victim)
        self.waiting.appendleft(victim)
        self.counts.recomputed += 1
        return victim

    def _release(self, sequence: Sequence) -> None:
        # A step in flight may still write there. The next owner of the blocks writes in a later step, hence after it.
        self.blocks.free(sequence)
        self._rows.append(sequence.row)
