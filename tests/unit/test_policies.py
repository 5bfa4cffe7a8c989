"""Policies of one call by tag, discarded contents, and backups that fail."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver
from memsaver import errors
from memsaver.transitions import prepare_pause
from tests import controls
from tests.support import MIB, Block, Make, blocks, check, drop_backups, free_bytes, host_held_bytes, host_used_bytes

HAS_RAY = find_spec("ray") is not None
if HAS_RAY:
    from memsaver.ray import Colocated


def is_poison(block: Block) -> bool:
    return bool((block.tensor.numpy() == 0xFF).all())


def test_a_pause_takes_policies_by_tag(make: Make) -> None:
    kept, given_up, own = make("host"), make("host"), make()
    held = blocks(kept, [3 * MIB]) + blocks(own, [2 * MIB])
    lost = blocks(given_up, [5 * MIB])
    tags = [kept.tag, given_up.tag, own.tag]
    pauses: list[Callable[..., memsaver.Transition]] = [
        lambda **policy: memsaver.pause(tags, **policy),
        lambda **policy: memsaver.switch(pause=tags, **policy),
        lambda **policy: prepare_pause(tags, **policy).commit(),
        lambda **policy: memsaver.start(pause=tags, **policy).result(),
    ]
    if HAS_RAY:
        pauses.append(lambda **policy: Colocated().pause(tags, **policy))
    for pause in pauses:
        moved = pause(backup={given_up.tag: "none", own.tag: "host"})
        assert moved.copied_bytes == 5 * MIB
        assert (kept.backup_bytes, given_up.backup_bytes, own.backup_bytes) == (3 * MIB, 0, 2 * MIB)
        memsaver.resume(tags)
        check(held)
    del lost


def test_wrong_policies_are_refused_before_anything_changes(make: Make) -> None:
    out, into = make("host"), make("host")
    held = blocks(out, [MIB]) + blocks(into, [MIB])
    into.pause()
    switch = partial(memsaver.switch, pause=out.tag, resume=into.tag)
    pauses = [switch, partial(memsaver.pause, out.tag), partial(prepare_pause, out.tag)]
    resumes = [switch, partial(memsaver.resume, into.tag)]
    wrong: list[tuple[list[Any], type[Exception], str, Any]] = [
        (pauses, ValueError, f"backup for {out.tag!r} is 'floppy', expected one of 'none', ", {out.tag: "floppy"}),
        (pauses, ValueError, f"backup for {out.tag!r} is None, expected one of", {out.tag: None}),
        (pauses, ValueError, f"backup names the tag {into.tag!r}, expected .* pauses: {out.tag!r}", {into.tag: "none"}),
        (pauses, ValueError, "backup is 3, expected one of", 3),
        (resumes, ValueError, f"restore names the tag {out.tag!r}, .* resumes: {into.tag!r}", {out.tag: True}),
        (resumes, TypeError, f"restore for {into.tag!r} is 'no', expected True or False", {into.tag: "no"}),
        (resumes, TypeError, "restore is None, expected True or False", None),
    ]
    controls.disarm()
    for calls, kind, text, given in wrong:
        for call in calls:
            with pytest.raises(kind, match=f"^{text}"):
                call(**{text.partition(" ")[0]: given})
    assert controls.calls() == 0
    assert (out.state, into.state) == ("active", "paused")
    held[0].check()


def test_a_resume_and_a_phase_take_restore_by_tag(make: Make) -> None:
    kept, written = make("host"), make("host", fill="poison")
    held, blank = blocks(kept, [3 * MIB]), blocks(written, [5 * MIB])
    tags = [kept.tag, written.tag]
    resumes: list[Callable[..., memsaver.Transition]] = [
        lambda **choice: memsaver.resume(tags, **choice),
        lambda **choice: memsaver.switch(resume=tags, **choice),
    ]
    if HAS_RAY:
        resumes.append(lambda **choice: Colocated().resume(tags, **choice))
    for resume in resumes:
        blank[0].fill(1)
        memsaver.pause(tags)
        assert resume(restore={written.tag: False}).copied_bytes == 3 * MIB
        held[0].check()
        assert is_poison(blank[0])
        memsaver.pause(tags)
        assert resume(restore={kept.tag: True}).copied_bytes == 8 * MIB
    blank[0].fill(1)
    memsaver.define_phase("policies on", resident=[kept.tag])
    memsaver.define_phase("policies off", resident=[written.tag])
    with memsaver.phase("policies on"):
        held[0].check()
    with memsaver.phase("policies off", backup={kept.tag: "none"}, restore={written.tag: False}) as moved:
        assert moved.copied_bytes == 0
        assert (kept.discarded, is_poison(blank[0])) == (True, True)


def test_a_region_reports_discarded_contents(make: Make) -> None:
    region, own, empty, other = make("host"), make(), make("host"), make()
    held = blocks(region, [5 * MIB]) + blocks(own, [MIB])
    assert not region.discarded
    region.pause()
    assert not region.discarded
    region.resume(restore=False)
    prepared = prepare_pause(region.tag, backup="none")
    assert not region.discarded
    prepared.abort()
    assert (region.discarded, region.state) == (False, "active")
    prepare_pause(region.tag, backup="none").commit()
    assert (region.discarded, region.state) == (True, "paused")
    region.pause(backup="host")  # paused already
    assert region.discarded
    room = other.empty((free_bytes() - 2 * MIB,), torch.uint8)  # not written: that would take seconds
    with pytest.raises(memsaver.OutOfMemoryError):
        region.resume(restore=False)
    assert (region.discarded, region.state) == (True, "paused")
    del room
    region.resume(restore=False)
    assert not region.discarded
    for each in (own, empty):  # nothing is lost that its policy keeps
        each.pause(backup="none")
        assert not each.discarded
    del held


@pytest.mark.parametrize("shortage", ["host memory", "directory", "host memory for a file"])
def test_a_backup_error_names_regions_units_and_a_remedy(make: Make, tmp_path: Path, shortage: str) -> None:
    memsaver.configure(disk_dir=tmp_path)
    drop_backups()  # those of other files: idle memory beside them would serve
    region, other = make("host" if shortage == "host memory" else "disk"), make()
    held = blocks(region, [host_held_bytes() - host_used_bytes() + 5 * MIB])  # more than the idle bytes
    tmp_path.rmdir()
    if shortage != "directory":
        tmp_path.mkdir()
        memsaver.release_host_memory()
        memsaver.configure(host_limit=0)
    for pause in (lambda: memsaver.pause([region, other]), lambda: prepare_pause([region, other])):
        with pytest.raises(memsaver.BackupError) as caught:
            pause()
        error, text = caught.value, str(caught.value)
        assert error.regions == pickle.loads(pickle.dumps(error)).regions == (region.tag,)
        assert text.startswith(f"no backup for {region.tag!r}: ")
        figures = [f"{errors.gib(error.needed_bytes)} needed", "held", f"{errors.gib(error.available_bytes)} available"]
        assert all(f"{each}" in text for each in figures) and text.endswith("; nothing has changed")
        remedies = {
            "host memory": "raise configure(host_limit=...), or pause with backup='disk' or 'none'",
            "directory": "choose another configure(disk_dir=...), or pause with backup='none'",
            # Contents pass through pinned host memory: another directory would not help.
            "host memory for a file": "raise configure(host_limit=...), or pause with backup='none'",
        }
        assert [each for each in remedies if remedies[each] in text] == [shortage]
    memsaver.configure(host_limit=None)
    tmp_path.mkdir(exist_ok=True)
    region.pause()
    region.resume()
    held[0].check()
