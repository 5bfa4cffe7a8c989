"""NCCL communicators as guests, on a library without a GPU that has NCCL's calls."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memsaver
from memsaver.guests import Communicators, ProcessGroups, communicators, for_nccl, nccl
from tests.support import MIB, ROOT

INVALID_USAGE = 5


def compiled(folder: Path, name: str, *flags: str) -> str:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    path = str(folder / name)
    subprocess.run(
        [compiler, "-shared", "-fPIC", *flags, str(ROOT / "tests/fakes/fake_nccl.c"), "-o", path], check=True
    )
    return path


class Fake:
    """A library, and the communicators of this test."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.calls = ctypes.CDLL(path)
        self.calls.fake_comm_new.restype = ctypes.c_void_p
        self.handles: dict[str, int] = {}

    def make(self, name: str, persistent_bytes: int = MIB, dynamic_bytes: int = 4 * MIB) -> int:
        made = self.calls.fake_comm_new(ctypes.c_uint64(persistent_bytes), ctypes.c_uint64(dynamic_bytes))
        self.handles[name] = made
        return int(made)

    def set(self, what: str, name: str, value: int) -> None:
        self.calls[f"fake_{what}"](ctypes.c_void_p(self.handles[name]), value)

    def calls_of(self, name: str) -> int:
        return int(self.calls.fake_calls(ctypes.c_void_p(self.handles[name])))

    def suspended(self) -> list[str]:
        return [name for name, each in self.handles.items() if self.calls.fake_suspended(ctypes.c_void_p(each))]


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled(tmp_path_factory.mktemp("new"), "libnccl.so.2", "-DVERSION=22907", "-DSUSPENDS", "-DDEVICES")


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compiled(tmp_path_factory.mktemp("old"), "libnccl_old.so", "-DVERSION=22809")


@pytest.fixture
def fake(newer: str) -> Fake:
    made = Fake(newer)
    for name in ("world", "first", "second"):
        made.make(name)
    return made


@pytest.fixture
def guest(fake: Fake, tag: str) -> Iterator[Communicators]:
    made = Communicators(tag, communicators=lambda: fake.handles, library=fake.path, timeout=30)
    memsaver.register(made)
    yield made
    memsaver.unregister(made)


def test_communicators_are_suspended_while_their_tag_is_paused(fake: Fake, guest: Communicators) -> None:
    assert memsaver.stats().guests[0].nbytes == 15 * MIB
    memsaver.pause(guest.tags)
    assert fake.suspended() == guest.suspended == ["world", "first", "second"]
    assert memsaver.stats().guests[0].nbytes == 3 * MIB
    memsaver.resume(guest.tags)
    assert fake.suspended() == guest.suspended == []
    assert {name: len(each) for name, each in guest.seconds_by_group.items()} == dict.fromkeys(fake.handles, 2)


def test_communicator_that_does_not_block_is_awaited(fake: Fake, guest: Communicators) -> None:
    fake.set("poll", "first", 3)
    memsaver.pause(guest.tags)
    assert fake.suspended() == ["world", "first", "second"]
    fake.set("poll", "first", 3)
    memsaver.resume(guest.tags)
    assert fake.suspended() == []


def test_refused_suspension_resumes_the_others_and_names_the_error(fake: Fake, guest: Communicators) -> None:
    fake.set("fail", "second", INVALID_USAGE)
    with pytest.raises(memsaver.GuestError, match=r"could not leave.*ncclCommSuspend\(\).*error 5, invalid usage"):
        memsaver.pause(guest.tags)
    assert fake.suspended() == []
    assert memsaver.stats().guests[0].state == "here"
    fake.set("fail", "second", 0)
    memsaver.pause(guest.tags)
    assert len(fake.suspended()) == 3


def test_failed_resume_continues_where_it_failed(fake: Fake, guest: Communicators) -> None:
    memsaver.pause(guest.tags)
    fake.set("fail", "first", INVALID_USAGE)
    with pytest.raises(memsaver.GuestError, match=r"could not come back.*ncclCommResume\(\)"):
        memsaver.resume(guest.tags)
    assert fake.suspended() == ["world", "first"]
    fake.set("fail", "first", 0)
    memsaver.resume(guest.tags)
    assert fake.suspended() == []


def test_pause_after_a_failed_undoing_suspends_the_rest(fake: Fake, guest: Communicators) -> None:
    suspend = guest._library.suspend

    def breaking(communicator: int) -> None:
        if communicator == fake.handles["second"]:
            fake.set("fail", "world", INVALID_USAGE)
            raise OSError("refused")
        suspend(communicator)

    guest._library.suspend = breaking  # type: ignore[method-assign]
    with pytest.raises(memsaver.GuestError):
        memsaver.pause(guest.tags)
    assert fake.suspended() == ["world"]
    guest._library.suspend = suspend  # type: ignore[method-assign]
    fake.set("fail", "world", 0)
    memsaver.pause(guest.tags)
    assert len(fake.suspended()) == 3
    memsaver.resume(guest.tags)
    assert fake.suspended() == []


def test_resume_that_waits_for_a_dead_rank_ends_at_its_bound(fake: Fake, tag: str) -> None:
    guest = Communicators(tag, communicators=lambda: {"world": fake.handles["world"]}, library=fake.path, timeout=0.1)
    guest.leave()
    fake.set("hang", "world", 1)
    try:
        with pytest.raises(TimeoutError, match="world could not be resumed within 0.1 s"):
            guest.come_back()
        assert guest.suspended == ["world"]
    finally:
        fake.set("hang", "world", 0)


# Calls that go on after their bound


@pytest.fixture
def impatient(fake: Fake, tag: str) -> Iterator[Communicators]:
    yield Communicators(tag, communicators=lambda: fake.handles, library=fake.path, timeout=0.1)
    for name in fake.handles:
        fake.set("hang", name, 0)


def test_no_call_runs_beside_one_that_has_not_ended(fake: Fake, impatient: Communicators) -> None:
    fake.set("hang", "first", 1)
    with pytest.raises(TimeoutError, match="first could not be suspended within 0.1 s; the call goes on"):
        impatient.leave()
    for again in (impatient.come_back, impatient.leave):
        with pytest.raises(
            TimeoutError, match=r"earlier pause or resume still runs after \d+ s: first is to be suspended"
        ):
            again()
    assert [fake.calls_of(name) for name in ("world", "first", "second")] == [1, 1, 0]


def test_suspension_that_ended_late_is_taken_into_account(fake: Fake, impatient: Communicators) -> None:
    fake.set("hang", "first", 1)
    with pytest.raises(TimeoutError):
        impatient.leave()
    fake.set("hang", "first", 0)
    impatient.timeout = 30
    impatient.leave()
    assert impatient.suspended == fake.suspended() == ["world", "first", "second"]
    assert {name: fake.calls_of(name) for name in fake.handles} == dict.fromkeys(fake.handles, 1)
    impatient.come_back()
    assert fake.suspended() == impatient.suspended == []


def test_resume_that_ended_late_is_taken_into_account(fake: Fake, impatient: Communicators) -> None:
    impatient.leave()
    fake.set("hang", "second", 1)
    with pytest.raises(TimeoutError, match="second could not be resumed"):
        impatient.come_back()
    fake.set("hang", "second", 0)
    impatient.timeout = 30
    impatient.come_back()
    assert fake.suspended() == impatient.suspended == []
    assert fake.calls_of("second") == 2
    assert {len(each) for each in impatient.seconds_by_group.values()} == {2}


def test_late_failure_is_not_one_of_the_next_pause(fake: Fake, impatient: Communicators) -> None:
    fake.set("hang", "first", 1)
    with pytest.raises(TimeoutError):
        impatient.leave()
    fake.set("fail", "first", INVALID_USAGE)
    fake.set("hang", "first", 0)
    running = impatient._running
    assert running is not None
    assert running.call.wait(30)
    fake.set("fail", "first", 0)
    impatient.timeout = 30
    impatient.leave()
    assert len(fake.suspended()) == len(impatient.suspended) == 3


# Communicators that were destroyed


def test_communicator_that_was_destroyed_while_it_was_suspended_is_not_touched(fake: Fake, tag: str) -> None:
    there = dict(fake.handles)
    guest = Communicators(tag, communicators=lambda: there, library=fake.path, timeout=30)
    guest.leave()
    del there["first"]
    there["second"] = fake.make("another second")
    assert guest.nbytes == MIB
    guest.leave()  # the one that has the name now
    assert guest.suspended == ["world", "second"]
    guest.come_back()
    assert fake.suspended() == ["first", "second"]
    assert guest.suspended == []
    assert fake.calls_of("first") == fake.calls_of("second") == 1
    assert fake.calls_of("another second") == 2


def test_communicator_that_was_destroyed_during_a_pause_is_not_touched(fake: Fake, tag: str) -> None:
    there = dict(fake.handles)
    guest = Communicators(tag, communicators=lambda: there, library=fake.path, timeout=30)
    suspend = guest._library.suspend

    def destroying(communicator: int) -> None:
        suspend(communicator)
        there.pop("second", None)

    guest._library.suspend = destroying  # type: ignore[method-assign]
    guest.leave()
    assert fake.suspended() == guest.suspended == ["world", "first"]


# Devices


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """The devices that become current, and whether this is in the main thread."""
    made: list[tuple[bool, int]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    in_main = lambda: threading.current_thread() is threading.main_thread()  # noqa: E731
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: made.append((in_main(), device)))
    return made


def test_calls_run_on_the_device_of_the_communicator(
    fake: Fake, guest: Communicators, current: list[tuple[bool, int]]
) -> None:
    fake.set("device", "first", 3)
    guest.leave()
    assert current == [(False, 0), (False, 3), (False, 0)]
    guest.come_back()
    assert current[3:] == [(False, 0), (False, 3), (False, 0)]


def test_calls_run_on_the_current_device_if_nccl_does_not_return_another(
    tmp_path: Path, tag: str, current: list[tuple[bool, int]]
) -> None:
    without = Fake(compiled(tmp_path, "libnccl_without.so", "-DVERSION=22907", "-DSUSPENDS"))
    without.make("world")
    Communicators(tag, communicators=lambda: without.handles, library=without.path).leave()
    assert current == [(False, 1)]


# Which library


def test_older_nccl_is_refused_with_its_version(older: str, tag: str) -> None:
    with pytest.raises(memsaver.Error, match="has NCCL 2.28.9, expected 2.29.7 or newer"):
        Communicators(tag, library=older)
    assert not nccl.Library(older).can_suspend


def test_new_version_without_the_calls_cannot_suspend(tmp_path: Path) -> None:
    assert not nccl.Library(compiled(tmp_path, "libnccl_odd.so", "-DVERSION=22907")).can_suspend


def test_calls_of_an_older_version_are_not_used(tmp_path: Path) -> None:
    """A version before the release may have other signatures."""
    assert not nccl.Library(compiled(tmp_path, "libnccl_pre.so", "-DVERSION=22906", "-DSUSPENDS")).can_suspend


def test_loaded_library_is_found(fake: Fake, tmp_path: Path) -> None:
    """The process may have another one as well, that of torch."""
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if fake.path in line]
    listing = tmp_path / "maps"
    listing.write_text(
        "\n".join([*maps, "7f00-7f01 r--p 0 08:01 1   /usr/lib/libncclient.so", "7f02-7f03 rw-p 0 0:0 0 "])
    )
    found = nccl.loaded(listing)
    assert found is not None
    assert (found.path, found.version) == (fake.path, 22907)
    listing.write_text("")
    assert nccl.loaded(listing) is None


def test_guest_for_nccl_suspends_if_nccl_can(fake: Fake, older: str, tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "loaded", lambda: nccl.Library(fake.path))
    monkeypatch.setattr("torch._C._distributed_c10d.ProcessGroupNCCL", Backend, raising=False)
    chosen = for_nccl(tag, order=3, timeout=5)
    assert isinstance(chosen, Communicators)
    assert (chosen.tags, chosen.order, chosen.timeout) == ((tag,), 3, 5)
    monkeypatch.setattr("torch._C._distributed_c10d.ProcessGroupNCCL", object)
    opened = for_nccl(tag)  # torch does not return its communicators
    assert isinstance(opened, ProcessGroups)
    opened.unwrap()
    monkeypatch.setattr("torch._C._distributed_c10d.ProcessGroupNCCL", Backend)
    for without in (None, nccl.Library(older)):
        monkeypatch.setattr(nccl, "loaded", lambda found=without: found)
        opened = for_nccl(tag)
        assert isinstance(opened, ProcessGroups)
        opened.unwrap()
    monkeypatch.setattr(nccl, "loaded", lambda: None)
    with pytest.raises(memsaver.Error, match="NCCL is not loaded"):
        Communicators(tag)


# torch's process groups


class Backend:
    """NCCL's backend of a group in an older torch. ``handle`` is 0 before the first collective."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def _comm_ptr(self) -> int:
        return self.handle


class NewBackend(Backend):
    """In torch 2.12 and newer, which may have been built with an NCCL that cannot suspend."""

    def __init__(self, handle: int = 1) -> None:
        super().__init__(handle)
        self.calls: list[str] = []

    def suspend(self) -> None:
        self.calls.append("suspend")

    def resume(self) -> None:
        self.calls.append("resume")

    def memory_stats(self) -> dict[str, int]:
        return {"suspend": 3, "suspended": int(self.calls[-1:] == ["suspend"]), "persist": 5, "total": 8}


@pytest.fixture
def of_torch(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the guest of torch's groups."""

    def make(tag: str, built_with: tuple[int, int, int], **backends: Any) -> Communicators:
        groups = {Group(each): name for name, each in backends.items()}
        config = {group: "gloo" if name == "gloo" else "cpu:gloo,cuda:nccl" for group, name in groups.items()}
        world = SimpleNamespace(pg_names=groups, pg_backend_config=config)
        monkeypatch.setattr("torch.distributed.distributed_c10d._world", world)
        monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (*built_with, ""))
        return Communicators(tag, library=fake.path)

    return make


class Group:
    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self.backend


def test_communicators_of_used_groups_of_torch_are_suspended(fake: Fake, of_torch: Any, tag: str) -> None:
    used = Backend(fake.handles["world"])
    guest = of_torch(tag, (2, 28, 9), world=used, shared=Backend(used.handle), unused=Backend(0), gloo=None)
    guest.leave()
    assert fake.suspended() == guest.suspended == ["world"]
    guest.come_back()
    assert fake.suspended() == []


def test_torch_that_was_built_with_such_an_nccl_suspends_by_itself(of_torch: Any, tag: str) -> None:
    backend = NewBackend()
    guest = of_torch(tag, (2, 29, 7), world=backend)
    assert guest.nbytes == 8
    guest.leave()
    assert guest.nbytes == 5
    guest.come_back()
    assert backend.calls == ["suspend", "resume"]


@pytest.mark.parametrize("built_with", [(2, 28, 9), (2, 29, 7)])
def test_group_of_torch_that_was_destroyed_while_it_was_suspended_is_not_touched(
    fake: Fake, of_torch: Any, tag: str, built_with: tuple[int, int, int]
) -> None:
    backends = {name: NewBackend(fake.handles[name]) for name in ("world", "first")}
    guest = of_torch(tag, built_with, **backends)
    guest.leave()
    groups = torch.distributed.distributed_c10d._world.pg_names
    for group in [each for each, name in groups.items() if name == "first"]:
        del groups[group]
    guest.come_back()
    assert guest.suspended == []
    by_torch = built_with == (2, 29, 7)
    assert backends["first"].calls == (["suspend"] if by_torch else [])
    assert fake.suspended() == ([] if by_torch else ["first"])


def test_communicator_that_torch_replaced_while_it_was_suspended_is_not_touched(
    fake: Fake, of_torch: Any, tag: str
) -> None:
    backend = Backend(fake.handles["world"])
    guest = of_torch(tag, (2, 28, 9), world=backend)
    guest.leave()
    backend.handle = fake.handles["first"]
    guest.come_back()
    assert fake.calls_of("world") == 1
    assert fake.calls_of("first") == 0


def test_torch_built_with_an_older_nccl_is_not_asked(fake: Fake, of_torch: Any, tag: str) -> None:
    backend = NewBackend(fake.handles["first"])
    guest = of_torch(tag, (2, 28, 9), world=backend)
    guest.leave()
    assert (backend.calls, fake.suspended()) == ([], ["first"])
    guest.come_back()


def test_group_of_torch_without_its_communicator_is_named(of_torch: Any, tag: str) -> None:
    guest = of_torch(tag, (2, 28, 9), world=object())
    with pytest.raises(memsaver.Error, match="communicator of process group 'world'.*expected _comm_ptr"):
        guest.leave()


def test_name_of_a_group_that_is_none_of_nccls_is_left_out(of_torch: Any, tag: str) -> None:
    of_torch(tag, (2, 29, 7), gloo=None)
    assert communicators._torch_groups() == []
