"""Small wrong changes, and the tests that must find each of them within a minute. ``make mutants``, or
``python -m tests.mutants [name ...]``.

A change rewrites one place of a copy of the sources: an old text, which is there exactly once, becomes a new
one. Changes of Python are in tests/rewrites.py, one copy for each. Changes of the core, below, are in one copy and one
build: MUTANT in the new text is true where the variable MEMSAVER_TEST_MUTANT has the name of the change. Without a
change all tests named here must pass: a failure comes from the change.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.rewrites import REWRITES, ROOT, UNCHANGED, Rewrite

BUILD = ROOT / "build" / "mutants"
LIMIT_S = 60.0
NONE = "none"  # selects no mutant
CPP = "cpp: "  # before the name of a test case of tests/cpp

# The mutants' core takes the place of memsaver._core, however memsaver was installed; in subprocesses too.
REDIRECT = """
import importlib.util
import sys


class Redirect:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "memsaver._core":
            return importlib.util.spec_from_file_location(name, {core!r})
        return None


sys.meta_path.insert(0, Redirect)
"""


# A header that each changed file of the copy includes.
SELECTION = """\
#pragma once

#include <cstdlib>
#include <mutex>
#include <string_view>
namespace memsaver::tests {
inline bool is_selected(std::string_view name) {
  const char* selected = std::getenv("MEMSAVER_TEST_MUTANT");
  return selected != nullptr && name == selected;
}
}  // namespace memsaver::tests
"""


class Mutant(Rewrite):
    """A change of the core. Its tests are ids of pytest, below tests/, or "cpp: " and a test case."""

    def rewrite(self, text: str) -> str:
        # The variable is read once at each place.
        selected = f'([] {{ static const bool on = ::memsaver::tests::is_selected("{self.name}"); return on; }}())'
        return super().rewrite(text).replace("MUTANT", selected)

    @contextmanager
    def applied(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """The folder to run tests in, and the variables that select the change."""
        yield ROOT, {"MEMSAVER_TEST_MUTANT": self.name, "PYTHONPATH": str(BUILD / "site")}


MUTANTS = [
    Mutant(
        "chunks_return_to_a_demand_that_failed",
        "shared pool: an allocation that fails returns chunks while its demand is open, and gets them again",
        "csrc/regions/allocation.cpp",
        "  const auto request = device.source().ask(needs, deadline, whole);\n",
        "  const auto request = device.source().ask(needs, deadline, whole);\n"
        "  struct Returned {\n"
        "    std::vector<Chunk>& chunks;\n"
        "    ~Returned() {\n"
        "      if (MUTANT && std::uncaught_exceptions() > 0) chunks.clear();\n"
        "    }\n"
        "  } returned{chunks};\n",
        ["integration/test_shared_pool.py::test_an_allocation_that_fails_has_the_free_memory_of_the_pool"],
    ),
    Mutant(
        "of_two_equal_pointers_the_last_counts",
        "torch's table of the driver's functions: one that is there twice is replaced at one place",
        "csrc/torch/intercepted_calls.cpp",
        "if (each.place != nullptr)",
        "if (each.place != nullptr && !MUTANT)",
        ["unit/test_default_pool.py::test_another_table_is_refused_and_left_as_it_is"],
    ),
    Mutant(
        "read_only_pointers_count",
        "torch's table of the driver's functions: one in memory that the loader has made read-only is replaced",
        "csrc/torch/intercepted_calls.cpp",
        "if (is_fixed)",
        "if (is_fixed && !MUTANT)",
        ["unit/test_default_pool.py::test_another_table_is_refused_and_left_as_it_is"],
    ),
    Mutant(
        "the_core_is_locked_over_a_copy",
        "transfer: the core's mutex is held while a copy is waited for",
        "csrc/transitions/transfer.cpp",
        "        leaving.saver->wait(batch);",
        "        const auto held = MUTANT ? std::unique_lock(core().mutex) : std::unique_lock<std::mutex>();\n"
        "        leaving.saver->wait(batch);",
        ["unit/test_gpus.py::test_no_lock_is_held_while_contents_are_copied[pause-cuEventSynchronize]"],
    ),
    Mutant(
        "undone_copies_stay_counted",
        "transfer: the progress of a resume that begins anew has the bytes of its first attempt",
        "csrc/transitions/transfer.cpp",
        "stages_.bytes_copied -= std::exchange(coming.arrived, 0);",
        "if (!MUTANT) stages_.bytes_copied -= std::exchange(coming.arrived, 0);",
        ["unit/test_progress.py::test_a_second_attempt_of_a_resume_counts_from_the_beginning"],
    ),
    Mutant(
        "copies_in_count_at_the_end",
        "backup: marks of copies in are not looked at while memory is mapped",
        "csrc/backup/backup.cpp",
        "driver_.done(marks_.front().first))",
        "!MUTANT && driver_.done(marks_.front().first))",
        ["unit/test_progress.py::test_copies_count_while_later_memory_is_mapped"],
    ),
    Mutant(
        "the_arena_is_locked_while_memory_is_made",
        "arena: its mutex is held while memory is touched and pinned",
        "csrc/backup/pinned_memory.cpp",
        "    map_memory(data, bytes, source);\n",
        "    const auto held = MUTANT ? std::unique_lock(mutex_) : std::unique_lock<std::mutex>();\n"
        "    map_memory(data, bytes, source);\n",
        ["unit/test_gpus.py::test_no_lock_is_held_while_a_pause_makes_memory[cuMemHostRegister]"],
    ),
    Mutant(
        "a_capture_ignores_waits_under_way",
        "capture gate: a capture begins while calls are under way that break it",
        "csrc/regions/device_wait.cpp",
        "return operations_ == 0;",
        "return operations_ == 0 || MUTANT;",
        ["unit/test_gpus.py::test_a_capture_begins_after_calls_under_way_that_would_break_it"],
    ),
    Mutant(
        "a_free_marks_during_a_capture",
        "resting: a free marks the device during a capture, which breaks that",
        "csrc/regions/resting.cpp",
        "if (!pass) return;",
        "if (!pass && !MUTANT) return;",
        ["unit/test_transitions.py::test_a_capture_that_torch_did_not_begin_can_be_announced"],
    ),
    Mutant(
        "without_marks_the_sweep_of_another_thread_is_not_awaited",
        "resting: before CUDA 12.5 an allocation fails while another thread returns memory that both waited for",
        "csrc/regions/resting.cpp",
        "if (reap(freed) || given_back_ != seen) return true;",
        "if (reap(freed) || given_back_ != seen || MUTANT) return given_back_ != seen;",
        ["unit/test_resting.py::test_two_allocations_wait_for_the_same_freed_memory_without_marks"],
    ),
    Mutant(
        "freed_memory_serves_at_once",
        "resting: a mark counts as passed once it is set",
        "csrc/regions/resting.cpp",
        "if (!driver_.done(ticket)) break;",
        "if (!driver_.done(ticket) && !MUTANT) break;",
        ["unit/test_resting.py::test_a_freed_segment_is_not_used_again_before_its_kernel_has_ended"],
    ),
    Mutant(
        "memory_waits_for_another_call",
        "resting: the thread that gives freed memory back is not woken",
        "csrc/regions/resting.cpp",
        "owner.device.reclaimer.freed();",
        "if (!MUTANT) owner.device.reclaimer.freed();",
        ["unit/test_resting.py::test_freed_memory_goes_back_when_its_kernel_has_ended_without_another_call"],
    ),
    Mutant(
        "allocations_ask_no_others",
        "region: an allocation does not wait for what others cache",
        "csrc/regions/allocation.cpp",
        "device.pooled && now() < shortage",
        "device.pooled && now() < shortage && !MUTANT",
        ["integration/test_reclaim.py::test_an_allocation_gets_what_others_cache"],
    ),
    Mutant(
        "own_caches_are_kept",
        "transfer: a resume fails beside the caches of its own process",
        "csrc/transitions/transfer.cpp",
        "std::exchange(reclaims, false)",
        "std::exchange(reclaims, false) && !MUTANT",
        ["integration/test_reclaim.py::test_a_resume_takes_the_free_blocks_of_its_own_process"],
    ),
    Mutant(
        "a_shortage_waits_for_nothing",
        "resting: a shortage does not wait for freed memory",
        "csrc/regions/resting.cpp",
        "|| gate_.capturing()) return false;",
        "|| gate_.capturing() || MUTANT) return false;",
        [
            "unit/test_resting.py::test_an_allocation_waits_for_memory_that_another_region_freed",
            "unit/test_resting.py::test_a_resume_waits_for_memory_that_another_region_freed",
        ],
    ),
    Mutant(
        "launches_are_not_waited_for",
        "transition: a pause does not wait for guarded launches",
        "csrc/transitions/transition.cpp",
        "return !region->in_use();",
        "return !region->in_use() || MUTANT;",
        ["unit/test_transitions.py::test_a_bound_ends_the_wait_for_guarded_launches"],
    ),
    Mutant(
        "the_attached_are_not_waited_for",
        "transition: a pause does not wait for attached processes",
        "csrc/transitions/transition.cpp",
        "  wait_for_attached(lock);",
        "  if (!MUTANT) wait_for_attached(lock);",
        ["integration/test_sent_tensors.py::test_a_pause_that_times_out_names_the_receivers"],
    ),
    Mutant(
        "bounds_end_no_wait",
        "transition: no bound ends a wait in the queue, or for readers and launches",
        "csrc/base/waits.h",
        "if (at >= deadline || waiting_is_over) return false;",
        "if ((at >= deadline && !MUTANT) || waiting_is_over) return false;",
        ["unit/test_transitions.py::test_a_bound_ends_the_wait_for_an_earlier_transition"],
    ),
    Mutant(
        "the_last_transition_is_the_first",
        "region: the queue of transitions is a stack",
        "csrc/regions/region.h",
        "queue_.push_back(transition);",
        "queue_.insert(MUTANT ? queue_.begin() : queue_.end(), transition);",
        ["unit/test_background.py::test_transitions_of_a_region_happen_in_the_order_in_which_they_were_made"],
    ),
    Mutant(
        "an_abort_keeps_the_chunks",
        "transition: a failure leaves the chunks that were reserved with the transition",
        "csrc/transitions/transition.cpp",
        "  transfers_.clear();\n  finish();",
        "  if (!MUTANT) transfers_.clear();\n  finish();",
        ["unit/test_transitions.py::test_a_switch_that_fails_has_given_its_chunks_back_when_it_raises"],
    ),
    Mutant(
        "a_pause_given_up_counts",
        "transition: a pause that was taken back leaves the region paused",
        "csrc/transitions/transition.cpp",
        "committed_ || contains",
        "committed_ || MUTANT || contains",
        ["unit/test_transitions.py::test_a_bound_ends_the_wait_for_guarded_launches"],
    ),
    Mutant(
        "a_pause_does_not_wait_for_the_device",
        "transfer: memory is unmapped under queued work",
        "csrc/transitions/transfer.cpp",
        "    device_.wait_idle(bounds_.whole);\n    device_.resting.reap(freed);",
        "    if (!MUTANT) device_.wait_idle(bounds_.whole);\n    device_.resting.reap(freed);",
        ["unit/test_gpus.py::test_a_pause_waits_for_a_kernel_of_a_peer"],
    ),
    Mutant(
        "memory_goes_before_it_is_saved",
        "host backup: contents count as saved before their copy has ended",
        "csrc/backup/host_backup.cpp",
        "driver_.wait(tickets_[batch]);",
        "if (!MUTANT) driver_.wait(tickets_[batch]);",
        ["unit/test_transitions.py::test_a_transition_returns_after_its_copies_end"],
    ),
    Mutant(
        "a_resume_ends_before_its_copies",
        "backup: a resume does not wait for its copies from pinned memory",
        "csrc/backup/backup.cpp",
        "if (waits && !marks_.empty()) driver_.wait(marks_.front().first);",
        "if (waits && !marks_.empty() && !MUTANT) driver_.wait(marks_.front().first);",
        ["unit/test_transitions.py::test_a_transition_returns_after_its_copies_end"],
    ),
    Mutant(
        "a_second_pause_forgets_the_first",
        "transfer: a pause that goes on from a refused one begins a new backup",
        "csrc/transitions/transfer.cpp",
        "if (leaving.continues) {",
        "if (leaving.continues && !MUTANT) {",
        ["unit/test_faults.py::test_a_pause_survives_a_failure_of_any_driver_call[host-error]"],
    ),
    Mutant(
        "what_did_not_suffice_is_kept",
        "transfer: chunks of an attempt that failed stay in the next",
        "csrc/transitions/transfer.cpp",
        "    give_back();\n    if (never && !snug)",
        "    if (!MUTANT) give_back();\n    if (never && !snug)",
        ["unit/test_machines.py::test_a_resume_succeeds_if_its_exact_layout_fits"],
    ),
    Mutant(
        "what_cannot_come_stays_mapped",
        "region: mappings of an operation that failed stay",
        "csrc/regions/mappings.cpp",
        "  std::vector<Chunk> freed;  // returned to their source at the end of the scope\n",
        "  if (MUTANT) return;\n  std::vector<Chunk> freed;\n",
        ["unit/test_faults.py::test_an_allocation_survives_a_failure_of_any_driver_call[error]"],
    ),
    Mutant(
        "a_free_in_a_transition_is_lost",
        "region: memory freed during a transition is never returned",
        "csrc/regions/region.cpp",
        "State::resuming: freed_meanwhile_.push_back(begin);",
        "State::resuming: if (!MUTANT) freed_meanwhile_.push_back(begin);",
        ["unit/test_transitions.py::test_memory_freed_during_a_pause_is_released_by_it"],
    ),
    Mutant(
        "memory_goes_under_an_allocation",
        "region: a sweep does not mind another thread that holds the mapping lock",
        "csrc/regions/mappings.cpp",
        "if (!only) return;",
        "if (!only && !MUTANT) return;",
        ["unit/test_gpus.py::test_a_free_beside_an_allocation_leaves_the_page_that_they_share"],
    ),
    Mutant(
        "the_lost_come_back",
        "region: a transition brings a region back to use after its context died",
        "csrc/regions/region.cpp",
        "device.lost || state_ == State::lost ?",
        "(device.lost || state_ == State::lost) && !MUTANT ?",
        ["unit/test_gpus.py::test_a_context_that_dies_in_a_transition_leaves_the_region_lost"],
    ),
    Mutant(
        "new_peers_see_new_mappings_alone",
        "core: a new peer gets no access to existing mappings",
        "csrc/regions/core.cpp",
        "region->mark_stale();",
        "if (!MUTANT) region->mark_stale();",
        ["unit/test_gpus.py::test_a_device_that_comes_later_gets_access_to_existing_mappings"],
    ),
    Mutant(
        "addresses_are_given_twice",
        "free ranges: bytes that are taken from a range stay in it",
        "csrc/base/ranges.cpp",
        "add({range.end(), found.end() - range.end()});",
        "add(MUTANT ? Range{range.offset, found.size} : Range{range.end(), found.end() - range.end()});",
        ["cpp: free ranges: agree with one bit for each byte"],
    ),
    Mutant(
        "free_addresses_do_not_join",
        "free ranges: a range does not join the one behind it",
        "csrc/base/ranges.cpp",
        "if (next != sizes_.end() && next->first == range.end())",
        "if (next != sizes_.end() && next->first == range.end() && !MUTANT)",
        ["cpp: free ranges: agree with one bit for each byte"],
    ),
    Mutant(
        "the_host_limit_is_ignored",
        "host budget: more is taken than host_limit allows",
        "csrc/backup/host_memory.cpp",
        "if (bytes <= left)",
        "if (bytes <= left || MUTANT)",
        ["unit/test_host_memory.py::test_a_backup_beyond_the_limit_is_refused_before_anything_moves"],
    ),
    Mutant(
        "retained_chunks_stay",
        "reclaimer: idle chunks of the process are kept while another one waits for memory",
        "csrc/regions/reclaimer.cpp",
        "  device_.retained.give_up(static_cast<std::size_t>(-1));\n  for",
        "  if (!MUTANT) device_.retained.give_up(static_cast<std::size_t>(-1));\n  for",
        ["integration/test_reclaim.py::test_retained_chunks_come_back"],
    ),
    Mutant(
        "bytes_of_others_are_seen",
        "region: chunks with bytes of other processes are not zeroed",
        "csrc/regions/mappings.cpp",
        "fill != Fill::keep && chunks_",
        "fill != Fill::keep && !MUTANT && chunks_",
        ["integration/test_shared_pool.py::test_no_process_sees_the_bytes_of_another"],
    ),
    Mutant(
        "checksums_are_not_compared",
        "disk backup: a block of a file that has changed is used",
        "csrc/backup/disk_backup.cpp",
        "if (checksum(memory, size_of(block)) != checksums_[block])",
        "if (checksum(memory, size_of(block)) != checksums_[block] && !MUTANT)",
        ["unit/test_disk.py::test_a_corrupted_file_is_noticed"],
    ),
    Mutant(
        "copies_cross_slabs",
        "host backup: one copy goes over the border of two registrations",
        "csrc/backup/host_backup.cpp",
        "border = arena_.slab_end(host);",
        "border = MUTANT ? host + (end - begin) : arena_.slab_end(host);",
        ["unit/test_gpus.py::test_contents_in_several_ranges_of_addresses_come_back_whole"],
    ),
    Mutant(
        "demands_end_without_a_word",
        "shared pool: the broker is not told the end of a demand",
        "csrc/pool/pool_request.cpp",
        "if (!disconnected_) pool_.send_locked(message_of(Kind::close",
        "if (!disconnected_ && !MUTANT) pool_.send_locked(message_of(Kind::close",
        ["integration/test_shared_pool.py::test_a_wait_that_times_out_gives_its_chunks_back"],
    ),
    Mutant(
        "regions_that_were_set_aside_are_used",
        "tagged regions: new allocations go to regions that are about to be paused",
        "csrc/regions/tagged.cpp",
        "aside_.find(region) == aside_.end())",
        "(aside_.find(region) == aside_.end() || MUTANT))",
        ["drop_in/test_tagged.py::test_region_that_is_set_aside_is_passed_over"],
    ),
    Mutant(
        "savers_have_slack",
        "tagged regions: they map as much beyond their segments as all others",
        "csrc/regions/tagged.cpp",
        ".most_slack = kSlack",
        ".most_slack = MUTANT ? kAnySlack : kSlack",
        ["drop_in/test_tagged.py::test_regions_have_little_slack"],
    ),
    Mutant(
        "dropped_pieces_stay_mapped",
        "default pool: the memory of a piece that torch unmaps stays with the region",
        "csrc/regions/region.cpp",
        "if (!chunks_.empty()) add_dirty_locked(freed);",
        "if (!chunks_.empty() && !(placed && MUTANT)) add_dirty_locked(freed);",
        ["unit/test_default_pool.py::test_a_chunk_serves_one_piece_alone"],
    ),
    Mutant(
        "pieces_share_chunks",
        "default pool: a resume lays chunks over several pieces",
        "csrc/regions/allocation.cpp",
        "one_handle || placed;",
        "one_handle || (placed && !MUTANT);",
        ["unit/test_default_pool.py::test_a_chunk_serves_one_piece_alone"],
    ),
    Mutant(
        "all_callers_are_answered",
        "default pool: calls of the driver from other libraries are answered as torch's",
        "csrc/torch/intercepted_calls.cpp",
        "contains(callers, from)",
        "(contains(callers, from) || MUTANT)",
        ["unit/test_default_pool.py::test_calls_from_elsewhere_reach_the_driver"],
    ),
    Mutant(
        "a_retry_ends_with_its_first_piece",
        "default pool: only the first piece of an allocation waits for memory of other processes",
        "csrc/torch/default_pools.cpp",
        "    made = kMark | ++last_;",
        "    if (MUTANT) refusal = {};\n    made = kMark | ++last_;",
        ["unit/test_default_pool.py::test_the_pieces_of_an_allocation_share_one_wait"],
    ),
    Mutant(
        "addresses_are_free_under_a_transition",
        "default pool: torch frees addresses whose chunks a transition has",
        "csrc/torch/default_pools.cpp",
        "if (!region->touches({address, size})) continue;",
        "if (!region->touches({address, size}) || MUTANT) continue;",
        ["unit/test_default_pool.py::test_a_segment_ends_in_a_transition"],
    ),
    Mutant(
        "a_repeated_demand_waits_anew",
        "trace: each try of a demand without a pool is a wait of its own",
        "csrc/transitions/transfer.cpp",
        "each.ended + kRepeated < event.began",
        "(MUTANT || each.ended + kRepeated < event.began)",
        ["unit/test_trace.py::test_a_demand_that_is_repeated_waits_once"],
    ),
    Mutant(
        "copies_in_count_the_copies_out",
        "trace: the copies in of a switch have the bytes of both directions",
        "csrc/transitions/transfer.cpp",
        "moved_.copied_bytes - copied_out)",
        "moved_.copied_bytes - (MUTANT ? 0 : copied_out))",
        ["unit/test_trace.py::test_a_switch_copies_in_both_directions"],
    ),
    Mutant(
        "a_process_waits_for_itself",
        "trace: a wait names the process that waits",
        "csrc/pool/shared_pool_thread.cpp",
        "if (holders_.back().pid != ::getpid())",
        "if (holders_.back().pid != ::getpid() || MUTANT)",
        ["unit/test_trace.py::test_a_wait_has_its_bytes_and_the_process_that_holds_them"],
    ),
    Mutant(
        "a_resume_fills_offered_contents_before_it_can_fail",
        "lazy pauses: a resume without contents fills memory that a failure would need",
        "csrc/transitions/transfer.cpp",
        "if (coming.fills && region.backup() == nullptr) fill",
        "if (coming.fills && (region.backup() == nullptr || MUTANT)) fill",
        ["unit/test_lazy.py::test_a_failed_resume_that_discards_has_not_written_to_offered_contents[zero]"],
    ),
    Mutant(
        "a_resume_that_waits_keeps_its_offers",
        "lazy pauses: others cannot have the chunks of a resume that waits for memory",
        "csrc/regions/eviction.cpp",
        "(state_ == State::resuming && !claimed_)",
        "(state_ == State::resuming && !claimed_ && !MUTANT)",
        ["unit/test_lazy.py::test_a_resume_that_waits_leaves_its_offers_to_others"],
    ),
    Mutant(
        "an_offer_that_cannot_be_copied_has_no_reason",
        "lazy pauses: an OutOfMemoryError does not tell why offered chunks stay",
        "csrc/regions/eviction.cpp",
        "device.not_copied = why;",
        "if (!MUTANT) device.not_copied = why;",
        ["unit/test_lazy.py::test_a_shortage_of_host_memory_keeps_the_other_chunks"],
    ),
    Mutant(
        "an_eviction_begins_the_pause_anew",
        "region: the seconds since a pause begin anew when offered chunks are taken",
        "csrc/regions/region.cpp",
        "state_ == State::pausing && next",
        "(MUTANT || state_ == State::pausing) && next",
        ["unit/test_lazy.py::test_a_shortage_of_host_memory_keeps_the_other_chunks"],
    ),
    Mutant(
        "host_memory_is_free_while_copies_into_it_are_queued",
        "lazy pauses: a failed copy gives its host memory back to the arena before the copies have ended",
        "csrc/backup/pieced_backup.cpp",
        "if (!piece_->complete()) drain",
        "if (!piece_->complete() && !MUTANT) drain",
        ["unit/test_lazy.py::test_a_failed_copy_keeps_its_host_memory_until_no_copy_is_queued"],
    ),
    Mutant(
        "a_copy_reserves_and_reads_the_whole_region",
        "lazy pauses: the copy of one chunk takes host memory for all contents, and reads unmapped parts",
        "csrc/backup/pieced_backup.cpp",
        "intersect(parts(), joined(batches))",
        "MUTANT ? parts() : intersect(parts(), joined(batches))",
        ["unit/test_lazy.py::test_a_shortage_of_host_memory_keeps_the_other_chunks"],
    ),
    Mutant(
        "copies_ahead_beside_other_copies",
        "lazy pauses: contents are copied ahead of a demand while other copies are under way",
        "csrc/regions/eviction.cpp",
        "device.copying > 0 ||",
        "(device.copying > 0 && !MUTANT) ||",
        ["unit/test_lazy.py::test_copies_ahead_wait_for_other_copies_and_stop_for_them"],
    ),
    Mutant(
        "copies_ahead_in_a_transition",
        "lazy pauses: copies ahead of a demand go on while a transition has the region",
        "csrc/regions/eviction.cpp",
        "region->is_queued() ||",
        "(region->is_queued() && !MUTANT) ||",
        ["unit/test_lazy.py::test_copies_ahead_wait_for_a_transition_of_the_region"],
    ),
    Mutant(
        "a_close_does_not_wait_for_a_copy_ahead",
        "lazy pauses: a close during a copy ahead of a demand raises",
        "csrc/regions/eviction.cpp",
        "kNever, [&] { return !region.evicting(); });",
        "kNever, [&] { return !region.evicting() || MUTANT; });",
        ["unit/test_lazy.py::test_a_close_waits_for_a_copy_ahead"],
    ),
    Mutant(
        "a_close_that_fails_ends_copies_ahead",
        "lazy pauses: a close of a region in use ends its copies ahead of a demand",
        "csrc/regions/eviction.cpp",
        "region_.set_copies_ahead(true);",
        "region_.set_copies_ahead(!MUTANT);",
        ["unit/test_lazy.py::test_a_close_waits_for_a_copy_ahead"],
    ),
    Mutant(
        "a_pause_does_not_count_offered_contents",
        "lazy pauses: a pause that is not lazy reports no bytes of an earlier, lazy one",
        "csrc/transitions/transition.cpp",
        "outcome_.copied_bytes += given.copied;",
        "outcome_.copied_bytes += MUTANT ? 0 : given.copied;",
        ["unit/test_lazy.py::test_a_pause_that_is_not_lazy_copies_the_rest"],
    ),
    Mutant(
        "copies_of_offered_contents_are_not_noted",
        "trace: copies of offered contents are missing",
        "csrc/regions/device.h",
        "if (copies.bytes == 0) return;",
        "if (copies.bytes == 0 || MUTANT) return;",
        ["unit/test_trace.py::test_copies_of_offered_contents_are_in_the_trace_and_the_sums[allocation]"],
    ),
    Mutant(
        "copied_chunks_are_not_preferred",
        "lazy pauses: a demand copies contents out while there are chunks that need no copy",
        "csrc/regions/eviction.cpp",
        "if (!copies) offered =",
        "if (!copies && !MUTANT) offered =",
        ["unit/test_lazy.py::test_a_demand_takes_copied_chunks_first"],
    ),
    Mutant(
        "an_allocation_is_refused_before_offers_are_taken",
        "lazy pauses: torch frees its caches while other processes offer memory",
        "csrc/pool/pool_request.cpp",
        "(stalled_locked() && !expects_offers) ||",
        "(stalled_locked() && (!expects_offers || MUTANT)) ||",
        ["integration/test_shared_pool.py::test_offered_chunks_are_taken_before_an_allocation_is_refused[full]"],
    ),
    Mutant(
        "a_demand_takes_no_share",
        "lazy pauses: a program that allocates step by step waits for an offer in each step",
        "csrc/regions/eviction.cpp",
        "Choice{false, wanted, share}",
        "Choice{false, wanted, MUTANT ? wanted : share}",
        ["unit/test_lazy.py::test_a_small_demand_takes_a_share_of_what_needs_no_copy[none-2]"],
    ),
    Mutant(
        "copies_ahead_go_on_after_a_failure",
        "lazy pauses: copies ahead of a demand are tried again and again without host memory",
        "csrc/regions/eviction.cpp",
        "!copy_out(*region, *backup, chosen, nullptr, true).error)",
        "(!copy_out(*region, *backup, chosen, nullptr, true).error || MUTANT))",
        ["unit/test_lazy.py::test_copies_ahead_end_without_host_memory_and_chunks_stay_offered"],
    ),
    Mutant(
        "without_a_wait_nobody_is_asked_for_offers",
        "lazy pauses: a resume without a wait fails while other processes offer memory",
        "csrc/pool/pool_request.cpp",
        "return offers_ &&",
        "return offers_ && !MUTANT &&",
        ["integration/test_shared_pool.py::test_offered_chunks_go_to_a_process_that_lacks_them"],
    ),
    Mutant(
        "other_contents_are_the_same",
        "common memory: contents are not compared with those on which others rely",
        "csrc/backup/common_memory.cpp",
        "    if (rows_[block].sum != sums[block]) return block;\n",
        "    if (rows_[block].sum != sums[block] && !MUTANT) return block;\n",
        ["integration/test_same.py::test_a_process_with_a_different_byte_is_named"],
    ),
    Mutant(
        "contents_change_under_those_who_rely_on_them",
        "common memory: a pause begins an epoch although another process relies on the contents",
        "csrc/backup/common_memory.cpp",
        "    others.reset(own_);\n",
        "    others.reset(own_);\n    if (MUTANT) others.reset();\n",
        ["integration/test_same.py::test_a_process_that_stops_in_its_pause_is_not_waited_for_and_keeps_its_contents"],
    ),
    Mutant(
        "changed_blocks_are_not_copied",
        "common memory: a block with other contents counts as copied in the next epoch",
        "csrc/backup/common_memory.cpp",
        "if (row.state == kDone && row.sum == sums[block]) continue;",
        "if (row.state == kDone && (row.sum == sums[block] || MUTANT)) continue;",
        ["unit/test_same.py::test_blocks_that_have_not_changed_are_not_copied_again"],
    ),
    Mutant(
        "most_of_two_agree",
        "common memory: of two processes that differ, one is named",
        "csrc/backup/common_memory.cpp",
        "2 * have(most) > votes.size() &&",
        "2 * have(most) + (MUTANT ? 1 : 0) > votes.size() &&",
        ["integration/test_same.py::test_two_processes_that_differ_are_both_named"],
    ),
    Mutant(
        "a_refusal_waits_for_no_votes",
        "common memory: the process that differs is named before the others have compared",
        "csrc/backup/common_memory.cpp",
        "        all &= row.differs == epoch;",
        "        all &= row.differs == epoch || MUTANT;",
        ["integration/test_same.py::test_a_process_with_a_different_byte_is_named"],
    ),
    Mutant(
        "files_are_cleared_when_they_are_mapped",
        "arena: a process that maps common memory writes zeros to it",
        "csrc/backup/pinned_memory.cpp",
        "    touch(data, bytes, !source);\n",
        "    touch(data, bytes, !source || MUTANT);\n",
        ["integration/test_same.py::test_a_process_that_pauses_alone_copies_all_and_later_ones_nothing"],
    ),
    Mutant(
        "memory_goes_before_others_have_copied",
        "common backup: a pause does not wait for the shares of other processes",
        "csrc/backup/common_backup.cpp",
        "    for (const std::size_t block : blocks_[batch]) await(block);\n",
        "    for (const std::size_t block : blocks_[batch])\n      if (!MUTANT) await(block);\n",
        ["integration/test_same.py::test_a_process_that_stops_in_its_pause_is_not_waited_for_and_keeps_its_contents"],
    ),
    Mutant(
        "the_first_to_prepare_copies_all",
        "common backup: a pause copies the shares of others before its commit",
        "csrc/backup/common_backup.cpp",
        "      queue(batch, CommonMemory::Members().set());\n",
        "      queue(batch, MUTANT ? CommonMemory::Members() : CommonMemory::Members().set());\n",
        ["integration/test_same.py::test_four_processes_keep_one_copy_and_each_writes_a_share"],
    ),
    Mutant(
        "a_copy_outlives_its_pause",
        "common backup: a process that has resumed relies on the contents still",
        "csrc/backup/common_backup.h",
        "  ~CommonBackup() override { memory_->release(); }",
        "  ~CommonBackup() override {\n    if (!MUTANT) memory_->release();\n  }",
        ["integration/test_same.py::test_four_processes_keep_one_copy_and_each_writes_a_share"],
    ),
]


def write_sources() -> Path:
    """A copy of the sources of the core with all changes. A file that stays the same keeps its time, for the build."""
    folder = BUILD / "sources"
    texts = {path.relative_to(ROOT): path.read_text() for path in sources()}
    for each in MUTANTS:
        texts[Path(each.file)] = each.rewrite(texts[Path(each.file)])
    for path in {Path(each.file) for each in MUTANTS}:
        texts[path] = '#include "mutants.h"\n' + texts[path]
    texts[Path("csrc/mutants.h")] = SELECTION
    for old in folder.glob("*/**/*"):
        if old.is_file() and old.relative_to(folder) not in texts:
            old.unlink()
    for path, text in texts.items():
        copy = folder / path
        if not copy.exists() or copy.read_text() != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)
    return folder


def sources() -> Iterator[Path]:
    yield ROOT / "CMakeLists.txt"
    for folder in (ROOT / "csrc", ROOT / "tests" / "cpp", ROOT / "tests" / "device"):
        yield from (path for path in folder.rglob("*") if path.suffix in (".h", ".c", ".cpp"))


def build() -> None:
    nanobind = subprocess.run(
        [sys.executable, "-m", "nanobind", "--cmake_dir"], check=True, capture_output=True, text=True
    )
    cmake = os.environ.get("CMAKE", "cmake")
    options = {
        "CMAKE_BUILD_TYPE": "Debug",
        "CMAKE_CXX_FLAGS_DEBUG": "-O1",
        "MEMSAVER_TESTS": "ON",
        "Python_EXECUTABLE": sys.executable,
        "nanobind_DIR": nanobind.stdout.strip(),
    }
    defined = [f"-D{option}={value}" for option, value in options.items()]
    subprocess.run([cmake, "-S", write_sources(), "-B", BUILD, "--log-level=NOTICE", *defined], check=True)
    targets = ["_core", "memsaver_tests"]
    subprocess.run([cmake, "--build", BUILD, "--parallel", str(os.cpu_count()), "--target", *targets], check=True)
    (core,) = BUILD.glob("_core*.so")
    (BUILD / "site").mkdir(exist_ok=True)
    (BUILD / "site" / "sitecustomize.py").write_text(REDIRECT.format(core=str(core)))


def command_of(test: str) -> list[str]:
    if test.startswith(CPP):
        case = test.removeprefix(CPP).replace(",", "?")  # a comma separates filters
        return [str(BUILD / "memsaver_tests"), f"-tc={case}"]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/{test}"]


def run(test: str, change: Rewrite) -> tuple[str, float]:
    """Returns "passed", "failed" or another outcome, and the seconds that it took."""
    began = time.monotonic()
    with change.applied() as (folder, variables):
        path = os.pathsep.join(filter(None, [variables["PYTHONPATH"], os.environ.get("PYTHONPATH", "")]))
        environment = {**os.environ, **variables, "PYTHONPATH": path}
        try:
            done = subprocess.run(
                command_of(test), cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not over after {LIMIT_S:.0f} s", LIMIT_S
    return outcome(test, done), time.monotonic() - began


def outcome(test: str, done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0 or done.returncode == 1:
        return "failed"  # by a signal, too
    if done.returncode != 0:
        return f"not run: {done.stdout}{done.stderr}"
    lines = [line for line in done.stdout.splitlines() if " passed" in line]
    counted = "test cases:" if test.startswith(CPP) else " passed"
    numbers = [re.findall(r"(\d+) (passed|skipped|xfailed|xpassed)", line) for line in lines if counted in line]
    counts = {outcome: int(number) for number, outcome in numbers[-1]} if numbers else {}
    if counts.pop("passed", 0) == 0:
        return "not run: no test of this name passed"
    if not test.startswith(CPP) and counts:
        return f"not run: {lines[-1]}"
    return "passed"


def check(chosen: Sequence[Rewrite]) -> int:
    missed = 0
    without: dict[type, Rewrite] = {Mutant: Mutant(NONE, "", "", "", "", ()), Rewrite: UNCHANGED}
    tests = sorted({(test, type(change)) for change in chosen for test in change.tests}, key=str)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (test, _), (found, _) in zip(tests, pool.map(lambda each: run(each[0], without[each[1]]), tests)):
            if found != "passed":
                missed += 1
                print(f"without a change, {test}: {found}", flush=True)
        if missed:
            return missed
        print(f"{len(tests)} tests pass without a change", flush=True)
        jobs = [(change, test) for change in chosen for test in change.tests]
        results = pool.map(lambda job: run(job[1], job[0]), jobs)
        for change, ends in [(change, [next(results) for _ in change.tests]) for change in chosen]:
            caught = [(test, took) for test, (how, took) in zip(change.tests, ends) if how == "failed"]
            for test, took in caught:
                print(f"found    {change.name} ({took:.1f} s): {test}", flush=True)
            if not caught:
                missed += 1
                how = "; ".join(f"{test}: {how}" for test, (how, _) in zip(change.tests, ends))
                print(f"MISSED   {change.name} ({change.change}): {how}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} changes found")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of changes, or 'core', or 'python'; all where none is named")
    names = set(parser.parse_args().names)
    groups: dict[str, Sequence[Rewrite]] = {"core": MUTANTS, "python": REWRITES}
    everything = [change for group in groups.values() for change in group]
    unknown = names - {change.name for change in everything} - set(groups)
    if unknown:
        parser.error(f"no such change: {', '.join(sorted(unknown))}")
    of_groups = [change for name in names & set(groups) for change in groups[name]]
    chosen = [change for change in everything if not names or change.name in names or change in of_groups]
    if any(isinstance(change, Mutant) for change in chosen):
        build()
    sys.exit(check(chosen) != 0)


if __name__ == "__main__":
    main()
