"""Runs every kind of step once before serving, so that no request waits for a compiler or for a library to load.

A kernel in Triton is compiled for each set of constants and of classes of arguments, a library loads kernels by shape,
and a graph is uploaded when it is first replayed. Steps are padded to few sizes, and no kernel of ours depends on how
long sequences are. So all variants are reached by every size of a decode step, every size of a prefill, with earlier
context and without, and every number of sequences that a prefill samples for.
"""

from __future__ import annotations

from .model_runner import ModelRunner
from .scheduler import Chunk, Step
from .sequence import SamplingParams, Sequence


def warm_up(runner: ModelRunner) -> None:
    """Only padding's block, row and outputs are written, so requests and the prefix cache do not change.

    The largest steps come first, since smaller ones fit into the memory that those free.
    """
    config, longest = runner.config, runner.model.config.max_position - 1
    room = (config.max_batch_size * longest, (config.num_blocks - 1) * config.block_size)
    most = min(runner.max_prefill_tokens, *room)
    # Each size as far as a batch can fill it. Without sizes any count can come: these are powers of two.
    sizes = runner.prefill_graphs.sizes or [1 << bits for bits in range(most.bit_length() + 1)]
    counts = sorted({min(size, most) for size in sizes}, reverse=True)
    prefills = [(count, 0, 1) for count in counts]
    if longest > 1:  # room for a context and a token after it
        prefills += [(count, min(config.block_size + 1, longest - 1), 1) for count in counts]
    for size in reversed(runner.batch_sizes):
        runner.decode([], size, use_graphs=True)
        runner.batch.read_back().wait(0)
        prefills.append((min(size, counts[0]), 0, size))
    for count, context, sequences in prefills:
        readback = runner.launch(_prefill(runner, count, context, sequences), use_graphs=True)
        assert readback is not None
        readback.wait(0)


def _prefill(runner: ModelRunner, count: int, context: int, sequences: int) -> Step:
    """A prefill of `count` tokens, or as many as a batch has room for, by `sequences` or more that all sample.

    Each is `context` tokens into its prompt. All of their blocks are the one of padding, and so is their row.
    """
    room = runner.model.config.max_position - 1 - context
    count = min(count, room * runner.config.max_batch_size)
    sequences = min(count, max(sequences, -(-count // room)))
    chunks = []
    for index in range(sequences):
        end = context + count // sequences + (index < count % sequences)
        sequence = Sequence([0] * end, SamplingParams(0.0), end + 1, row=runner.batch.padding_row, num_computed=end)
        sequence.blocks = [0] * -(-end // runner.config.block_size)
        chunks.append(Chunk(sequence, context, end, samples=True))
    return Step(chunks, prefill=True)
