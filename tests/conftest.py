"""Fixtures of all tests: a small host device for each run, fresh tags, and a clean state after each test."""

from __future__ import annotations

import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several processes run tests, and each waits actively for its threads
os.environ.setdefault("RAY_worker_niceness", "0")  # else actors wait for linters and sanitizers that run beside
# Before the import of memsaver. Processes with the same size share a device, so each run has a size of its own. It is
# more than a test needs: chunks whose release a test made fail stay in use until the process ends.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.pop("MEMSAVER_HOST_DEVICE", None)  # the controller's
os.environ.setdefault("MEMSAVER_HOST_DEVICE", str((2 << 30) + os.getpid() % 32768 * (2 << 20)))

import pytest  # noqa: E402
from _pytest.runner import runtestprotocol  # noqa: E402

import memsaver  # noqa: E402
from memsaver import _core, _guests  # noqa: E402
from memsaver.turns import phases  # noqa: E402
from tests import controls, gpus  # noqa: E402

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts jobs in the background so
    signal.signal(signal.SIGINT, signal.default_int_handler)

_numbers = itertools.count()


def _why_no_gpu() -> str | None:
    if _core.cuda_device_count() == 0:
        return "there is no CUDA device"
    import torch

    return None if torch.cuda.is_available() else f"this build of torch ({torch.__version__}) has no CUDA"


def _is_apart(item: pytest.Item) -> bool:
    marks = {mark.name for mark in item.iter_markers()}
    return bool(marks & {"isolated", "alone", "gpus"}) and "PYTEST_APART" not in os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_APART" in os.environ:
        items.sort(key=_leaves_it_unusable, reverse=True)  # a fork needs a process that has not used the library
    for item in items:
        if isinstance(item, pytest.Function) and _is_apart(item):
            item.fixturenames.clear()  # the other process makes them
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    if reason is not None:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _leaves_it_unusable(item: pytest.Item) -> bool:
    return item.get_closest_marker("isolated") is not None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """In a process apart, an ``isolated`` test runs in a child that is forked before the process uses the library."""
    if "PYTEST_APART" not in os.environ or not _leaves_it_unusable(item):
        return None
    read, write = os.pipe()
    gc.collect()
    gc.freeze()  # a collection in the child would copy the pages of all of torch's objects
    pid = os.fork()
    if pid == 0:
        os.environ["PYTEST_APART"] = "child"
        reports = runtestprotocol(item, nextitem=None, log=False)
        found = [item.config.hook.pytest_report_to_serializable(config=item.config, report=each) for each in reports]
        with open(write, "w") as pipe:
            pipe.write(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for each in json.loads(text) if text else ():
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=each)
        hook.pytest_runtest_logreport(report=report)
    if not text:
        call = pytest.CallInfo.from_call(lambda: pytest.fail(f"the process ended with the status {status}"), "call")
        hook.pytest_runtest_logreport(report=pytest.TestReport.from_item_and_call(item, call))
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


_texts: dict[str, str | None] = {}  # of tests that failed in a process of their own, by id; None: they passed


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is marked ``alone``, ``gpus`` or ``isolated`` apart: in one process for all of a file, with a
    device of its own, or in a child of this process.
    """
    if not _is_apart(pyfuncitem):
        return None
    on_gpus = pyfuncitem.get_closest_marker("gpus") is not None
    if pyfuncitem.nodeid not in _texts:
        file = [item for item in pyfuncitem.session.items if item.path == pyfuncitem.path]
        file = [item for item in file if isinstance(item, pytest.Function) and _is_apart(item)]
        together = [item.nodeid for item in file if (item.get_closest_marker("gpus") is not None) == on_gpus]
        _texts.update(_run_apart(pyfuncitem.config.rootpath, together, on_gpus))
    text = _texts.pop(pyfuncitem.nodeid)  # a test that is repeated runs again
    if text is not None:
        pytest.fail(text, pytrace=False)
    return True


def _run_apart(root: Path, tests: list[str], on_gpus: bool) -> dict[str, str | None]:
    environment = {**os.environ, "PYTEST_APART": "1"}
    environment.pop("MEMSAVER_HOST_DEVICE")
    if on_gpus:
        environment |= gpus.environment()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "--runxfail", "-p", "no:cacheprovider", "-o", "junit_logging=all", f"--junitxml={report}"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120 + 10 * len(tests),
            check=False,
        )
        found: dict[str, str | None] = dict.fromkeys(
            tests, f"it ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
        if report.exists():
            by_name = {test.split("::", 1)[1]: test for test in tests}
            for case in ElementTree.parse(report).iter("testcase"):
                problems = [each.text or "" for each in case if each.tag in ("failure", "error")]
                found[by_name[case.attrib["name"]]] = "\n".join(problems) or None
    return found


@pytest.fixture
def fresh_tag() -> Callable[[], str]:
    """Makes tags that no other test uses: regions live as long as the process."""
    return lambda: f"tag{next(_numbers)}"


@pytest.fixture
def tag(fresh_tag: Callable[[], str]) -> str:
    return fresh_tag()


@pytest.fixture
def make(fresh_tag: Callable[[], str]) -> Callable[..., memsaver.Region]:
    """Makes host regions under fresh tags."""

    def region(backup: str = "none", tag: str | None = None, **options: Any) -> memsaver.Region:
        return memsaver.region(tag or fresh_tag(), device="cpu", backup=backup, **options)

    return region


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture(autouse=True, scope="module")
def no_process_group_left_behind() -> Iterator[None]:
    """Destroys the process groups that a file made in this process. The next file expects that there are none."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def close_regions() -> bool:
    """Whether all are closed: no tensor lives."""
    gc.collect()
    are_closed = True
    for region in memsaver.regions.all_regions():
        with suppress(memsaver.Error):  # its device is gone
            region.resume()
            region.thaw()
        try:
            region.close()
        except memsaver.Error:
            are_closed = False
    return are_closed


@pytest.fixture(autouse=True, scope="module")
def regions_of_earlier_files() -> None:
    """Closes them: this file may use their tags and memory. At the end of a file pytest still has its fixtures.

    If a tensor lives, a cycle among the objects that are out of collections may have it.
    """
    if os.environ.get("PYTEST_APART") == "child":
        return
    if not close_regions():
        gc.unfreeze()
        close_regions()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Disarms faults, ends captures, resets the host device and the options, and forgets phases and guests.

    An exception that a test caught keeps the test's tensors in a cycle. They are freed before the next counts bytes.
    What is left then, up to a million objects of imports, stays out of later collections.
    """
    gc.collect()
    gc.freeze()
    yield
    controls.disarm()
    controls.virtual_clock(False)
    controls.reset()
    while _core.capturing():
        _core.capture_ends()
    memsaver.configure(retain=0, host_limit=None, memory_timeout=0, lazy=False, verify=False)
    phases._phases.clear()
    _guests._entries.clear()
    if "MEMSAVER_TEST_GPUS" in os.environ:
        close_regions()
    controls.check_stops()
