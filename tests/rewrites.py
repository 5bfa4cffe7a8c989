"""Small wrong changes of Python, and the tests that must find each of them: see tests/mutants.py, which runs them.

A change rewrites one place of a copy of the sources. The old text must be there exactly once, and the tests run in the
copy, with the core that is built.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from memsaver import _core

ROOT = Path(__file__).resolve().parent.parent
_COPIED = ("csrc", "memsaver", "tests", "examples", "pyproject.toml")  # csrc: headers for tests/controls.py

# The packages of the copy come before those of the environment, however memsaver was installed; in subprocesses too.
_REDIRECT = """
import sys
from importlib.machinery import PathFinder


class Redirect:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ("memsaver", "tests", "examples"):
            return PathFinder.find_spec(name, path or [{folder!r}])
        return None


sys.meta_path.insert(0, Redirect)
"""


@dataclass(frozen=True)
class Rewrite:
    name: str
    change: str
    file: str
    old: str
    new: str
    tests: Sequence[str]  # at least one fails. Ids of pytest, below tests/

    def text(self) -> str:
        """The file with the change."""
        return self.rewrite((ROOT / self.file).read_text())

    def rewrite(self, text: str) -> str:
        """The text with the change. Raises ValueError unless the old text is there exactly once."""
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: the old text is {text.count(self.old)} times in {self.file}, expected once")
        return text.replace(self.old, self.new)

    @contextmanager
    def applied(self) -> Iterator[tuple[Path, dict[str, str]]]:
        """The folder of a copy with the change, to run tests in, and the variables that make programs use it."""
        with tempfile.TemporaryDirectory(prefix="ms") as name:  # short: paths of sockets are below it
            folder = Path(name)
            for each in _COPIED:
                if (ROOT / each).is_dir():
                    shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
                else:
                    shutil.copy(ROOT / each, folder / each)
            built = Path(_core.__file__).parent
            for library in built.rglob("*.so"):
                (folder / "memsaver" / library.relative_to(built)).symlink_to(library)
            # The library of tests/device has a name by its sources: one compilation serves all copies.
            shared = ROOT / "build" / "device"
            shared.mkdir(parents=True, exist_ok=True)
            (folder / "build").mkdir()
            (folder / "build" / "device").symlink_to(shared)
            (folder / "sitecustomize.py").write_text(_REDIRECT.format(folder=name))
            if self.file:
                (folder / self.file).write_text(self.text())
            yield folder, {"PYTHONPATH": name}


UNCHANGED = Rewrite("none", "", "", "", "", ())

REWRITES = [
    # The broker
    Rewrite(
        "bytes_of_several_clients_are_the_last_ones",
        "shared pool: a chunk that was returned with bytes of others counts as written by the client that returned it",
        "memsaver/broker/pool.py",
        "SEVERAL if chunk_id in foreign else client.id",
        "client.id",
        ["unit/test_pool_machine.py::test_the_pool_agrees_with_the_messages_to_clients"],
    ),
    Rewrite(
        "trim_releases_a_chunk_too_many",
        "shared pool: a trim goes on when exactly the bytes to keep are idle",
        "memsaver/broker/pool.py",
        "if self.idle_bytes <= keep_bytes:",
        "if self.idle_bytes < keep_bytes:",
        ["unit/test_pool.py::test_trim_releases_small_chunks_first_and_keeps_the_given_bytes"],
    ),
    Rewrite(
        "granted_bytes_leave_room",
        "queue: a demand grows by an exchange beyond the capacity of the pool",
        "memsaver/broker/queue.py",
        "self._capacity - demand.granted - demand.remaining",
        "self._capacity - demand.remaining",
        ["unit/test_pool_machine.py::test_the_pool_agrees_with_the_messages_to_clients"],
    ),
    Rewrite(
        "closed_demands_are_completed",
        "queue: the end of a demand is reported after the demand was closed",
        "memsaver/broker/queue.py",
        "[each for each in self._completed if each is not demand]",
        "list(self._completed)",
        ["unit/test_pool.py::test_the_end_of_a_demand_is_not_reported_to_an_exited_client"],
    ),
    Rewrite(
        "a_request_for_a_report_outlives_its_connection",
        "sessions: a client that joins again before it has reported is never asked for a report",
        "memsaver/broker/loop.py",
        "        client.queried_at = None\n",
        "",
        ["integration/test_broker.py::test_a_client_that_rejoins_is_asked_for_its_report_again"],
    ),
    Rewrite(
        "chunks_of_the_dead_are_lent",
        "shared pool: the chunks of an exited client go to the next demand, while its readers use them",
        "memsaver/broker/pool.py",
        "self._return(chunk, SEVERAL, leaves=True)",
        "self._return(chunk, SEVERAL)",
        ["integration/test_sent_tensors.py::test_the_memory_of_a_killed_owner_stays_with_the_receiver"],
    ),
    Rewrite(
        "chunks_without_a_descriptor_are_lent",
        "shared pool: a chunk of an earlier broker, which has no descriptor, is granted to another client",
        "memsaver/broker/pool.py",
        "if leaves or chunk.file is None:",
        "if leaves:",
        ["integration/test_broker.py::test_chunks_of_an_earlier_broker_are_lent_to_no_other_client"],
    ),
    Rewrite(
        "chunks_of_others_are_described",
        "lending: a client gets descriptors of the chunks of other clients",
        "memsaver/broker/lending.py",
        "client.held.get(chunk_id)",
        "self._pool.chunks.get(chunk_id)",
        ["integration/test_broker.py::test_a_client_gets_descriptors_of_the_chunks_that_it_holds"],
    ),
    Rewrite(
        "a_full_packet_of_grants_is_not_the_last",
        "lending: without the numbers of the demand, if its chunks fill the last packet",
        "memsaver/broker/lending.py",
        "at + MOST_CHUNKS >= len(grants)",
        "at + MOST_CHUNKS > len(grants)",
        ["integration/test_broker.py::test_the_last_packet_of_a_grant_has_the_place_in_the_queue"],
    ),
    Rewrite(
        "a_full_packet_ends_the_inventory",
        "lending: chunks in the second packet of an inventory are refused",
        "memsaver/broker/lending.py",
        "len(words) // 2 < MOST_CHUNKS",
        "len(words) // 2 <= MOST_CHUNKS",
        ["integration/test_broker.py::test_a_client_with_many_chunks_rejoins_in_several_packets"],
    ),
    Rewrite(
        "pauses_of_reclaim_grow_for_ever",
        "reclaim: a new demand waits for the pause of the last one before the first round",
        "memsaver/broker/reclaim.py",
        "            self._pause_s = FIRST_PAUSE_S\n            if self._offering",
        "            if self._offering",
        ["unit/test_pool.py::test_a_new_head_of_the_queue_does_not_wait_out_the_pause_of_the_last_one"],
    ),
    Rewrite(
        "children_of_children_are_not_found",
        "monitor: memory returns while a child of a child runs",
        "memsaver/broker/monitor.py",
        "for pid in procfs.inheritors(child):",
        "for pid in ():",
        ["unit/test_monitor.py::test_children_without_the_sentinel_and_their_children_are_found"],
    ),
    Rewrite(
        "exiting_processes_are_not_looked_for",
        "monitor: memory returns while a process that has closed the sentinel still exits",
        "memsaver/broker/monitor.py",
        "                    if not inodes and status.start >= process.start:",
        "                    if False:",
        ["unit/test_monitor.py::test_an_exiting_process_that_was_never_seen_with_the_sentinel_is_waited_for"],
    ),
    Rewrite(
        "memory_returns_before_the_children_end",
        "monitor: memory of an exited process returns while a child holds its descriptors",
        "memsaver/broker/monitor.py",
        "process.is_searched and not process.children and",
        "process.is_searched and",
        ["unit/test_monitor.py::test_an_exiting_process_that_was_never_seen_with_the_sentinel_is_waited_for"],
    ),
    # Turns of a group
    Rewrite(
        "late_resumes_have_written",
        "turns: contents of a resume with restore=False that has not answered count as written",
        "memsaver/turns/turn.py",
        "                self._unwritten[rank] = self._unwritten.get(rank, set()).union(unrestored)\n",
        "                pass\n",
        ["unit/test_group_answers.py::test_contents_of_a_late_resume_count_as_not_written"],
    ),
    Rewrite(
        "an_undo_has_the_rest_of_the_time",
        "turns: pauses that take resumes back have no time left after a resume that has used all of it",
        "memsaver/turns/turn.py",
        "replace(self._options, since=time.monotonic(), values=values)",
        "replace(self._options, values=values)",
        ["unit/test_group_answers.py::test_members_pause_again_with_the_time_of_the_whole_turn"],
    ),
    Rewrite(
        "unwritten_contents_stay_unwritten",
        "turns: a tag that was overwritten since counts as not written",
        "memsaver/turns/turn.py",
        "            after.get(rank, set()).difference_update(overwritten)\n",
        "",
        ["unit/test_group_policies.py::test_regions_resumed_for_writing_are_paused_without_contents_if_the_turn_fails"],
    ),
    Rewrite(
        "calls_of_replaced_members_are_waited_for",
        "turns: the call that hangs in a replaced member refuses all later turns",
        "memsaver/ray/ranks.py",
        "                self.late = {future: rank for future, rank in self.late.items() if rank is not old}\n",
        "",
        ["unit/test_group_answers.py::test_another_member_takes_the_place_of_one_that_hangs"],
    ),
    Rewrite(
        "aborts_in_a_drain_are_lost",
        "members: an actor prepares after its drain although the turn was taken back meanwhile",
        "memsaver/turns/members.py",
        """\
            self._turn += 1
            prepared, self._prepared = self._prepared, None
            if prepared is not None:
""",
        """\
            prepared, self._prepared = self._prepared, None
            if prepared is not None:
                self._turn += 1
""",
        ["unit/test_group_answers.py::test_an_actor_that_drains_while_its_turn_is_taken_back_stays_as_it_was"],
    ),
    # Groups over torch.distributed's store
    Rewrite(
        "pids_are_used_once",
        "liveness: another process with the pid of a rank counts as the rank",
        "memsaver/distributed/liveness.py",
        'status.start != hello["start"] or ',
        "",
        ["integration/test_distributed.py::test_another_process_with_the_pid_of_a_rank_is_not_the_rank"],
    ),
    Rewrite(
        "silence_between_turns_counts",
        "liveness: a rank that held the GIL during a phase counts as dead in the next turn",
        "memsaver/distributed/liveness.py",
        "        self._beats.clear()\n",
        "",
        ["integration/test_distributed.py::test_silence_between_turns_does_not_count"],
    ),
    Rewrite(
        "an_interrupt_leaves_preparations",
        "processes: members stay prepared if an interrupt comes while another one takes its preparation back",
        "memsaver/distributed/processes.py",
        "            self._end(left)\n            raise\n",
        "            raise\n",
        [
            "integration/test_distributed.py::"
            "test_an_interrupt_while_preparations_are_taken_back_leaves_none_and_is_told_to_the_others"
        ],
    ),
    Rewrite(
        "interrupts_are_not_told",
        "processes: the other ranks wait for one that was interrupted",
        "memsaver/distributed/processes.py",
        "if not isinstance(error, StoreError):",
        "if False:",
        ["integration/test_distributed.py::test_an_interrupted_rank_is_named_and_the_others_abort"],
    ),
    Rewrite(
        "an_interrupted_wait_is_the_end",
        "processes: a rank that is interrupted while it waits aborts, although all ranks commit",
        "memsaver/distributed/processes.py",
        "            found = self._agreement.decide(place, answers, "
        '{"errors": [None if each else left for each in answers]})\n',
        "            raise\n",
        ["integration/test_distributed.py::test_a_rank_that_is_interrupted_while_it_waits_follows_the_decision"],
    ),
    Rewrite(
        "dist_settle_stale_decision",
        "processes: a rank that was late takes the decision of a later question for that of its own",
        "memsaver/distributed/processes.py",
        "if found.place != place:",
        "if False:",
        ["integration/test_distributed.py::test_a_rank_that_hangs_in_the_second_half_is_named_until_it_has_answered"],
    ),
    Rewrite(
        "ended_preparations_are_ended_again",
        "processes: members that have committed or aborted count as prepared, and are aborted after the turn",
        "memsaver/distributed/processes.py",
        "self._prepared = [each for each in self._prepared if each is not rank]",
        "pass",
        ["integration/test_distributed.py::test_an_interrupted_rank_is_named_and_the_others_abort"],
    ),
    # The ledger
    Rewrite(
        "idle_chunks_of_the_dead_count_twice",
        "ledger: chunks of a process that has exited count as idle, and for the process that keeps them",
        "memsaver/ledger/accounts.py",
        "        pooled += report.pooled\n        if report.exited is not None:",
        "        if report.exited is None:\n            pooled += report.pooled\n        if report.exited is not None:",
        ["unit/test_ledger.py::test_chunks_of_a_process_that_has_exited_count_for_the_process_that_keeps_them"],
    ),
    Rewrite(
        "joined_rows_lose_one",
        "ledger: the bytes of one row vanish when the rows of a long report are joined",
        "memsaver/ledger/reports.py",
        "rows[: len(rows) - most + 1]",
        "rows[: len(rows) - most]",
        ["unit/test_ledger.py::test_a_report_survives_its_message_and_the_rows_of_a_long_one_are_joined"],
    ),
    # Drop-ins
    Rewrite(
        "wake_up_does_not_wait",
        "vLLM: a wake-up in a shared pool fails while another process still releases its memory",
        "memsaver/drop_in/vllm/allocator.py",
        "memory_timeout=_SHARED_POOL_S if shares() else 0.0",
        "memory_timeout=0.0",
        ["drop_in/test_shared_pools.py::test_engine_wakes_with_zeros_where_it_kept_no_contents[vllm]"],
    ),
    Rewrite(
        "weights_are_the_only_tensor_of_their_storage",
        "vLLM: a weight that is a part of a larger tensor is copied from the begin of that",
        "memsaver/drop_in/vllm/weights.py",
        "weight.storage_offset() + piece.offset",
        "piece.offset",
        ["drop_in/test_vllm_weights.py::test_write_equals_load_weights"],
    ),
    Rewrite(
        "a_failed_check_of_ranks_counts",
        "vLLM: the second sleep goes through although the check of the ranks has failed",
        "memsaver/drop_in/vllm/ranks.py",
        "    publish()\n    rank, ranks = world\n",
        "    publish()\n    store.was_checked = True\n    rank, ranks = world\n",
        ["drop_in/test_vllm_worker.py::test_rank_without_drop_in_is_named_by_each_check"],
    ),
    Rewrite(
        "retained_contents_outlast_the_pause",
        "torch_memory_saver: the retained copy of the last pause is held beside the copy of this one",
        "memsaver/drop_in/tms/saver.py",
        "                impl.retained.drop(chosen)\n                transitions.pause(chosen, lazy=lazy)\n",
        "                transitions.pause(chosen, lazy=lazy)\n                impl.retained.drop(chosen)\n",
        ["drop_in/test_tms_preload.py::test_retained_backups_outlive_a_resume_at_one_place"],
    ),
    Rewrite(
        "threads_stay_away_after_an_error",
        "torch_memory_saver: threads do not return to the default pool if a resume fails",
        "memsaver/drop_in/tms/saver.py",
        "            finally:  # some errors come when the regions are active\n",
        "            except ZeroDivisionError:\n                raise\n            else:\n",
        ["drop_in/test_tms_preload.py::test_error_leaves_no_region_aside"],
    ),
    # Tensors in other processes
    Rewrite(
        "a_loan_that_fails_keeps_its_claim",
        "sent tensors: a storage is kept for its receivers alone",
        "memsaver/_torch/ipc/server.py",
        "        except BaseException:\n            self.sent.unclaim(sent)\n",
        "        except BaseException:\n",
        ["integration/test_sent_tensors.py::test_a_receipt_that_fails_does_not_keep_the_storage"],
    ),
    Rewrite(
        "late_answers_are_taken_for_the_next",
        "sent tensors: an answer that came after its bound counts for the next question",
        "memsaver/broker/caller.py",
        "message.words[0] == serial",
        "message.words[0]",
        ["integration/test_sent_tensors.py::test_an_owner_that_does_not_answer_is_named_and_can_be_asked_again"],
    ),
    Rewrite(
        "refused_unmaps_end_the_lease",
        "sent tensors: the lease ends although the driver refused to unmap the memory",
        "memsaver/_torch/ipc/receiver.py",
        "if not use.memory.leave(use.device in idle):",
        "if use.memory.leave(use.device in idle) is None:",
        ["integration/test_sent_tensors.py::test_memory_that_the_driver_does_not_unmap_keeps_its_lease"],
    ),
    # Guests
    Rewrite(
        "answers_to_earlier_questions_count",
        "agreement: a rank that has opened its groups in an earlier round is not waited for",
        "memsaver/guests/agreement.py",
        "answer if at >= place else None",
        "answer",
        ["integration/test_meeting.py::test_groups_stay_open_on_no_rank_if_one_is_late"],
    ),
    Rewrite(
        "refusals_are_agreements",
        "agreement: a question that a rank has decided alone counts as answered by all",
        "memsaver/guests/agreement.py",
        "own if reason is None else agreed",
        "own",
        ["integration/test_meeting.py::test_rank_that_gives_up_after_the_gathering_ends_the_round_for_all"],
    ),
    Rewrite(
        "failed_leaves_keep_their_tags",
        "guests: the tags of a pause count as paused after a guest could not leave",
        "memsaver/_guests.py",
        " if away.get(tag, committed)}",
        "}",
        ["unit/test_guests.py::test_guests_are_away_exactly_while_their_tags_are_paused"],
    ),
    # Transitions
    Rewrite(
        "threads_that_entered_meanwhile_stay",
        "transitions: the default pool is checked before the wait in the queue alone",
        "memsaver/_moves.py",
        "                torch.check_pausable(leaving, self._thread)\n",
        "                pass\n",
        [
            "unit/test_background.py::test_entering_a_region_before_its_queued_pause_fails_the_pause",
        ],
    ),
    Rewrite(
        "contents_that_are_half_gone_are_recorded",
        "verify: a pause after a failed one compares with contents that were partly unmapped",
        "memsaver/_moves.py",
        "if each not in partly_unmapped:  # else",
        "if True:  # else",
        ["unit/test_verify.py::test_pause_after_a_failed_one_compares_the_first_contents"],
    ),
    Rewrite(
        "buffers_have_no_names",
        "stale: buffers that are not saved have no names",
        "memsaver/_torch/stale.py",
        "module.named_buffers(remove_duplicate=False)",
        "()",
        ["unit/test_stale.py::test_tensors_that_were_not_written_are_named"],
    ),
    Rewrite(
        "scratch_is_stale",
        "stale: an allocation in the place of a freed one counts as not written",
        "memsaver/_torch/routing.py",
        "        stale.allocated(region, made.data_ptr())\n",
        "",
        ["unit/test_stale.py::test_scratch_in_the_place_of_a_freed_tensor_is_not_stale"],
    ),
    Rewrite(
        "patterns_begin_with_the_tensor",
        "stale: the pattern is compared from its begin wherever a tensor lies in its allocation",
        "memsaver/_torch/stale.py",
        "patterns[(address - block) % 16]",
        "patterns[0]",
        ["unit/test_stale.py::test_one_piece_of_any_size_and_place_is_found"],
    ),
    Rewrite(
        "kv_caches_are_checked",
        "vLLM: the KV cache has to be written before the first forward pass",
        "memsaver/drop_in/tagged.py",
        '        found.written_in_use = tag == "kv_cache"\n',
        "",
        ["drop_in/test_vllm_worker.py::test_the_first_forward_pass_after_a_wake_up_needs_all_tensors_of_the_model"],
    ),
    Rewrite(
        "draft_models_are_not_checked",
        "SGLang: the runners of draft models are unknown until their first forward pass",
        "memsaver/drop_in/tms/__init__.py",
        "noted(runner.load_model, False)",
        "runner.load_model",
        ["drop_in/test_tms_sglang.py::test_the_first_pass_after_a_resume_needs_all_tensors_of_the_models"],
    ),
    Rewrite(
        "ranges_of_nvtx_do_not_end",
        "trace: a range of NVTX has no end",
        "memsaver/_results.py",
        "            self._end_range()\n",
        "            pass\n",
        ["unit/test_trace.py::test_each_transition_is_a_range_of_nvtx_however_it_ends"],
    ),
    Rewrite(
        "a_display_outlives_an_interrupted_call",
        "progress: the thread ends only if the call had the time to stop it",
        "memsaver/_results.py",
        " and recorder._ended is None",
        "",
        ["unit/test_progress.py::test_an_interrupt_while_the_display_begins_ends_it"],
    ),
    Rewrite(
        "gauges_of_ray_keep_closed_regions",
        "metrics: a gauge of Ray keeps the bytes of a region that was closed",
        "memsaver/metrics.py",
        "        _gauges[name].set(0.0, dict(tags))\n",
        "        pass\n",
        ["unit/test_metrics.py::test_the_gauges_of_ray_have_the_figures_of_the_collector"],
    ),
    Rewrite(
        "late_regions_are_resident",
        "phases: the first use of a late region does not wait",
        "memsaver/regions.py",
        "        if (coming := self._coming) is None:\n            return\n",
        "        return\n        coming = self._coming\n",
        ["unit/test_late.py::test_the_first_use_waits"],
    ),
    Rewrite(
        "late_tags_come_together",
        "groups: the first use of one late tag waits for all of them",
        "memsaver/turns/members.py",
        "if together else",
        "if True else",
        ["unit/test_late.py::test_late_tags_of_a_turn_come_one_after_the_other"],
    ),
    Rewrite(
        "turns_overtake_late_tags",
        "groups: a turn begins while late tags of the last one move",
        "memsaver/turns/members.py",
        "        halves.wait(timeout)\n",
        "",
        [
            "unit/test_late.py::test_a_turn_ends_before_late_and_lingering_tags_have_moved_and_the_next_one_waits_for_them",
        ],
    ),
    Rewrite(
        "errors_of_late_regions_stay",
        "phases: an error of a late region is raised in the next phase",
        "memsaver/turns/phases.py",
        "    late_tags.forget([*leaving, *staying])\n",
        "",
        ["unit/test_late.py::test_the_next_phase_forgets_the_errors_of_the_last_one"],
    ),
    Rewrite(
        "sources_are_not_held",
        "derived: a pause takes a source while a region is rebuilt from it",
        "memsaver/_moves.py",
        "            held += [other._core for other in found if other not in with_contents]\n",
        "",
        ["unit/test_derived.py::test_no_pause_takes_a_source_during_a_rebuild"],
    ),
    Rewrite(
        "a_failed_rebuild_counts",
        "derived: regions are active after a rebuild that raised",
        "memsaver/_moves.py",
        "                return False\n",
        "                return True\n",
        [
            "unit/test_derived.py::test_a_rebuild_that_fails_leaves_all_regions_of_the_resume_paused_with_their_contents",
        ],
    ),
    Rewrite(
        "rebuilds_have_no_order",
        "derived: regions are rebuilt in the order in which they were made",
        "memsaver/_moves.py",
        "sorted(derived, key=lambda each: tags.index(each.tag))",
        "list(derived)",
        ["unit/test_derived.py::test_regions_derived_from_derived_regions_are_rebuilt_in_order"],
    ),
    Rewrite(
        "contents_of_derived_regions_are_not_compared",
        "derived: verify records no contents of a region without a backup",
        "memsaver/_moves.py",
        "_live(each) if each in derived else ranges for",
        "ranges for",
        ["unit/test_derived.py::test_verify_names_the_tensors_that_a_wrong_rebuild_wrote"],
    ),
    Rewrite(
        "a_turn_without_a_source_begins",
        "derived: a turn pauses its ranks, and then finds no source",
        "memsaver/turns/turn.py",
        "if self._options.restores(rank.role, tag) and not self._has_source(rank, tag, source, state):",
        "if False:",
        [
            "unit/test_derived.py::test_a_turn_in_which_a_source_has_no_contents_is_refused_before_anything_moves",
        ],
    ),
    Rewrite(
        "pauses_are_expected_for_ever",
        "transitions: threads stay away from a default pool after the pause that was expected has ended",
        "memsaver/_moves.py",
        "        finally:\n            _call_all(self._ends)\n",
        "        finally:\n",
        ["unit/test_default_pool_python.py::test_threads_move_before_the_pause_and_back_after_the_resume"],
    ),
    # The process in the pool
    Rewrite(
        "a_broker_that_shuts_down_is_an_error",
        "shared pool: the first region fails if the broker shuts down at this moment",
        "memsaver/broker/pool_client.py",
        "                if discovery.accepts(path):\n                    raise\n",
        "                raise\n",
        ["integration/test_shared_pool.py::test_a_client_whose_broker_has_just_shut_down_joins_the_next_one"],
    ),
    # The example
    Rewrite(
        "the_oldest_is_preempted",
        "engine: the oldest request gives its blocks up",
        "examples/colocate/engine/scheduler.py",
        "victim = self.running.pop()",
        "victim = self.running.pop(0)",
        ["examples/test_engine_blocks.py::test_the_youngest_request_is_preempted_and_resumed_first"],
    ),
    Rewrite(
        "an_admission_leaves_no_blocks",
        "engine: a request is admitted with the blocks that the running ones need next",
        "examples/colocate/engine/scheduler.py",
        "self.blocks.allocate(sequence, reserve=len(self.running))",
        "self.blocks.allocate(sequence)",
        ["examples/test_engine_blocks.py::test_an_admitted_request_leaves_a_block_for_each_running_one"],
    ),
    Rewrite(
        "shared_idle_blocks_stay_free",
        "engine: idle blocks of the prefix count as free for the rest of the sequence",
        "examples/colocate/engine/block_manager.py",
        "if lacking + idle + reserve > self.num_free:",
        "if lacking + reserve > self.num_free:",
        ["examples/test_engine_blocks.py::test_sharing_a_free_block_takes_it_from_the_free_ones"],
    ),
    Rewrite(
        "the_start_of_a_prefix_goes_first",
        "engine: the first block of a cached prefix is handed out before the others",
        "examples/colocate/engine/block_manager.py",
        "for block in reversed(sequence.blocks):",
        "for block in sequence.blocks:",
        ["examples/test_engine_blocks.py::test_freed_contents_are_found_until_their_block_is_taken"],
    ),
    Rewrite(
        "rows_keep_the_table_of_the_last_sequence",
        "engine: a row of the batch reads blocks of the sequence that had it before",
        "examples/colocate/engine/batches.py",
        "self._tables[sequence.row, :",
        "self._tables[-1, :",
        ["examples/test_engine.py::test_no_schedule_changes_the_tokens"],
    ),
    Rewrite(
        "the_prefix_cache_outlives_a_pause",
        "engine: blocks are found by their digest after a pause has discarded them",
        "examples/colocate/engine/engine.py",
        "        advanced = self.drain()\n        self.drop_prefix_cache()\n",
        "        advanced = self.drain()\n",
        ["examples/test_engine.py::test_a_pause_of_running_requests_loses_none"],
    ),
    Rewrite(
        "log_probabilities_are_those_of_temperature_one",
        "engine: tokens are sampled at one temperature, their log-probabilities are of another",
        "examples/colocate/engine/ops.py",
        "scaled = logits / torch.where(temperature_B > 0, temperature_B, 1.0)[:, None]",
        "scaled = logits",
        ["examples/test_engine.py::test_logprobs_are_those_of_the_distribution_sampled"],
    ),
    Rewrite(
        "a_rank_compares_the_first_part",
        "engine: each rank compares its weights with the part of the first one",
        "examples/colocate/model/weight_layout.py",
        "rank * length if shared else 0",
        "0",
        ["examples/test_tensor_parallel.py::test_the_parts_of_all_ranks_are_each_parameter_once"],
    ),
    Rewrite(
        "weights_are_those_of_the_token_before",
        "trainer: importance weights are shifted by a token",
        "examples/colocate/trainer/trainer.py",
        "part.advantages_N, part.weights_N, self",
        "part.advantages_N, part.weights_N.roll(1), self",
        ["examples/test_trainer.py::test_a_weight_scales_the_gradient_of_its_own_token"],
    ),
    Rewrite(
        "gathered_weights_stay",
        "trainer: weights that recompute() has gathered are used after the next step",
        "examples/colocate/trainer/trainer.py",
        "                module.reshard()",
        "                pass",
        ["examples/test_trainer.py::test_addresses_and_contents_outlive_steps_and_pauses"],
    ),
    Rewrite(
        "gradients_of_the_last_step_stay",
        "trainer: a step adds to the gradients of the last one",
        "examples/colocate/trainer/trainer.py",
        "        self.optimizer.zero_grad(set_to_none=False)",
        "        if self.steps_taken == 0:\n            self.optimizer.zero_grad(set_to_none=False)",
        ["examples/test_trainer.py::test_gradients_from_before_a_step_are_ignored"],
    ),
    Rewrite(
        "a_target_is_the_token_that_predicts_it",
        "trainer: a packed row predicts each token from itself",
        "examples/colocate/trainer/batch.py",
        "predictors += range(end - count, end)",
        "predictors += range(end - count + 1, end + 1)",
        ["examples/test_trainer.py::test_a_model_of_transformers_computes_and_learns_the_same"],
    ),
    Rewrite(
        "a_sequence_sees_the_one_before_it",
        "trainer: a sequence of a packed row attends to tokens of the one before it",
        "examples/colocate/trainer/batch.py",
        "torch.tensor([row * longest + place for row, length in enumerate(lengths) for place in range(length)])",
        "torch.arange(bounds[-1])",
        ["examples/test_trainer.py::test_packing_chunks_and_accumulation_change_nothing"],
    ),
    Rewrite(
        "logits_are_those_of_temperature_one",
        "trainer: logits are not divided by the temperature of the samples",
        "examples/colocate/trainer/causal_lm.py",
        ".float() / temperature",
        ".float()",
        ["examples/test_trainer.py::test_the_engine_agrees_about_tokens_it_sampled"],
    ),
    Rewrite(
        "a_slice_is_written_elsewhere",
        "trainer: a slice of an engine gets the rows of the shard, from its first one on",
        "examples/colocate/trainer/weights.py",
        "slice(first - part.start, last - part.start)",
        "slice(first - begin, last - begin)",
        ["examples/test_weights.py::test_every_tensor_is_that_of_a_checkpoint_load"],
    ),
    Rewrite(
        "a_checksum_is_of_one_rank",
        "trainer: the checksums of weights are those of a rank's own shards",
        "examples/colocate/model/weight_layout.py",
        "        dist.all_reduce(found)\n",
        "        pass\n",
        ["examples/test_weights_processes.py::test_one_and_two_ranks_write_the_weights_of_their_checkpoint"],
    ),
    Rewrite(
        "a_completion_that_was_cut_off_is_rewarded",
        "rollout: a completion without an end has a reward",
        "examples/colocate/rollout.py",
        'if each.finish_reason == "stop"',
        "if each.tokens",
        ["examples/test_rollout.py::test_a_rollout_has_advantages_by_group_and_no_reward_for_what_was_cut_off"],
    ),
    Rewrite(
        "the_cap_is_in_nats",
        "GRPO: weights are cut at exp(cap)",
        "examples/colocate/grpo.py",
        ".clamp(max=math.log(cap)).exp()",
        ".clamp(max=cap).exp()",
        ["examples/test_grpo.py::test_weights_are_ratios_up_to_the_cap"],
    ),
    Rewrite(
        "words_at_any_address",
        "checksums for same_as: a GPU reads words at addresses that no word has, and its context dies",
        "memsaver/_torch/checksums.py",
        "contents = torch.cat([*pieces, pieces[0].new_zeros(missing)])",
        "contents = torch.cat([*pieces, pieces[0].new_zeros(missing)]) if missing or pieces[1:] else pieces[0]",
        ["unit/test_same.py::test_words_are_read_at_multiples_of_their_size"],
    ),
    Rewrite(
        "demands_wait_for_their_own_client",
        "broker: a demand waits for the caches of its own client, whose thread holds the GIL until it has memory",
        "memsaver/broker/reclaim.py",
        "self._asked.pop(head.client.id, None)",
        "pass",
        ["unit/test_pool.py::test_a_demand_asks_its_own_client_last_and_does_not_wait_for_its_gil"],
    ),
    Rewrite(
        "own_caches_before_offers",
        "broker: a process loses its caches by each of its demands, while others offer memory",
        "memsaver/broker/reclaim.py",
        " and (self._own_asked or client is not head.client)",
        "",
        ["unit/test_pool.py::test_a_demand_asks_its_own_client_last_and_does_not_wait_for_its_gil"],
    ),
    Rewrite(
        "own_caches_stay",
        "broker: a demand fails beside caches of its own client",
        "memsaver/broker/reclaim.py",
        " or self._ask_own(head, now)",
        "",
        ["unit/test_pool.py::test_a_demand_asks_its_own_client_last_and_does_not_wait_for_its_gil"],
    ),
    Rewrite(
        "offers_for_another_demand_are_a_round",
        "broker: a demand is refused before any cache was asked for, if offers for the last demand were under way",
        "memsaver/broker/reclaim.py",
        "bool(self._asked) and self._offering is None",
        "bool(self._asked)",
        ["unit/test_pool.py::test_a_round_after_an_answer_about_offers_ends_in_time"],
    ),
    Rewrite(
        "an_answer_about_offers_stays_open",
        "broker: each round after a request of offers may take as long as a copy",
        "memsaver/broker/reclaim.py",
        "                self._exhausted.add(client.id)\n            self._offering = None",
        "                self._exhausted.add(client.id)",
        ["unit/test_pool.py::test_a_round_after_an_answer_about_offers_ends_in_time"],
    ),
    Rewrite(
        "a_demand_takes_all_offers",
        "broker: a client is asked for more offered chunks than the demand lacks",
        "memsaver/broker/reclaim.py",
        "self._ask(client, now, head.remaining,",
        "self._ask(client, now, 1 << 40,",
        ["integration/test_shared_pool.py::test_offered_chunks_go_to_a_process_that_lacks_them"],
    ),
    Rewrite(
        "later_demands_hear_that_nobody_has_offers",
        "broker: the second of two demands is out of memory although enough is offered for both",
        "memsaver/broker/reclaim.py",
        "more=self._may_give",
        "more=False",
        ["integration/test_reclaim.py::test_a_later_demand_waits_while_clients_may_give_offers"],
    ),
    Rewrite(
        "unnamed_memory_of_vllm_is_checked",
        "vLLM: buffers of its runner in the region of the weights count as unwritten",
        "memsaver/drop_in/tagged.py",
        "only_named=True",
        "only_named=False",
        ["drop_in/test_vllm_worker.py::test_the_first_forward_pass_after_a_wake_up_needs_all_tensors_of_the_model"],
    ),
    Rewrite(
        "the_doctor_counts_pinned_memory_twice",
        "doctor: backups need all of their bytes, although the process holds pinned memory",
        "memsaver/doctor/host.py",
        'wanted - min(wanted, client["host_held_bytes"] or 0)',
        "wanted",
        ["unit/test_doctor.py::test_backups_that_do_not_fit_into_host_memory"],
    ),
    Rewrite(
        "the_doctor_reads_the_shell_alone",
        "doctor: variables of running processes are those of the shell",
        "memsaver/doctor/machine.py",
        'variables.get(name, "") for name in names',
        'self.variables.get(name, "") for name in names',
        ["unit/test_doctor.py::test_settings_of_torchs_allocator"],
    ),
    Rewrite(
        "paused_regions_are_fine",
        "doctor: a device whose regions are all paused is no warning",
        "memsaver/doctor/pools.py",
        '"note" if works else "warning"',
        '"note"',
        ["unit/test_doctor.py::test_regions_and_clients_in_reports"],
    ),
    Rewrite(
        "a_failing_check_ends_the_doctor",
        "doctor: the error of a check ends the command",
        "memsaver/doctor/findings.py",
        "except Exception as error",
        "except OSError as error",
        ["unit/test_doctor.py::test_a_check_that_fails_is_a_finding_and_the_others_run"],
    ),
    Rewrite(
        "errors_are_silent_about_the_doctor",
        "errors: an out-of-memory error with the memory of others has no line about the doctor",
        "memsaver/errors.py",
        "[*lines, CHECKED] if others else lines",
        "lines",
        ["unit/test_doctor.py::test_errors_whose_cause_is_checked_end_with_a_line"],
    ),
    Rewrite(
        "transitions_have_no_lanes",
        "trace: transitions side by side share a track, so their spans overlap",
        "memsaver/trace/writer.py",
        "if end <= began), len(self._lanes))",
        "), 0)",
        ["unit/test_trace.py::test_transitions_side_by_side_have_tracks_of_their_own"],
    ),
    Rewrite(
        "memory_before_a_transition_is_not_noted",
        "trace: memory that a region got since the last transition is missing",
        "memsaver/trace/writer.py",
        "text, beside = self._memory(began, before),",
        'text, beside = "",',
        ["unit/test_trace.py::test_memory_by_owner_is_a_counter"],
    ),
    Rewrite(
        "each_process_writes_a_beginning",
        "trace: processes that share a file write its beginning twice",
        "memsaver/trace/writer.py",
        "if not os.fstat(file).st_size:",
        "if True:",
        ["unit/test_trace.py::test_processes_can_share_a_file_and_a_broker_that_a_client_starts_writes_too"],
    ),
    Rewrite(
        "torn_lines_end_the_merge",
        "trace: a line that the end of a process has cut makes the file unreadable",
        "memsaver/trace/files.py",
        "except (ValueError, KeyError, TypeError):",
        "except KeyError:",
        ["unit/test_trace.py::test_the_file_of_a_killed_process_is_read_but_for_a_torn_line"],
    ),
    Rewrite(
        "clocks_of_several_boots_mix",
        "trace: files without a common clock are merged",
        "memsaver/trace/files.py",
        "if len(boots) > 1:",
        "if len(boots) > 2:",
        ["unit/test_trace.py::test_files_that_are_no_traces_or_of_another_boot_are_named"],
    ),
    Rewrite(
        "a_killed_process_keeps_its_memory_in_the_picture",
        "trace: the picture shows the regions of a process that has ended",
        "memsaver/trace/picture.py",
        "nbytes * min(1.0, lent / noted) if noted else 0.0",
        "nbytes",
        ["unit/test_trace.py::test_the_picture_has_each_owner_and_a_killed_process_holds_nothing"],
    ),
    Rewrite(
        "a_stall_is_noted_at_the_end",
        "trace: the demand of a client that waited names no holders",
        "memsaver/broker/timeline.py",
        "demand.stall_reported == demand.messages and",
        "demand.stall_reported < 0 and",
        ["unit/test_trace.py::test_a_wait_has_its_bytes_and_the_process_that_holds_them"],
    ),
    Rewrite(
        "sums_are_linear",
        "checksums for same_as: words are not folded, so two changed signs cancel each other",
        "memsaver/_torch/checksums.py",
        "return (words >> 32).bitwise_and_(_HALF).bitwise_xor_(words)",
        "return words",
        ["unit/test_same.py::test_changes_that_a_plain_sum_misses_change_the_sums"],
    ),
    Rewrite(
        "zeros_at_the_end_do_not_count",
        "checksums for same_as: a block that is longer by zeros has the same sums",
        "memsaver/_torch/checksums.py",
        "found[-1] -= missing",
        "pass",
        ["unit/test_same.py::test_changes_that_a_plain_sum_misses_change_the_sums"],
    ),
    Rewrite(
        "lazy_pauses_of_common_copies",
        "same_as: a lazy pause is not refused",
        "memsaver/transitions.py",
        "if each.same_as is not None and lazily.get(each.tag)",
        "if False and lazily.get(each.tag)",
        ["unit/test_same.py::test_other_policies_of_a_pause"],
    ),
    Rewrite(
        "an_error_keeps_the_copy",
        "same_as: the traceback of a failed pause keeps the copy, and other processes cannot change their contents",
        "memsaver/_moves.py",
        "common.clear()",
        "pass",
        ["unit/test_same.py::test_a_pause_that_fails_keeps_no_copy"],
    ),
    Rewrite(
        "contents_are_compared_while_they_change",
        "same_as: a comparison does not wait for work on the device",
        "memsaver/_moves.py",
        "_core.wait_idle(region.device, self._left())",
        "pass",
        ["unit/test_same.py::test_a_comparison_waits_for_work_in_flight_up_to_the_bound"],
    ),
    Rewrite(
        "ends_of_blocks_are_compared",
        "same_as: old bytes after the end of a tensor make contents differ",
        "memsaver/_torch/routing.py",
        "free = sorted(free + pools.ends())",
        "pass",
        ["unit/test_torch_pools.py::test_ends_of_blocks_have_no_place_in_a_common_copy"],
    ),
    Rewrite(
        "totals_are_those_of_the_history",
        "metrics: counters lose the transitions that have left the history",
        "memsaver/_results.py",
        "return dict(_totals)",
        """found: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for each in history():
            kind = "switch" if each.pause and each.resume else "pause" if each.pause else "resume"
            found["transitions", kind, each.outcome] += 1
        return dict(found)""",
        ["unit/test_metrics.py::test_transitions_that_left_the_history_or_were_dropped_are_counted_once"],
    ),
    Rewrite(
        "a_drop_after_an_abort_counts_again",
        "metrics: a transition that has ended counts again with each later end",
        "memsaver/_results.py",
        "            if self._ended is not None:\n                return\n            text",
        "            text",
        ["unit/test_metrics.py::test_the_collector_has_the_sums_of_the_history_and_the_bytes_of_stats"],
    ),
    Rewrite(
        "all_failures_are_of_one_class",
        "metrics: failures have the name of the base class",
        "memsaver/_results.py",
        '_totals["failures", type(error).__name__]',
        '_totals["failures", "Error"]',
        ["unit/test_metrics.py::test_the_collector_has_the_sums_of_the_history_and_the_bytes_of_stats"],
    ),
    Rewrite(
        "a_broker_that_does_not_answer_is_left_out",
        "metrics: the endpoint has no row for a broker that was killed",
        "memsaver/metrics.py",
        "answers.append(((name,), 0))",
        "pass",
        ["unit/test_metrics.py::test_a_broker_that_does_not_answer_is_down"],
    ),
]
