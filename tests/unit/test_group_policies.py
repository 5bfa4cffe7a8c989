"""Policies of a group's turns by phase, role and tag, with members of this process."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray")

import memsaver  # noqa: E402
from memsaver.ray import AsyncColocated, Colocated, Group  # noqa: E402
from memsaver.turns.members import _halves  # noqa: E402
from tests.group_support import Halved  # noqa: E402
from tests.support import EXPLORED, MIB, Block, Make, check, host_used_bytes, until  # noqa: E402

PHASES = {
    "rollout": {"engine": ["weights", "graphs"]},
    "train": {"trainer": ["params"]},
    "sync": {"engine": ["weights"], "trainer": ["params"]},
    "none": {},
}
PARTS = ("resident", "late", "lingering")
BACKUP: Any = {"train": {"engine": {"weights": "none"}}}
RESTORE: Any = {"sync": {"engine": {"weights": False}}}


class Side(Colocated):
    """A member with regions of 1, 2, ... MiB, all with backup="host". It can fail on its way in."""

    fails = ""

    def __init__(self, make: Make, *tags: str) -> None:
        self.tags = tags
        self.names = {tag: make("host") for tag in tags}
        self.blocks = {
            tag: Block(region, (number + 1) * MIB, seed=number)
            for number, (tag, region) in enumerate(self.names.items())
        }

    def resume(self, tags: Any = None, restore: Any = True, **bounds: Any) -> Any:
        if self.fails == "resume":
            raise OSError("not now")
        done = super().resume(tags, restore=restore, **bounds)
        if self.fails == "rebuild":
            raise OSError("not now")
        if self.fails == "own call":
            raise memsaver.BackupError("not now", needed_bytes=1, held_bytes=0)
        return done if self.fails != "return" else None

    def colocated_drain(self, tags: Any) -> None:
        if self.fails == "drain":
            raise OSError("not now")


def renamed(given: Any, names: dict[str, str]) -> Any:
    """Phases and policies with the regions' own tags, which no other test uses."""
    if isinstance(given, dict):
        return {names.get(key, key): renamed(value, names) for key, value in given.items()}
    if isinstance(given, list):
        return [names[tag] for tag in given]
    return given


class Pair:
    """An engine and a trainer in a group, in the phase "rollout"."""

    def __init__(self, make: Make, kind: type[Side] = Side, **policies: Any) -> None:
        self.engine, self.trainer = kind(make, "weights", "graphs"), Side(make, "params")
        regions = {**self.engine.names, **self.trainer.names}
        self.tags = {name: region.tag for name, region in regions.items()}
        self.weights, self.graphs, self.params = (regions[tag] for tag in ("weights", "graphs", "params"))
        self.group = Group(
            engine=self.engine, trainer=self.trainer, phases=renamed(PHASES, self.tags), **renamed(policies, self.tags)
        )
        self.enter("rollout")

    def enter(self, name: str, **options: Any) -> tuple[int, int]:
        """Bytes that the turn copied out, and in."""
        with self.group.enter(name, **renamed(options, self.tags)) as turn:
            sides = (turn.paused, turn.resumed)
            out, into = (sum(each.copied_bytes for ranks in side.values() for each in ranks) for side in sides)
        return out, into

    def refuses(self, name: str, text: str, **options: Any) -> Any:
        with pytest.raises(memsaver.Error, match=text) as raised:
            self.enter(name, **options)
        return raised.value

    @property
    def states(self) -> list[str]:
        return [each.state for each in (self.weights, self.graphs, self.params)]

    def sync(self) -> None:
        self.enter("sync")
        self.engine.blocks["weights"].fill(7)

    def check(self) -> None:
        for side in (self.engine, self.trainer):
            for block in side.blocks.values():
                if block.region.state == "active":
                    block.check()


@pytest.fixture
def pair(make: Make) -> Pair:
    return Pair(make, backup=BACKUP, restore=RESTORE)


def test_pauses_are_lazy_by_phase_role_and_tag(make: Make) -> None:
    pair = Pair(make, lazy={"train": {"engine": {"weights": True}}, "none": True})
    assert pair.enter("train")[0] == 2 * MIB  # the graphs
    assert (pair.weights.offered_bytes > 0, pair.graphs.offered_bytes) == (True, 0)
    assert pair.enter("rollout", lazy={"trainer": True}) == (0, 2 * MIB)
    assert pair.params.offered_bytes > 0
    assert pair.enter("none") == (0, 0)
    assert pair.enter("rollout") == (MIB, 0)  # the parameters, which pause again, and not lazily
    pair.check()
    pair.enter("train", lazy={"engine": {"weights": "copy"}})
    until(lambda: pair.weights.backup_bytes > 0 and not pair.weights.mapped_bytes)
    assert pair.weights.offered_bytes > 0
    pair.enter("rollout", lazy=True)
    pair.check()
    memsaver.configure(lazy=True)
    assert pair.enter("train", lazy={"engine": {"graphs": False}})[0] == 2 * MIB
    assert pair.enter("rollout") == (0, 2 * MIB)
    with pytest.raises(ValueError, match="lazy of 'trainer' names the tag"):
        pair.enter("train", lazy={"trainer": {"params": True}})
    for wrong, error in (("host", ValueError), (1, TypeError)):
        with pytest.raises(error, match=f"is {wrong!r}, expected True, False or 'copy'"):
            pair.enter("train", lazy={"engine": wrong})
    with pytest.raises(ValueError, match="lazy names the phase 'other'"):
        Pair(make, lazy={"other": True})


def test_discarded_contents_are_not_restored_by_other_phases_or_groups(pair: Pair) -> None:
    pair.enter("train")
    error = pair.refuses(
        "rollout", "engine 0 could not prepare to resume .*: BackupError: the contents of 'tag[0-9]+' "
    )
    assert (error.phase, error.role, error.rank) == ("rollout", "engine", 0)
    assert isinstance(error.__cause__, memsaver.BackupError)
    assert repr(pair.weights.tag) in str(error.__cause__)
    assert repr(pair.graphs.tag) not in str(error.__cause__)
    assert pair.states == ["paused", "paused", "active"]  # nothing has changed
    pair.refuses("rollout", "expected restore=False", restore={"engine": {"graphs": False}})
    # Another group of the same members refuses them too.
    other = Group(engine=pair.engine, phases={"on": {"engine": [pair.weights.tag]}, "off": {}})
    with pytest.raises(memsaver.Error, match="a pause kept no backup"), other.enter("on"):
        pytest.fail("entered")
    pair.sync()
    pair.enter("rollout")
    pair.check()


def test_a_turn_that_fails_to_prepare_keeps_all_contents(pair: Pair) -> None:
    for side, text in ((pair.engine, "prepare to pause"), (pair.trainer, "resume")):
        side.fails = "drain" if side is pair.engine else "resume"
        pair.refuses("train", text)
        side.fails = ""
        if side is pair.engine:
            assert (pair.states, pair.weights.discarded) == (["active", "active", "paused"], False)
            pair.enter("rollout")
            pair.check()
    # The second failed after the commit: the weights are discarded, and reported as discarded.
    assert (pair.states, pair.weights.discarded) == (["paused", "paused", "paused"], True)
    pair.refuses("rollout", "a pause kept no backup")
    pair.enter("train")
    pair.check()


def test_regions_resumed_for_writing_are_paused_without_contents_if_the_turn_fails(pair: Pair, make: Make) -> None:
    pair.enter("none", backup={"engine": {"weights": "none"}})
    pair.trainer.fails = "resume"
    used = host_used_bytes()
    pair.refuses("sync", "trainer 0 could not resume")
    assert (pair.states, pair.weights.discarded) == (["paused", "paused", "paused"], True)
    assert host_used_bytes() == used
    pair.trainer.fails = ""
    pair.refuses("rollout", "expected restore=False")
    pair.sync()
    pair.enter("rollout")
    pair.check()


def test_a_member_whose_override_of_resume_fails_pauses_again_what_it_has_resumed(make: Make) -> None:
    """The next turn resumes these tags again, so that the override can do its work."""
    pair = Pair(make)
    for fails, other in (("rebuild", ""), ("own call", ""), ("return", "resume")):
        for before, weights in (("rollout", "active"), ("none", "paused")):
            pair.engine.fails = pair.trainer.fails = ""
            pair.enter(before)
            pair.engine.fails, pair.trainer.fails = fails, other
            pair.refuses("sync", "could not resume .*: (OSError|BackupError): not now")
            assert pair.states == [weights, "paused", "paused"]  # the tags that were active before the turn stay active
    pair.engine.fails = pair.trainer.fails = ""
    pair.enter("sync")
    pair.enter("rollout")
    pair.check()


def test_contents_count_as_not_written_if_the_phase_fails(pair: Pair) -> None:
    for _ in range(2):  # contents move as the policies say
        assert pair.enter("train")[0] == 2 * MIB  # graphs, without the weights
        assert (pair.weights.discarded, pair.graphs.discarded) == (True, False)
        assert pair.enter("sync") == (0, 0)
        pair.engine.blocks["weights"].fill(3)
        assert pair.enter("rollout") == (MIB, 2 * MIB)
        pair.check()
        assert pair.enter("none")[0] == 3 * MIB  # by the regions' own policies
        pair.enter("rollout")
        pair.check()

    def breaks() -> None:
        with pytest.raises(OSError, match="broken"), pair.group.enter("sync"):
            raise OSError("broken")

    pair.enter("train")
    breaks()
    assert pair.states == ["active", "paused", "active"]
    pair.refuses("rollout", "the phase that was to write them failed; expected restore=False")
    assert pair.states == ["active", "paused", "active"]
    pair.enter("none")  # a copy that has no meaning
    pair.refuses("rollout", "the phase that was to write them failed")
    breaks()
    pair.refuses("rollout", "the phase that was to write them failed")
    pair.sync()
    pair.enter("rollout")
    pair.check()
    with pytest.raises(OSError, match="later"):
        with pair.group.enter("sync"):
            pair.engine.blocks["weights"].fill(9)
            with pair.group.enter("rollout"):
                raise OSError("later")
    pair.enter("rollout")
    pair.check()
    breaks()
    pair.refuses("rollout", "the phase that was to write them failed")
    pair.group.replace("engine", 0, pair.engine)  # a new member has contents of its own
    pair.enter("rollout")


def test_members_get_their_policies_by_tag() -> None:
    member = Halved()
    phases = {"on": {"engine": ["a", "b"], "other": ["c"]}, "off": {}}
    group = Group(engine=member, other=Halved(), phases=phases, backup={"off": {"engine": {"a": "none"}}})
    for backup, restore, kept, restored in [
        (None, None, {"a": "none"}, {"a": True, "b": True}),
        ({"engine": {"b": "none"}}, {"engine": {"b": False}}, {"a": "none", "b": "none"}, {"a": True, "b": False}),
        ({"engine": "host"}, {"engine": False}, {"a": "host", "b": "host"}, {"a": False, "b": False}),
        ("disk", False, {"a": "disk", "b": "disk"}, {"a": False, "b": False}),
        ({"other": "none"}, {"other": False}, {"a": "none"}, {"a": True, "b": True}),
    ]:
        group.enter("off", backup=backup)
        group.enter("on", restore=restore)
        assert [options["backup"] for method, _, options in member.calls if method == "prepare"] == [kept, None]
        assert [options["restore"] for method, _, options in member.calls if method == "resume"] == [restored]
        member.calls = []


def test_wrong_arguments_of_a_group_are_refused() -> None:
    engine, given = Halved(), {"engine": Halved(), "trainer": Halved(), "phases": PHASES}
    one: Any
    for kind, text, one in [
        (ValueError, "no roles", {"engine": None, "trainer": None}),
        (ValueError, "the role 'engine' has no members", {"engine": []}),
        (
            TypeError,
            ".* of the role 'engine' has no pause\\(\\), expected an object that derives",
            {"engine": object()},
        ),
        (TypeError, ".* is a class", {"engine": [Halved]}),
        (TypeError, "phase 'on' is .*, expected a dict", {"phases": {"on": ["weights"]}}),
        (ValueError, "no phase names a tag", {"phases": {"on": {}}}),
        (ValueError, "phase 'on' names the role 'x', expected one of", {"phases": {"on": {"x": []}}}),
        (TypeError, "phase 'on' for 'engine' is 'a', expected a list of tags", {"phases": {"on": {"engine": "a"}}}),
        (TypeError, "phase 'on' for 'engine' has 1, expected a string", {"phases": {"on": {"engine": [1]}}}),
        (ValueError, "phase 'on' for 'engine' has 'x', expected 'resident'", {"phases": {"on": {"engine": {"x": []}}}}),
        (TypeError, "backup is 'none', expected a dict of phase -> role -> tag", {"backup": "none"}),
        (ValueError, "backup names the phase 'x', expected one of 'rollout', 'train'", {"backup": {"x": "none"}}),
        (
            ValueError,
            ".* names the tag 'x', expected one that pauses",
            {"backup": {"train": {"engine": {"x": "none"}}}},
        ),
        (TypeError, "restore in phase 'sync' is 0, expected True or False", {"restore": {"sync": 0}}),
    ]:
        chosen = {name: value for name, value in {**given, **one}.items() if value is not None}
        with pytest.raises(kind, match="^" + text):
            Group(**chosen)
    for twice in ({"engine": engine, "trainer": engine}, {"engine": [engine, engine], "trainer": Halved()}):
        with pytest.raises(ValueError, match="is a member of 'engine' already, expected one place for each member"):
            Group(phases=PHASES, **twice)
    group = Group(engine=engine, trainer=Halved(), phases=PHASES)
    with pytest.raises(ValueError, match="of the role 'trainer' is a member of 'engine' already"):
        group.replace("trainer", 0, engine)
    for kind, text, one in [
        (ValueError, "there is no phase 'x'; there are 'rollout', ", {"name": "x"}),
        (ValueError, r"there is no phase \['x'\]; there are 'rollout', ", {"name": ["x"]}),
        (ValueError, "timeout is -1, expected seconds of 0 or more", {"timeout": -1}),
        (TypeError, "reader_timeout is None, expected seconds", {"reader_timeout": None}),
        (ValueError, "backup is 'x', expected one of 'none', ", {"backup": "x"}),
        (ValueError, "backup names the role 'x', expected one of 'engine', 'trainer'", {"backup": {"x": "none"}}),
        (ValueError, "restore names the role 'engine', expected one with .* resumes", {"restore": {"engine": False}}),
        (ValueError, "restore of 'trainer' names the tag 'x', .*: 'params'", {"restore": {"trainer": {"x": False}}}),
    ]:
        with pytest.raises(kind, match="^" + text):
            group.enter(**{"name": "train", **one})
    assert engine.calls == []
    for base in (Colocated, AsyncColocated):
        with pytest.raises(TypeError, match=r"Old overrides pause\(\), expected colocated_drain"):
            type("Old", (base,), {"pause": lambda self, tags=None: None})


def test_a_member_with_an_async_drain_and_no_loop_is_refused_by_name(make: Make) -> None:
    class Engine(Colocated):
        async def colocated_drain(self, tags: Sequence[str]) -> None:  # type: ignore[override]
            pass

    region = make("host")
    with pytest.raises(TypeError, match=r"Engine has an async method .*colocated_drain.*, expected .* AsyncColocated"):
        Engine().pause([region.tag])
    assert region.state == "active"


# Random turns


def random_phases(chance: random.Random, tags: dict[str, list[str]]) -> dict[str, dict[str, dict[str, list[str]]]]:
    parts = ["resident", "resident", "late", "lingering", "away"]
    phases: dict[str, dict[str, dict[str, list[str]]]] = {name: {role: {} for role in tags} for name in "abc"}
    for by_role, role in itertools.product(phases.values(), tags):
        for tag in tags[role]:
            if (part := chance.choice(parts)) != "away":
                by_role[role].setdefault(part, []).append(tag)
    return phases


@pytest.mark.parametrize("seed", range(EXPLORED or 8))
def test_regions_after_random_turns_with_failures_are_as_a_model_says(make: Make, seed: int) -> None:
    """``whole``: by tag, whether a phase can use the contents. None: it may be refused, as after a failed turn."""
    chance = random.Random(seed)
    sides = {"engine": Side(make, "weights", "graphs", "cache"), "trainer": Side(make, "params", "optimizer")}
    blocks = {block.region.tag: block for side in sides.values() for block in side.blocks.values()}
    tags = {role: [region.tag for region in side.names.values()] for role, side in sides.items()}
    owner = {tag: role for role in tags for tag in tags[role]}
    phases = random_phases(chance, tags)
    group = Group(phases=phases, **sides)  # type: ignore[arg-type]
    named = {tag for phase in phases.values() for parts in phase.values() for found in parts.values() for tag in found}
    whole: dict[str, bool | None] = dict.fromkeys(blocks, True)

    def settled() -> dict[str, str]:
        """The states after the moves of the last turn in the background."""
        for side in sides.values():
            _halves(side).wait(60)
        return {tag: block.region.state for tag, block in blocks.items()}

    def some(among: set[str], value: Any) -> dict[str, dict[str, Any]]:
        found = [tag for tag in sorted(among) if chance.random() < 0.25]
        return {role: {tag: value for tag in found if owner[tag] == role} for role in {owner[tag] for tag in found}}

    before = settled()
    for number in range(25):
        name = chance.choice(list(phases))
        parts = {part: {tag for each in phases[name].values() for tag in each.get(part, ())} for part in PARTS}
        coming, lingering = parts["resident"] | parts["late"], parts["lingering"]
        leaving = named - coming - lingering
        backup, restore = some(leaving | lingering, "none"), some(coming, False)
        dropped, unrestored = ({tag for each in given.values() for tag in each} for given in (backup, restore))
        role, fails = chance.choice(list(sides)), chance.choice(["", "", "drain", "resume", "rebuild", "own call"])
        sides[role].fails = fails
        said = f"seed {seed}, turn {number} to {name!r}, {role} fails: {fails!r}, {backup}, {restore}"
        text = ""
        try:
            with group.enter(name, backup=backup, restore=restore, timeout=60):
                after = settled()
                for tag in unrestored:
                    if after[tag] == "active":
                        blocks[tag].fill(number)
        except memsaver.Error as error:
            text = str(error)
        sides[role].fails, after = "", settled()
        failing = {tag for tag in tags[role] if fails}  # whose moves in the background may fail, too
        gone = {tag for tag in leaving | lingering if (before[tag], after[tag]) == ("active", "paused")}
        whole |= dict.fromkeys(gone & dropped, False)
        if not text:
            expected = {tag: "active" if tag in coming else "paused" for tag in named}
            assert all(after[tag] == expected[tag] for tag in leaving | parts["resident"]), said
            assert all(after[tag] == expected[tag] for tag in named - failing), said
            whole |= {tag: True if after[tag] == "active" else None for tag in unrestored}
            assert not [tag for tag in coming if whole[tag] is False and after[tag] == "active"], said
        elif "could not prepare" in text:
            assert fails or any(whole[tag] is not True for tag in coming - unrestored), f"{said}: {text}"
            assert after == before, f"{said}: {text}"
        else:
            assert fails, f"{said}: {text}"
            assert all(after[tag] == "paused" for tag in leaving), f"{said}: {text}"
            stays = [tag for tag in blocks if tag not in leaving and before[tag] == "active"]
            assert all(after[tag] == ("active" if tag in stays else "paused") for tag in blocks), f"{said}: {text}"
            whole |= dict.fromkeys(unrestored)
        check(blocks[tag] for tag in blocks if after[tag] == "active" and whole[tag])
        before = after
