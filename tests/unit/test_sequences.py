"""Random sequences of all actions on regions, in which some calls fail, against a model.

After any failure, contents that a policy keeps are neither lost nor changed, and nothing is leaked.
"""

from __future__ import annotations

import ctypes
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memsaver
from tests import controls
from tests.support import KIB, MIB, PAGE, Ledger, drop_backups, host_held_bytes, unnamed_files, use_device

SEQUENCES = 600 if "MEMSAVER_TEST_SLOW" in os.environ else 200
STEPS = 12
SIZES = [100, 4096, 4097, 100 * KIB, 300 * KIB, 700 * KIB + 1, PAGE, 3 * MIB + 5]
LARGE = 40 * MIB  # two of them and more are several batches
MOST = 7  # pieces of a region
RANDOM = np.random.default_rng(0).integers(0, 256, LARGE + 8 * MIB, np.uint8)  # contents of pieces are cut from it
FILLED = {"zero": np.zeros(LARGE, np.uint8), "poison": np.full(LARGE, 0xFF, np.uint8)}
MADE: list[dict[str, Any]] = [
    {"backup": "none"},
    {"backup": "none", "fill": "zero"},
    {"backup": "none", "fill": "poison"},
    {"backup": "host"},
    {"backup": "host"},
    {"backup": "host", "fill": "poison"},
    {"backup": "host", "frozen": True},
    {"backup": "disk"},
    {"backup": "disk", "fill": "zero"},
    {"backup": "disk", "frozen": True},
]

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def holds(address: int, nbytes: int, what: np.ndarray[Any, Any], start: int = 0) -> bool:
    return bool(_memcmp(address, what.ctypes.data + start, nbytes) == 0)


class Piece:
    """A tensor of a region, and where in RANDOM the bytes are that it should hold."""

    def __init__(self, region: memsaver.Region, nbytes: int) -> None:
        self.tensor = region.empty(nbytes, torch.uint8)
        self.nbytes = nbytes
        self.address = self.tensor.data_ptr()
        self.start = 0

    def write(self, start: int) -> None:
        self.start = start
        ctypes.memmove(self.address, RANDOM.ctypes.data + start, self.nbytes)

    def is_at(self, address: int) -> bool:
        return holds(address, self.nbytes, RANDOM, self.start)


@dataclass(eq=False)
class Member:
    """A region of a sequence, and its expected state."""

    region: memsaver.Region
    pieces: list[Piece] = field(default_factory=list)
    contents: str = "kept"  # or "filled", or "undefined"

    def lose(self) -> None:
        self.contents = "filled" if self.region.fill else "undefined"

    @property
    def takes(self) -> bool:
        """Whether it can be written to."""
        return self.region.state == "active" and not self.region._core.sealed


@dataclass
class Move:
    """A transition that was asked for."""

    out: list[Member]
    back: list[Member]
    backup: str | None
    restore: bool
    begun: memsaver.Transition | memsaver.TransitionFuture | None = None

    def begin(self, wait: bool) -> None:
        self.begun = (memsaver.switch if wait else memsaver.start)(
            pause=[each.region.tag for each in self.out],
            resume=[each.region.tag for each in self.back],
            backup=self.backup,
            restore=self.restore,
        )

    def gives_up(self, member: Member) -> bool:
        return (self.backup or member.region.backup) == "none"


class Sequence:
    """Some regions, the actions on them, and their expected contents."""

    def __init__(self, regions: list[memsaver.Region], rng: random.Random) -> None:
        self.rng = rng
        self.members = [Member(region) for region in regions]
        self.views: dict[Piece, tuple[torch.Tensor, int]] = {}  # that may outlive the resume, and their contents
        self.touched: list[Member] = []
        self.errors = 0

    def step(self) -> None:
        acts = [self.grow, self.grow, self.write, self.drop, self.edit, self.thaw, self.release]
        act = self.rng.choice(acts + [self.move] * 6 + [self.move_in_the_background] * 2)
        if self.rng.random() < 0.5:
            controls.arm(self.rng.randint(1, self.rng.choice([6, 12, 40])), self.rng.choice(["error", "memory"]))
        try:
            act()
        except memsaver.Error:
            self.errors += 1
        controls.disarm()
        self.check(self.touched)
        self.touched = []

    def pick(self, fits: Callable[[Member], bool]) -> Member | None:
        fitting = [member for member in self.members if fits(member)]
        self.touched = [self.rng.choice(fitting)] if fitting else []
        return self.touched[0] if fitting else None

    def start(self, nbytes: int) -> int:
        return self.rng.randrange(RANDOM.size - nbytes)

    def refill(self, member: Member) -> None:
        """After a loss all is written anew."""
        if member.contents != "kept":
            for piece in member.pieces:
                piece.write(self.start(piece.nbytes))
        member.contents = "kept"

    # Actions

    def begin(self) -> None:
        """Every region has some contents, with gaps."""
        for member in self.members:
            for _ in range(3):
                self.add_piece(member)
            self.rng.shuffle(member.pieces)
            del member.pieces[self.rng.randint(1, 3) :]

    def grow(self) -> None:
        member = self.pick(lambda member: member.takes and len(member.pieces) < MOST)
        if member is not None:
            self.refill(member)
            self.add_piece(member)

    def add_piece(self, member: Member) -> None:
        nbytes = LARGE if self.rng.random() < 0.02 else self.rng.choice(SIZES)
        piece = Piece(member.region, nbytes)
        piece.write(self.start(nbytes))
        member.pieces.append(piece)

    def write(self) -> None:
        member = self.pick(lambda member: member.takes and bool(member.pieces))
        if member is not None:
            self.refill(member)
            piece = self.rng.choice(member.pieces)
            piece.write(self.start(piece.nbytes))

    def drop(self) -> None:
        member = self.pick(lambda member: bool(member.pieces))
        if member is not None:
            piece = member.pieces.pop(self.rng.randrange(len(member.pieces)))
            self.views.pop(piece, None)

    def edit(self) -> None:
        """Reads, and writes, a piece where it waits."""
        member = self.pick(
            lambda member: member.region.state == "paused" and bool(member.pieces) and member.contents == "kept"
        )
        if member is None:
            return
        piece = self.rng.choice(member.pieces)
        whole = member.region.mapped_bytes == 0
        clone = self.rng.random() < 0.5
        calls = controls.calls()
        try:
            found = memsaver.cpu_backup(piece.tensor, clone=clone)
        except memsaver.BackupError as error:
            in_file = "the contents are in a file" in str(error)
            assert (in_file and not clone) or not whole or controls.calls() > calls or "host_limit" in str(error)
            raise
        assert piece.is_at(found.data_ptr())
        if not clone:
            self.views.pop(piece, None)
            piece.start = self.start(piece.nbytes)
            ctypes.memmove(found.data_ptr(), RANDOM.ctypes.data + piece.start, piece.nbytes)
            if self.rng.random() < 0.5 and not member.region.frozen:
                self.views[piece] = found, piece.start

    def thaw(self) -> None:
        member = self.pick(lambda member: member.region.frozen)
        if member is not None:
            member.region.thaw()

    def release(self) -> None:
        memsaver.release_host_memory()

    def some_move(self) -> Move:
        chosen = self.rng.sample(self.members, self.rng.randint(1, 3))
        cut = self.rng.randint(0, len(chosen))
        backup = self.rng.choice([None] * 5 + ["none", "host", "disk"])
        return Move(chosen[:cut], chosen[cut:], backup, restore=self.rng.random() < 0.9)

    def move(self) -> None:
        move = self.some_move()
        self.touched = move.out + move.back
        before = {member: member.region.state for member in self.touched}
        held = {piece: piece.start for member in self.touched for piece in member.pieces}
        try:
            move.begin(wait=True)
        finally:
            assert held == {piece: piece.start for member in self.touched for piece in member.pieces}
            for member in self.touched:
                change = before[member], member.region.state
                if change == ("active", "paused") and move.gives_up(member):
                    member.lose()
                if change == ("paused", "active") and not move.restore:
                    member.lose()

    def move_in_the_background(self) -> None:
        moves = [self.some_move() for _ in range(self.rng.randint(1, 3))]
        self.touched = list({member: None for move in moves for member in move.out + move.back})
        state: dict[Member, str | None] = {member: member.region.state for member in self.touched}
        for move in moves:
            move.begin(wait=False)
        failed: memsaver.Error | None = None
        for move in moves:
            assert move.begun is not None
            try:
                if isinstance(move.begun, memsaver.TransitionFuture):
                    move.begun = move.begun.result(60)
            except memsaver.Error as error:
                failed = error
            went_well = repr(move.begun).startswith("Transition(")
            for member in move.out:
                if move.gives_up(member) and state[member] != "paused":
                    member.lose() if went_well and state[member] == "active" else self.doubt(member)
                state[member] = "paused" if went_well else None
            for member in move.back:
                if not move.restore and state[member] != "active":
                    member.lose() if went_well and state[member] == "paused" else self.doubt(member)
                state[member] = "active" if went_well else None
        if failed is not None:
            raise failed

    def doubt(self, member: Member) -> None:
        """One of several transitions failed, so its effect before the next one cannot be seen from outside."""
        member.contents = "undefined"

    # Invariants

    def check(self, members: list[Member]) -> None:
        for member in members:
            region = member.region
            assert region.state in ("active", "paused")
            assert region.allocated_bytes == sum(-(-piece.nbytes // 512) * 512 for piece in member.pieces)
            assert [piece.tensor.data_ptr() for piece in member.pieces] == [piece.address for piece in member.pieces]
            if region.state != "active":
                continue
            for number, piece in enumerate(member.pieces):
                where = f"piece {number} of {len(member.pieces)}, {piece.nbytes} bytes, in {region.tag}"
                if member.contents == "kept":
                    assert piece.is_at(piece.address), where
                if member.contents == "filled":
                    assert holds(piece.address, piece.nbytes, FILLED[region.fill or ""]), where

    def end(self) -> None:
        tags = [member.region.tag for member in self.members]
        memsaver.resume(tags)
        self.check(self.members)
        for view, start in self.views.values():
            assert holds(view.data_ptr(), view.numel(), RANDOM, start)
        self.views.clear()
        if self.rng.random() < 0.3:  # all goes while it is paused
            memsaver.configure(host_limit=None)
            memsaver.pause(tags)
            assert all(member.region.mapped_bytes == 0 for member in self.members)
        for member in self.members:
            member.pieces.clear()
        memsaver.resume(tags)
        for member in self.members:
            member.region.thaw()
            assert (member.region.mapped_bytes, member.region.backup_bytes) == (0, 0)


@dataclass
class Roster:
    """The regions of all sequences. They exist until the process ends, and clean ones are reused."""

    directories: list[str]
    regions: list[memsaver.Region] = field(default_factory=list)
    clean: bool = False
    made: int = 0

    def draw(self, rng: random.Random) -> list[memsaver.Region]:
        memsaver.configure(disk_dir=self.directories[0 if rng.random() < 0.9 else 1])
        if not self.clean:
            self.made += 1
            self.regions = [
                memsaver.region(f"sequence {self.made}.{number}", device="cpu", **options)
                for number, options in enumerate(MADE)
            ]
        self.clean = False
        return rng.sample(self.regions, 4)


@pytest.fixture(scope="module")
def roster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Roster]:
    use_device()
    drop_backups()
    on_disk = str(tmp_path_factory.mktemp("files"))
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else on_disk) as in_memory:
        yield Roster([in_memory, on_disk])
        memsaver.configure(disk_dir=Path(on_disk).parent)


@pytest.mark.parametrize("seed", range(SEQUENCES))
def test_a_random_sequence_loses_and_leaks_nothing(roster: Roster, seed: int) -> None:
    rng = random.Random(seed)
    sequence = Sequence(roster.draw(rng), rng)
    ledger = Ledger()
    retains: list[int | str] = [0, 16 * MIB, "1GiB", "1GiB"]
    memsaver.configure(
        retain=rng.choice(retains),
        backup_ahead=rng.random() < 0.2,
        host_limit=None if rng.random() < 0.8 else host_held_bytes() + 20 * MIB,
    )
    sequence.begin()
    for _ in range(STEPS):
        sequence.step()
    memsaver.configure(retain=0, host_limit=None)
    if memsaver.stats().options["backup_ahead"]:
        memsaver.configure(backup_ahead=False)
        memsaver.release_host_memory()  # and the background rests
    sequence.end()
    ledger.check()
    assert [unnamed_files(directory) for directory in roster.directories] == [[], []]
    assert memsaver.stats().devices["cpu"].disk_used_bytes == 0
    roster.clean = True
