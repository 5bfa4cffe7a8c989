"""The options: their table and its page, values, the environment, and the command that prints them."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memsaver
from memsaver import _adapter, _core, config
from memsaver.broker import pool_client
from memsaver.config import OPTIONS, parse_size
from tests.support import GIB, MIB, ROOT, environment, run_clean, run_program, run_python


def test_documented_table_has_the_options_and_defaults_of_the_code() -> None:
    page = (ROOT / "docs/reference.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| [^|]+ \| `([^|]+)` \| \S", page, flags=re.MULTILINE)
    assert rows == [
        (each.name, each.variable, each.shown(each.default)) for each in map(OPTIONS.__getitem__, sorted(OPTIONS))
    ]


# Values


def test_sizes_are_integers_or_strings() -> None:
    for text, nbytes in [
        (0, 0), (4096, 4096), ("0", 0), ("4096", 4096), ("64GiB", 64 * GIB), (" 2 gib ", 2 * GIB), ("7b", 7),
        ("1.5GiB", GIB + GIB // 2), ("512M", 512 * MIB), ("512 MB", 512 * MIB), ("1kb", 1024), ("64Gi", 64 * GIB),
        ("64g", 64 * GIB), ("1T", 1024 * GIB), ("0.1K", 102), ("1048576T", 1 << 60),
    ]:  # fmt: skip
        assert parse_size(text, "retain") == nbytes, text


UNPICKLED = (each for each in range(0))


@pytest.mark.parametrize(
    ("option", "values", "expected"),
    [
        (
            "retain",
            [
                -1,
                1.5,
                True,
                None,
                "",
                "-1",
                "5 parsecs",
                "1..5GiB",
                "1KK",
                "1e9",
                "٣G",
                "1048577T",
                1 << 70,
                "9" * 400,
                UNPICKLED,
            ],
            "bytes as an integer of 0 or more, or a size such as '64GiB'",
        ),
        ("host_device", ["1MiB"], "at least 2 MiB"),
        ("host_limit", ["none", -1], "'auto', bytes as an integer"),
        ("pool", ["ours", None], "one of 'process', 'shared'"),
        ("verify", ["perhaps", 1, None], "True or False"),
        ("memory_timeout", [-1, "soon", None, float("nan"), "1e7"], "seconds of 0 or more, at most 1e+06"),
        ("patches", ["everything", 3, [[1]]], "one or several of 'captures', 'multiprocessing'"),
        ("disk_dir", ["/no/such"], "a directory that can be written to; it does not exist"),
        ("disk_dir", ["", 3, __file__], "a directory that can be written to"),
        ("report_dir", ["", 3, __file__, "a\0b"], "the path of a directory, which need not exist yet"),
        ("host_devise", [1], "there is no option 'host_devise'; did you mean 'host_device'"),
        ("x", [1], "there is no option 'x'; there are disk_dir, "),
        ("pool_dir", [1], "pool_dir is set by MEMSAVER_POOL_DIR alone"),
    ],
)
def test_wrong_values_are_named_with_the_expectation_and_change_nothing(
    option: str, values: list[Any], expected: str
) -> None:
    before = memsaver.stats().options
    for value in values:
        text = expected if expected.startswith(("there is", option)) else f"{option} is {value!r}, expected {expected}"
        with pytest.raises(memsaver.ConfigError, match=f"^{re.escape(text)}") as caught:
            memsaver.configure(**{"retain": 5 * MIB, option: value})
        if value == value:  # no NaN
            assert (caught.value.option, caught.value.value) == (option, value)
            copy = pickle.loads(pickle.dumps(caught.value))
            assert copy.value == (repr(value) if value is UNPICKLED else value)
    assert memsaver.stats().options == before


def test_a_path_that_is_no_utf_8_or_in_a_removed_working_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "\udcff"
    other.mkdir()
    with pytest.raises(memsaver.ConfigError, match="expected a path in UTF-8"):
        memsaver.configure(disk_dir=other)
    other.rmdir()
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    for option in ("trace", "report_dir", "disk_dir"):
        with pytest.raises(memsaver.ConfigError, match=f"^{option} is 'here', expected "):
            memsaver.configure(**{option: "here"})


def test_a_value_that_cannot_be_applied_changes_no_option(
    make: Callable[..., memsaver.Region], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(device: str) -> None:
        raise memsaver.BrokerError("no broker", path="")

    make()
    memsaver.configure(disk_dir=tmp_path, verify=False)
    before, kept = memsaver.stats().options, pool_client._capacity
    with monkeypatch.context() as patch:
        patch.setattr(pool_client, "connect", refuse)
        with pytest.raises(memsaver.BrokerError, match="no broker"):
            memsaver.configure(pool_capacity="1024TiB", verify=True, pool="shared", retain="3GiB", disk_dir="/")
    assert memsaver.stats().options == before
    assert (pool_client._capacity, pool_client._shared) == (kept, False)


def test_one_handle_for_each_segment_and_a_shared_pool_exclude_each_other(
    tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    region = memsaver.region(tag, device="cpu", one_handle=True)
    with pytest.raises(memsaver.ConfigError, match=f"one_handle have memory of the driver.*close '{tag}'"):
        memsaver.configure(pool="shared")
    region.close()
    with monkeypatch.context() as patch:
        patch.setattr(pool_client, "join", lambda device: _core.use_pool(device, True))
        try:
            with pytest.raises(memsaver.ConfigError, match="one handle.*pool is 'shared', expected 'process'"):
                memsaver.region(tag, device="cpu", one_handle=True)
        finally:
            _core.use_pool("cpu", False)


def test_the_host_device_has_the_size_that_was_set_before_its_first_use() -> None:
    """And a fresh process has no other options, with the documented defaults, and no device before its first use."""
    out = run_clean("""
        import memsaver
        assert memsaver.stats().options.keys() == {"host_device"} and not memsaver.stats().devices
        for each in memsaver.config.settings():
            assert (each.value == each.option.default) == (each.source == "default"), each
        memsaver.configure(host_device="150MiB")
        memsaver.region("a", device="cpu")
        memsaver.configure(host_device="150MiB")
        try:
            memsaver.configure(host_device="100MiB")
        except memsaver.ConfigError as error:
            print(error)
            assert (error.option, error.value) == ("host_device", "100MiB")
        print(memsaver.stats().devices["cpu"].total_bytes)
    """)
    refusal, total = out.splitlines()
    assert f"to {100 * MIB} bytes after the host device came into use with {150 * MIB} bytes" in refusal
    assert int(total) == 150 * MIB


# The environment


def test_a_variable_applies_beside_an_unknown_one_and_configure_comes_after_it(tmp_path: Path) -> None:
    source = """
        import memsaver
        found = {each.option.name: each for each in memsaver.config.settings()}
        print([found[name].source + f" {found[name].value}" for name in ("retain", "verify")])
        memsaver.configure(retain=4096)
        print([each.source for each in memsaver.config.settings() if each.value == 4096])
    """
    done = run_python(source, MEMSAVER_HOST_DEVCE="1", MEMSAVER_RETAIN="1G", MEMSAVER_VERIFY="on")
    assert done.stdout == f"['MEMSAVER_RETAIN {GIB}', 'MEMSAVER_VERIFY True']\n['configure()']\n"
    assert "RuntimeWarning: there is no variable MEMSAVER_HOST_DEVCE; did you mean" in done.stderr
    # A command names a wrong one in one line.
    script = tmp_path / "memsaver"  # as an installer makes it
    script.write_text("import sys\nfrom memsaver.cli import main\nsys.exit(main())\n")
    for command in (["-X", "dev", "-m", "memsaver", "top"], [str(script), "config"]):
        done = run_program([sys.executable, *command], env=environment(MEMSAVER_RETAIN="plenty"))
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert line.startswith("memsaver: retain is 'plenty', expected bytes")


@pytest.mark.parametrize("reader", ["full", "gone"])
def test_a_command_whose_output_cannot_be_written_says_so_in_one_line(reader: str) -> None:
    command = [sys.executable, "-m", "memsaver", "config"]
    variables = environment()
    variables.pop("PYTHONUNBUFFERED", None)
    if reader == "full":
        file = os.open("/dev/full", os.O_WRONLY)
    else:
        end, file = os.pipe()
        os.close(end)
    try:
        done = subprocess.run(command, env=variables, stdout=file, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(file)
    text = "memsaver: [Errno 28] No space left on device\n" if reader == "full" else ""
    assert (done.returncode, done.stderr) == (1, text)


def test_a_command_prints_a_name_that_the_encoding_lacks() -> None:
    command = [sys.executable, "-m", "memsaver", "config"]
    done = run_program(command, env=environment(MEMSAVER_NAME="trainer Ä", PYTHONIOENCODING="ascii"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "trainer \\xc4 " in done.stdout


def test_a_command_without_stderr_prints_its_output_alone() -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "memsaver", "top", "--json"]
    done = run_program(command, env=environment())
    assert json.loads(done.stdout)["pools"] == [] and done.returncode == 0


def test_a_command_that_is_interrupted_has_not_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    from memsaver import cli

    def interrupt() -> list[cli.doctor.Finding]:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.doctor, "examine", interrupt)
    assert cli.main(["doctor"]) == 130


def test_config_prints_json_and_the_changes_that_the_environment_asks_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from memsaver import cli

    monkeypatch.setitem(config._values, "patches", ["captures", "multiprocessing"])
    monkeypatch.setitem(config._sources, "patches", "MEMSAVER_PATCHES")
    assert cli.main(["config", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["patches"] == {"value": ["captures", "multiprocessing"], "source": "MEMSAVER_PATCHES"}
    assert found["pool_capacity"] == {"value": None, "source": "default"}
    monkeypatch.setattr(_adapter, "_wanted", {"captures"})
    monkeypatch.setattr(_adapter, "_noted", {"process groups"})
    monkeypatch.setenv("MEMSAVER_DROP_IN", "vllm")
    for options in ([], ["--json"]):
        assert cli.main(["config", "--touched", *options]) == 0
    *lines, rows = capsys.readouterr().out.splitlines()
    asked = [each["name"] for each in json.loads(rows) if each["asked"]]
    assert asked == [line.partition(":")[0] for line in lines if ": asked for, by " in line]
    assert asked == ["captures", "process groups", "vllm"]
