"""KV blocks and the queues, without a model."""

from __future__ import annotations

import pytest

from examples.colocate.engine.block_manager import SCRATCH_BLOCK, BlockManager
from examples.colocate.engine.scheduler import Scheduler, Step
from examples.colocate.engine.sequence import SamplingParams, Sequence


def sequence(tokens: list[int], new: int = 8) -> Sequence:
    return Sequence(tokens, SamplingParams(max_new_tokens=new), len(tokens) + new)


def allocated(blocks: BlockManager, tokens: list[int]) -> Sequence:
    made = sequence(tokens)
    assert blocks.allocate(made)
    blocks.publish(made, len(tokens))
    return made


def test_blocks_are_handed_out_once_and_the_scratch_block_never() -> None:
    blocks = BlockManager(num_blocks=8, block_size=4)
    first, second = allocated(blocks, [1] * 9), allocated(blocks, [2] * 16)
    held = first.blocks + second.blocks
    assert sorted(held) == list(range(1, 8))
    assert SCRATCH_BLOCK not in held
    assert blocks.num_free == 0
    blocks.free(first)
    assert blocks.num_free == 3
    assert first.blocks == [] and first.num_computed == 0


def test_allocation_without_free_blocks_returns_false_and_changes_nothing() -> None:
    blocks = BlockManager(num_blocks=4, block_size=4)
    held = allocated(blocks, [1] * 8)
    big = sequence([2] * 12)
    assert not blocks.allocate(big)
    small = sequence([2] * 4)
    assert not blocks.allocate(small, reserve=1) and small.blocks == []
    assert big.blocks == [] and blocks.num_free == 1
    held.in_flight = 1
    assert blocks.append([held]) and len(held.blocks) == 3 and blocks.num_free == 0
    assert blocks.append([held])  # there is room already
    held.tokens += [1] * 4
    before = list(held.blocks)
    assert not blocks.append([held]) and held.blocks == before
    blocks.free(held)
    others = [allocated(blocks, [token] * 4) for token in (2, 3)]
    for other in others:
        other.in_flight = 1
    assert not blocks.append(others)  # one block for the two of them
    assert [len(other.blocks) for other in others] == [1, 1] and blocks.num_free == 1


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
    blocks.free(second)
    blocks.free(third)
    assert blocks.num_free == 15


def test_a_cached_block_matches_only_after_the_same_prefix() -> None:
    blocks = BlockManager(num_blocks=16, block_size=2)
    allocated(blocks, [1, 2, 3, 4, 5])
    assert blocks.cached_blocks(sequence([9, 9, 3, 4, 5])) == []
    assert len(blocks.cached_blocks(sequence([1, 2, 9, 9, 5]))) == 1


def test_freed_contents_are_found_until_their_block_is_taken() -> None:
    blocks = BlockManager(num_blocks=5, block_size=2)
    old = allocated(blocks, [1, 2, 3, 4, 5])
    shared = old.blocks[:2]
    blocks.free(old)
    assert blocks.cached_blocks(sequence([1, 2, 3, 4, 5])) == shared
    again = allocated(blocks, [1, 2, 3, 4, 5])
    assert again.blocks[:2] == shared and again.num_computed == 4
    blocks.free(again)
    other = allocated(blocks, [7] * 5)  # takes the two empty blocks, then the chain's end
    assert blocks.cached_blocks(sequence([1, 2, 3, 4, 5])) == shared[:1]
    blocks.free(other)


def test_sharing_a_free_block_takes_it_from_the_free_ones() -> None:
    blocks = BlockManager(num_blocks=4, block_size=2)
    blocks.free(allocated(blocks, [1, 2, 3, 4, 5, 6]))
    # Two of the three free blocks are this sequence's own prefix, so one is left for the two blocks it lacks.
    assert not blocks.allocate(sequence([1, 2, 3, 4, 0, 0, 0]))
    assert blocks.allocate(sequence([1, 2, 3, 4, 0, 0]))


def test_dropping_forgets_all_and_needs_all_free() -> None:
    blocks = BlockManager(num_blocks=8, block_size=2)
    held = allocated(blocks, [1, 2, 3, 4, 5])
    with pytest.raises(RuntimeError, match="3 blocks"):
        blocks.drop_prefix_cache()
    blocks.free(held)
    blocks.drop_prefix_cache()
    assert blocks.cached_blocks(sequence([1, 2, 3, 4, 5])) == []
    assert blocks.num_free == 7


def run(scheduler: Scheduler, step: Step) -> None:
    count = len(step.sampling)
    scheduler.update(step, [0] * count, [0.0] * count)


def chunks(step: Step) -> list[tuple[Sequence, int, int]]:
    return [(chunk.sequence, chunk.start, chunk.stop) for chunk in step.chunks]


def test_admission_by_batch_size_blocks_and_prefill_budget() -> None:
    scheduler = Scheduler(BlockManager(12, 4), max_batch_size=3, max_prefill_tokens=20)
    long, short = sequence([1] * 19, new=4), [sequence([token, 7]) for token in range(4)]
    for each in (long, *short):
        scheduler.add(each)
    step = scheduler.schedule()
    assert step.prefill and chunks(step) == [(long, 0, 19), (short[0], 0, 1)]  # the budget is used up
    assert step.sampling == [long]
    run(scheduler, step)
    step = scheduler.schedule()
    assert not step.prefill and step.sampling == [long]  # prompts do not keep others waiting for two steps
    run(scheduler, step)
    step = scheduler.schedule()
    assert step.prefill and chunks(step) == [(short[0], 1, 2), (short[1], 0, 2)]  # the batch is full
    run(scheduler, step)
    step = scheduler.schedule()
    assert not step.prefill and step.sampling == [long, *short[:2]]
    assert list(scheduler.waiting) == short[2:]


@pytest.mark.parametrize(
    ("waiting", "prefilled"),
    [
        ([3], [3]),  # padded to the smallest
        ([8], [8]),
        ([9], [9]),  # two steps of 8 compute as much as one of 16
        ([17], [16, 1]),  # fills a smaller size first, then one of 8
        ([24], [16, 8]),
        ([25], [25]),
        ([29, 2], [31]),
        ([40], [32, 8]),  # no more than the largest
        ([7, 7, 5], [16, 3]),
    ],
)
def test_prefill_steps_leave_little_to_pad(waiting: list[int], prefilled: list[int]) -> None:
    scheduler = Scheduler(BlockManager(64, 2), max_batch_size=4, max_prefill_tokens=64, prefill_sizes=(8, 16, 32))
    each = [sequence([number] * length, new=1) for number, length in enumerate(waiting)]
    for one in each:
        scheduler.add(one)
    seen: list[int] = []
    while sum(seen) < sum(waiting):
        step = scheduler.schedule()
        if step.prefill:
            seen.append(step.num_tokens)
        run(scheduler, step)
    assert seen == prefilled
    assert all(one.finish_reason == "length" for one in each)


def test_prefill_steps_count_shared_blocks_and_free_blocks() -> None:
    def scheduler(num_blocks: int) -> Scheduler:
        return Scheduler(
            BlockManager(num_blocks, 2), max_batch_size=8, max_prefill_tokens=64, prefill_sizes=(8, 16, 32)
        )

    group = scheduler(64)
    for _ in range(6):  # samples of one prompt: 13 tokens, then one of each other, since 12 are in shared blocks
        group.add(sequence([7] * 13))
    assert group.blocks.tokens_to_compute(group.waiting, reserve=0, most=32) == 18
    step = group.schedule()
    assert step.num_tokens == 16  # of 18 those that fill a size
    run(group, step)
    later = [sequence([7] * 13), sequence([7] * 12 + [8] * 4)]  # 12 tokens of each are cached
    assert group.blocks.tokens_to_compute(later, reserve=0, most=32) == 1 + 4
    assert group.blocks.tokens_to_compute(later, reserve=0, most=3) == 3

    crowded = scheduler(9)  # blocks for two prompts, but one stays free for each that runs
    each = [sequence([number] * 7, new=1) for number in range(4)]
    for one in each:
        crowded.add(one)
    assert crowded.blocks.tokens_to_compute(crowded.waiting, reserve=0, most=32) == 7
    assert crowded.schedule().num_tokens == 7


def test_a_long_prompt_comes_in_chunks_between_decode_steps() -> None:
    scheduler = Scheduler(BlockManager(33, 2), max_batch_size=2, max_prefill_tokens=4)
    short, long = sequence([1] * 2), sequence([2] * 11)
    scheduler.add(short)
    run(scheduler, scheduler.schedule())
    scheduler.add(long)
    seen = []
    while long.num_computed < 11:
        step = scheduler.schedule()
        seen.append((step.prefill, [chunk.stop - chunk.start for chunk in step.chunks], len(step.sampling)))
        # Only blocks that are computed, or will be by the step that reads them, may be found.
        assert len(scheduler.blocks.cached_blocks(sequence([2] * 11))) <= long.num_computed // 2
        run(scheduler, step)
    decode = (False, [1], 1)
    assert seen == [decode, (True, [4], 0), decode, (True, [4], 0), decode, (True, [3], 1)]
    assert scheduler.running == [short, long]


def test_a_step_is_scheduled_before_the_last_one_is_read_back() -> None:
    scheduler = Scheduler(BlockManager(9, 2), max_batch_size=2, max_prefill_tokens=64)
    stops = Sequence([1, 1, 1], SamplingParams(max_new_tokens=9, stop_tokens=(5,)), 12)
    ends = sequence([2, 2, 2], new=2)
    for each in (stops, ends):
        scheduler.add(each)
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert [each.length for each in (stops, ends)] == [5, 5] and stops.tokens == [1, 1, 1]
    assert chunks(second) == [(stops, 3, 4), (ends, 3, 4)]
    scheduler.update(first, [7, 7], [0.0, 0.0])
    third = scheduler.schedule()
    assert chunks(third) == [(stops, 4, 5)]  # the other's last token is on its way
    scheduler.update(second, [5, 7], [0.0, 0.0])  # the third step runs in vain
    assert (stops.finish_reason, ends.finish_reason) == ("stop", "length")
    assert scheduler.blocks.num_free == 8 and not scheduler.running
    scheduler.update(third, [9], [0.0])
    assert stops.tokens == [1, 1, 1, 7, 5] and stops.in_flight == 0
    assert not scheduler.schedule().chunks


def test_the_youngest_request_is_preempted_and_resumed_first() -> None:
    scheduler = Scheduler(BlockManager(6, 2, prefix_cache=False), max_batch_size=4, max_prefill_tokens=64)
    old, young, later = sequence([1, 1, 1], new=4), sequence([2, 2, 2], new=4), sequence([3], new=2)
    for each in (old, young, later):
        scheduler.add(each)
    run(scheduler, scheduler.schedule())
    assert scheduler.running == [old, young]
    step = scheduler.schedule()
    assert not scheduler.schedule().chunks  # both need a third block, and their tokens are not known yet
    assert scheduler.preemptions == 0
    run(scheduler, step)
    step = scheduler.schedule()
    assert step.sampling == [old] and list(scheduler.waiting) == [young, later]
    assert young.tokens == [2, 2, 2, 0, 0] and young.blocks == [] and scheduler.preemptions == 1
    run(scheduler, step)
    while scheduler.waiting or scheduler.running:
        run(scheduler, scheduler.schedule())
    assert [len(each.tokens) for each in (old, young, later)] == [7, 7, 3]


def test_a_request_in_the_middle_of_its_prompt_is_preempted_first() -> None:
    scheduler = Scheduler(BlockManager(9, 2, prefix_cache=False), max_batch_size=4, max_prefill_tokens=2)
    old, young = sequence([1] * 2, new=12), sequence([2] * 9, new=2)
    for each in (old, young):
        scheduler.add(each)
    prefilling: list[Sequence] = []
    while not scheduler.preemptions:
        prefilling = list(scheduler.prefilling)
        run(scheduler, scheduler.schedule())
    assert prefilling == [young] == list(scheduler.waiting)
    assert scheduler.running == [old] and young.num_computed == 0
    while scheduler.waiting or scheduler.active:
        run(scheduler, scheduler.schedule())
    assert [len(each.tokens) for each in (old, young)] == [14, 11]


def test_an_admitted_request_leaves_a_block_for_each_running_one() -> None:
    scheduler = Scheduler(BlockManager(6, 2, prefix_cache=False), max_batch_size=4, max_prefill_tokens=64)
    first, second = sequence([1] * 4, new=2), sequence([2] * 6, new=1)
    scheduler.add(first)
    run(scheduler, scheduler.schedule())
    scheduler.add(second)
    while first.finish_reason is None:
        assert list(scheduler.waiting) == [second]  # three blocks are free, and the first grows into one of them
        run(scheduler, scheduler.schedule())
    run(scheduler, scheduler.schedule())
    assert second.finish_reason == "length" and scheduler.preemptions == 0


def test_rows_are_owned_while_blocks_are() -> None:
    scheduler = Scheduler(BlockManager(33, 2), max_batch_size=3, max_prefill_tokens=64)
    for count in range(40):
        scheduler.add(sequence([count, 1], new=1 + count % 4))
    while scheduler.waiting or scheduler.active:
        step = scheduler.schedule()
        held = [each.row for each in scheduler.running]
        assert len(set(held)) == len(held) <= 3 and all(0 <= row < 3 for row in held)
        run(scheduler, step)
    assert sorted(scheduler._rows) == [0, 1, 2]


def test_preempt_all_keeps_the_order_of_requests() -> None:
    scheduler = Scheduler(BlockManager(33, 2), max_batch_size=3, max_prefill_tokens=4)
    each = [sequence([token] * 3) for token in range(4)]
    for one in each:
        scheduler.add(one)
    run(scheduler, scheduler.schedule())
    assert scheduler.running == each[:1] and scheduler.prefilling == each[1:2]
    scheduler.preempt_all()
    assert list(scheduler.waiting) == each and scheduler.blocks.num_free == 32


def test_cancel_takes_a_request_out_wherever_it_is() -> None:
    scheduler = Scheduler(BlockManager(8, 2), max_batch_size=1, max_prefill_tokens=64)
    running, waiting = sequence([1, 1, 1]), sequence([2])
    scheduler.add(running)
    scheduler.add(waiting)
    run(scheduler, scheduler.schedule())
    step = scheduler.schedule()
    for each in (running, waiting, running):
        scheduler.cancel(each)
    assert not scheduler.running and not scheduler.waiting
    assert scheduler.blocks.num_free == 7
    assert running.finish_reason == waiting.finish_reason == "cancelled"
    run(scheduler, step)  # the result of the step in flight is dropped
    assert running.completion().tokens == [0]


def test_a_request_that_can_never_fit_is_refused() -> None:
    scheduler = Scheduler(BlockManager(4, 2), max_batch_size=1, max_prefill_tokens=64)
    scheduler.add(sequence([1, 1, 1], new=4))
    with pytest.raises(ValueError, match="up to 8 tokens needs 4 KV blocks; expected at most the cache's 3"):
        scheduler.add(sequence([1, 1, 1, 1], new=4))
