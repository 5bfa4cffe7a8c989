"""KV blocks and the queues, without a model."""

from __future__ import annotations

import random

import pytest

from examples.colocate.engine.block_manager import BlockManager
from examples.colocate.engine.scheduler import Counts, Scheduler, Step
from examples.colocate.engine.sequence import SamplingParams, Sequence


def sequence(tokens: list[int], new: int = 8) -> Sequence:
    return Sequence(tokens, SamplingParams(max_new_tokens=new), len(tokens) + new)


def allocated(blocks: BlockManager, tokens: list[int]) -> Sequence:
    made = sequence(tokens)
    assert blocks.allocate(made)
    blocks.publish(made, len(tokens))
    return made


def test_full_blocks_are_shared_and_counted() -> None:
    blocks = BlockManager(num_blocks=16, block_size=4)
    first = allocated(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = allocated(blocks, [1, 2, 3, 4, 5, 6, 7, 8, 0, 0])
    assert second.blocks[:2] == first.blocks[:2] and second.blocks[2] != first.blocks[2]
    assert second.num_computed == 8
    blocks.free(first)
    assert blocks.num_free == 15 - 3
    third = allocated(blocks, [1, 2, 3, 4, 5, 6, 7, 8])
    assert third.num_computed == 4  # the last token is always computed
    fourth = allocated(blocks, [9, 9, 9, 9])
    assert blocks.cached_blocks(sequence([9, 9, 9, 9, 5, 6, 7, 8, 9])) == fourth.blocks  # only after the same prefix
    blocks.free(fourth)
    with pytest.raises(RuntimeError, match="4 blocks"):
        blocks.drop_prefix_cache()
    blocks.free(second)
    blocks.free(third)
    blocks.drop_prefix_cache()
    assert blocks.cached_blocks(sequence([1, 2, 3, 4, 5])) == [] and blocks.num_free == 15


def test_freed_contents_are_found_until_their_block_is_taken() -> None:
    blocks = BlockManager(num_blocks=5, block_size=2)
    old = allocated(blocks, [1, 2, 3, 4, 5])
    shared = old.blocks[:2]
    blocks.free(old)
    again = allocated(blocks, [1, 2, 3, 4, 5])
    assert again.blocks[:2] == shared and again.num_computed == 4
    blocks.free(again)
    allocated(blocks, [7] * 5)  # takes the two empty blocks, then the chain's end
    assert blocks.cached_blocks(sequence([1, 2, 3, 4, 5])) == shared[:1]


def test_sharing_a_free_block_takes_it_from_the_free_ones() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    blocks.free(allocated(blocks, [1, 2, 3, 4, 5, 6]))
    # Two of the three free blocks are this sequence's own prefix, so one is left for the two blocks it lacks.
    assert not blocks.allocate(sequence([1, 2, 3, 4, 0, 0, 0]))
    assert blocks.allocate(sequence([1, 2, 3, 4, 0, 0]))


def run(scheduler: Scheduler, step: Step, token: int = 0) -> None:
    count = len(step.sampling)
    scheduler.update(step, [token] * count, [0.0] * count)


def chunks(step: Step) -> list[tuple[Sequence, int, int]]:
    return [(chunk.sequence, chunk.start, chunk.stop) for chunk in step.chunks]


def queued(scheduler: Scheduler, *requests: Sequence) -> None:
    scheduler.waiting += requests


def test_a_long_prompt_comes_in_chunks_before_the_next_decode_step() -> None:
    scheduler = Scheduler(BlockManager(33, 2), 2, 4, Counts())
    short, long = sequence([1] * 2), sequence([2] * 11)
    queued(scheduler, short)
    run(scheduler, scheduler.schedule())
    queued(scheduler, long)
    seen = []
    while long.num_computed < 11:
        step = scheduler.schedule()
        seen.append((step.prefill, [chunk.stop - chunk.start for chunk in step.chunks], len(step.sampling)))
        # Only blocks that are computed, or will be by the step that reads them, may be found.
        assert len(scheduler.blocks.cached_blocks(sequence([2] * 11))) <= long.num_computed // 2
        run(scheduler, step)
    assert seen == [(True, [4], 0), (True, [4], 0), (True, [3], 1)]
    assert scheduler.running == [short, long]
    step = scheduler.schedule()
    assert not step.prefill and step.sampling == [long, short]  # the longest context first


def test_a_step_is_scheduled_before_the_last_one_is_read_back() -> None:
    scheduler = Scheduler(BlockManager(9, 2), 2, 64, Counts())
    stops = Sequence([1, 1, 1], SamplingParams(max_new_tokens=9, stop_tokens=(5,)), 12)
    ends = sequence([2, 2, 2], new=2)
    queued(scheduler, stops, ends)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert [each.length for each in (stops, ends)] == [5, 5] and stops.tokens == [1, 1, 1]
    assert chunks(second) == [(stops, 3, 4), (ends, 3, 4)]
    run(scheduler, first, 7)
    third = scheduler.schedule()
    assert chunks(third) == [(stops, 4, 5)]  # the other's last token is on its way
    scheduler.update(second, [5, 7], [0.0, 0.0])  # the third step runs in vain
    assert (stops.finish_reason, ends.finish_reason) == ("stop", "length")
    assert scheduler.blocks.num_free == 8 and not scheduler.running
    run(scheduler, third, 9)
    assert stops.tokens == [1, 1, 1, 7, 5] and stops.in_flight == 0
    assert not scheduler.schedule().chunks


def test_the_youngest_request_is_preempted_and_resumed_first() -> None:
    scheduler = Scheduler(BlockManager(6, 2), 4, 64, Counts())
    old, young, later = sequence([1, 1, 1], new=4), sequence([2, 2, 2], new=4), sequence([3], new=2)
    queued(scheduler, old, young, later)
    run(scheduler, scheduler.schedule())
    assert scheduler.running == [old, young]
    step = scheduler.schedule()
    assert not scheduler.schedule().chunks  # both need a third block, and their tokens are not known yet
    assert scheduler.counts.preemptions == 0
    run(scheduler, step)
    step = scheduler.schedule()
    assert step.sampling == [old] and list(scheduler.waiting) == [young, later]
    assert young.tokens == [2, 2, 2, 0, 0] and young.blocks == [] and scheduler.counts.preemptions == 1


def test_an_admitted_request_leaves_a_block_for_each_running_one() -> None:
    scheduler = Scheduler(BlockManager(6, 2), 4, 64, Counts())
    first, second = sequence([1] * 3, new=6), sequence([2] * 6, new=1)
    queued(scheduler, first)
    run(scheduler, scheduler.schedule())
    queued(scheduler, second)
    while first.finish_reason is None:
        assert list(scheduler.waiting) == [second]  # three blocks are free, and the first grows into one of them
        run(scheduler, scheduler.schedule())
    run(scheduler, scheduler.schedule())
    assert second.finish_reason == "length" and scheduler.counts.preemptions == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_requests_end_with_all_blocks_and_rows_free(seed: int) -> None:
    """Few blocks, prompts that begin alike, and results that come a step late."""
    draw = random.Random(seed)
    scheduler = Scheduler(BlockManager(draw.choice([10, 14, 40]), 2), 3, draw.choice([2, 5, 64]), Counts())
    requests = [sequence([draw.randrange(2) for _ in range(draw.randint(1, 9))], new=1 + at % 7) for at in range(40)]
    queued(scheduler, *requests)
    late = Step([], prefill=False)
    while scheduler.waiting or scheduler.running:
        step = scheduler.schedule()
        assert step.chunks or late.chunks
        for request in scheduler.running:
            assert 0 not in request.blocks and len(set(request.blocks)) == len(request.blocks)
            assert len(request.blocks) * 2 >= request.num_computed
        assert len({request.row for request in scheduler.running}) == len(scheduler.running) <= 3
        run(scheduler, late, token=draw.randrange(2))
        late = step
    run(scheduler, late)
    assert scheduler.blocks.num_free == scheduler.blocks.num_usable and sorted(scheduler._rows) == [0, 1, 2]
    assert all(len(request.tokens) == request.max_tokens for request in requests)
