"""Which sequence holds which block of the paged KV cache, and which full blocks can be shared.

A full block is known by a digest of its tokens and of all before them, so equal digests mean equal contents. A block
without a holder keeps its contents, and can be found again, until it is allocated again (least recently freed first).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict

from .sequence import Sequence


class BlockManager:
    """Hands out blocks 1 to num_blocks - 1, of K and V of `block_size` tokens each. Padding writes into block 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_usable, self.block_size = num_blocks - 1, block_size
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # next to hand out first
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds; some may still be found through the prefix cache."""
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks whose contents the sequence can share, from its start. Its last token has to be computed."""
        found: list[int] = []
        for digest in self._digests(sequence, len(sequence.tokens) - 1):
            if digest not in self._block_of:
                break
            found.append(self._block_of[digest])
        return found

    def allocate(self, sequence: Sequence, reserve: int = 0) -> bool:
        """Give a sequence the blocks for all its tokens, shared ones first; False if not `reserve` would stay free."""
        cached = self.cached_blocks(sequence)
        lacking = self.blocks_for(len(sequence.tokens)) - len(cached)
        idle = sum(1 for block in cached if self._references[block] == 0)
        if lacking + idle + reserve > self.num_free:
            return False
        for block in cached:
            self._references[block] += 1
            self._free.pop(block, None)
        sequence.num_published = len(cached)
        sequence.num_computed = len(cached) * self.block_size
        sequence.blocks = cached + [self._take() for _ in range(lacking)]
        return True

    def append(self, sequences: list[Sequence]) -> bool:
        """Make room for K and V of the last token of each; False, and for none, if there are too few free blocks."""
        lacking = [sequence for sequence in sequences if sequence.length > len(sequence.blocks) * self.block_size]
        if len(lacking) > self.num_free:
            return False
        for sequence in lacking:
            sequence.blocks.append(self._take())
        return True

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Let others share the sequence's full blocks among its first `num_tokens` tokens.

        Call it once their K and V are written, or will be by the very step that others first read them in.
        """
        begin, end = sequence.num_published, num_tokens // self.block_size
        if end <= begin:
            return
        for block, digest in zip(sequence.blocks[begin:end], self._digests(sequence, num_tokens)[begin:]):
            if digest not in self._block_of:
                self._block_of[digest] = block
                self._digest_of[block] = digest
        sequence.num_published = end

    def free(self, sequence: Sequence) -> None:
        """Take the sequence's blocks back; the end of its chain is handed out before the start."""
        for block in reversed(sequence.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._digest_of:
                    self._free.move_to_end(block, last=False)
        sequence.blocks, sequence.num_published, sequence.num_computed = [], 0, 0

    def drop_prefix_cache(self) -> None:
        """Forget all contents. No sequence may hold blocks: it would continue from lost contents."""
        held = self.num_usable - self.num_free
        if held:
            raise RuntimeError(f"{held} blocks of the KV cache are held by running requests; drain them first")
        self._block_of.clear()
        self._digest_of.clear()

    def _digests(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Of the full blocks among the first tokens. Made once: a request that waits asks in every step."""
        size, made = self.block_size, sequence.digests
        for index in range(len(made), num_tokens // size):
            tokens = array("q", sequence.tokens[index * size : (index + 1) * size])
            parent = made[-1] if made else b""
            made.append(hashlib.blake2b(tokens.tobytes(), key=parent, digest_size=16).digest())
        return made[: max(0, num_tokens) // size]

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        self._references[block] = 1
        return block
