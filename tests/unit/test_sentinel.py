"""The descriptors in forked children by which brokers detect the end of a process."""

from __future__ import annotations

import os

import pytest

from tests.support import run_clean

FORKS = """
    import os, sys
    import memsaver
    from memsaver import _core

    def held():
        paths = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        links = (os.readlink(path) for path in paths if os.path.lexists(path))
        return sorted(link for link in links if link.startswith(("pipe", "/dev/nv", "/dev/zero")))

    for path in {paths}:
        os.open(path, os.O_RDONLY)
    before = held()
    _core.open_sentinel()
    _core.open_sentinel()
    with_sentinel = held()
    print("made", len(with_sentinel) - len(before))
    for wanted in (False, True, False):
        memsaver.configure(close_on_fork=wanted)
        sys.stdout.flush()
        child = os.fork()
        if not child:
            print(wanted, held() == with_sentinel, sorted(set(with_sentinel) - set(held())))
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        assert held() == with_sentinel
"""


def children_of_a_process_with(*paths: str) -> list[str]:
    """The answers of three children, of which the second was asked to close."""
    made, *said = run_clean(FORKS.replace("{paths}", repr(paths))).splitlines()
    assert made == "made 2"
    return said


def test_children_close_the_sentinel_where_that_was_asked_for() -> None:
    first, second, third = children_of_a_process_with("/dev/zero")
    assert first == third == "False True []"
    assert second.startswith("True False ['pipe:[") and second.count(",") == 0


def test_children_close_the_descriptors_of_cuda_where_that_was_asked_for() -> None:
    path = f"/dev/nvidia-of-test-{os.getpid()}"
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        pytest.skip("no file can be made in /dev")
    try:
        first, second, third = children_of_a_process_with(path, "/dev/zero", path)
        assert first == third == "False True []"
        assert second.startswith(f"True False [{path!r}, 'pipe:[") and "/dev/zero" not in second
    finally:
        os.unlink(path)
