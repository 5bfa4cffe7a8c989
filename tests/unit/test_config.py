"""The table of options: its page, the environment, and the command that prints it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import memsaver
from memsaver import _core, config
from memsaver.broker import pool_client
from tests.support import MIB, environment, run_clean, run_python

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = sorted(config.OPTIONS, key=lambda option: option.name)


def run_command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "memsaver", *arguments],
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def markdown() -> str:
    """The table as docs/configuration.md has it."""
    rows = [[f"`{each.name}`", f"`{each.variable}`", each.type, f"`{each.default}`", each.meaning] for each in BY_NAME]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def test_documented_table_equals_code() -> None:
    assert markdown() in (ROOT / "docs/configuration.md").read_text(), f"expected in the page:\n{markdown()}"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("MEMSAVER_HOST_DEVCE", "MEMSAVER_HOST_DEVICE"),
        ("MEMSAVER_POOLDIR", "MEMSAVER_POOL_DIR"),
        ("MEMSAVER_RETAINED", "MEMSAVER_RETAIN"),
    ],
)
def test_unknown_variable_is_a_warning_with_the_nearest_name(
    name: str, nearest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "64MiB")
    with pytest.warns(RuntimeWarning, match=rf"^there is no variable {name}; did you mean {nearest}\?$"):
        config.from_environment()


def test_unknown_variable_like_no_option_is_a_warning_with_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_XYZ", "1")
    with pytest.warns(RuntimeWarning, match="no variable MEMSAVER_XYZ; there are .*MEMSAVER_RETAIN.*POOL_DIR"):
        config.from_environment()


def test_the_other_variables_apply_beside_an_unknown_one() -> None:
    done = run_python(
        "import memsaver; print(memsaver.stats().options['retain'])", MEMSAVER_HOST_DEVCE="1", MEMSAVER_RETAIN="4096"
    )
    assert done.stdout == "4096\n"
    assert "RuntimeWarning: there is no variable MEMSAVER_HOST_DEVCE; did you mean" in done.stderr


def test_variables_of_tests_are_ignored() -> None:
    assert run_clean("import memsaver; print('imported')", MEMSAVER_TEST_ANYTHING="1") == "imported\n"


def test_every_variable_in_the_sources_is_known() -> None:
    """A variable of a test or a benchmark that the library refused would break each process that inherits it."""
    pattern = re.compile(
        r"(?:environ(?:\.(?:get|pop|setdefault))?[\[(]|getenv\(|setenv\(|delenv\()\"(MEMSAVER_\w+)\""
        r"|\"(MEMSAVER_\w+)\" (?:not )?in os\.environ|\b(MEMSAVER_\w+)=[\"f]"
    )
    paths = [
        path for top in ("memsaver", "tests", "benchmarks", "examples", "csrc") for path in (ROOT / top).rglob("*.*")
    ]
    texts = [path.read_text() for path in paths if path.suffix in {".py", ".h", ".cpp", ".sh"}]
    used = {name for text in texts for match in pattern.findall(text) for name in match if name}
    wrong = {"MEMSAVER_HOST_DEVCE", "MEMSAVER_XYZ", "MEMSAVER_COLOUR"}  # of tests of the error
    assert {"MEMSAVER_POOL_DIR", "MEMSAVER_TEST_SEED", "MEMSAVER_TEST_COMMIT", "MEMSAVER_TEST_MUTANT"} <= used
    unknown = {name for name in used - wrong if not name.startswith("MEMSAVER_TEST_")}
    assert unknown <= {each.variable for each in config.OPTIONS}


def test_config_prints_value_and_source_of_each_option() -> None:
    done = run_command(
        "config", MEMSAVER_RETAIN="1.5G", MEMSAVER_POOL_DIR="/tmp/elsewhere", MEMSAVER_HOST_DEVICE="64Mi"
    )
    assert (done.returncode, done.stderr) == (0, "")
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.stdout.splitlines()}
    assert list(rows) == [each.name for each in BY_NAME]
    assert re.fullmatch(r"1\.50 GiB \(1610612736 bytes\) +MEMSAVER_RETAIN", rows["retain"])
    assert re.fullmatch(r"64\.0 MiB \(67108864 bytes\) +MEMSAVER_HOST_DEVICE", rows["host_device"])
    assert re.fullmatch(r"/tmp/elsewhere +MEMSAVER_POOL_DIR", rows["pool_dir"])
    assert re.fullmatch(r"False +default", rows["verify"])
    assert re.fullmatch(r"not set +default", rows["disk_dir"])


def test_config_prints_the_bytes_of_half_the_machines_memory() -> None:
    source = """
        import os
        os.environ.pop("MEMSAVER_HOST_DEVICE", None)
        import memsaver.cli
        memsaver.cli.main(["config"])
        print(memsaver._core.open_host_memory().total_bytes())
    """
    *rows, nbytes = run_clean(source).splitlines()
    [row] = [row for row in rows if row.startswith("host_device")]
    assert re.fullmatch(rf"host_device +\S+ [GM]iB \({nbytes} bytes\), half of the machine's memory +default", row)


def test_config_prints_json() -> None:
    done = run_command("config", "--json", MEMSAVER_PATCHES="multiprocessing,captures")
    found = json.loads(done.stdout)
    assert found["patches"] == {"value": ["captures", "multiprocessing"], "source": "MEMSAVER_PATCHES"}
    assert found["pool_capacity"] == {"value": None, "source": "default"}


def test_documented_defaults_are_those_of_the_core() -> None:
    """The table states the defaults; a fresh process has them."""
    source = """
        import memsaver
        from memsaver import _core
        assert memsaver.stats().options.keys() <= {"host_device"}
        print({each.option.name: str(each) for each in memsaver.config.settings() if each.source == "default"})
    """
    found = eval(run_clean(source))
    tabled = {each.name: each.default for each in BY_NAME if each.name != "host_device"}
    if "MEMSAVER_POOL_DIR" in os.environ:
        del tabled["pool_dir"]
    assert found == tabled


def test_setting_comes_from_configure_after_a_variable() -> None:
    source = """
        import memsaver
        memsaver.configure(retain=4096)
        found = {each.option.name: each for each in memsaver.config.settings()}
        print(found["retain"].source, found["retain"].value, found["verify"].source, found["verify"].value)
    """
    assert run_clean(source, MEMSAVER_RETAIN="1G", MEMSAVER_VERIFY="on") == "configure() 4096 MEMSAVER_VERIFY True\n"


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
    with pytest.raises(ValueError, match="one_handle is True, but region .* was made with False"):
        memsaver.region(memsaver.region(tag, device="cpu").tag, device="cpu", one_handle=True)


def test_pool_dir_is_no_keyword() -> None:
    with pytest.raises(memsaver.ConfigError, match="^pool_dir is set by MEMSAVER_POOL_DIR alone$"):
        memsaver.configure(pool_dir="/tmp")


@pytest.mark.parametrize(
    ("name", "hint"), [("host_devise", "did you mean 'host_device'"), ("x", "there are disk_dir, .*verify$")]
)
def test_an_unknown_keyword_raises_with_the_nearest_option_and_changes_nothing(name: str, hint: str) -> None:
    before = memsaver.stats().options
    with pytest.raises(memsaver.ConfigError, match=f"^there is no option '{name}'; {hint}") as caught:
        memsaver.configure(retain=5 * MIB, **{name: 1})
    assert (caught.value.option, caught.value.value, memsaver.stats().options) == (name, 1, before)


def test_command_prints_a_wrong_variable_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "memsaver"  # as an installer makes it
    script.write_text("import sys\nfrom memsaver.cli import main\nsys.exit(main())\n")
    for command in (["-m", "memsaver", "config"], ["-X", "dev", "-m", "memsaver", "top"], [str(script), "config"]):
        done = subprocess.run(
            [sys.executable, *command],
            env=environment(MEMSAVER_RETAIN="plenty"),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 1
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("memsaver: retain is 'plenty', expected bytes")


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_command_without_options_runs_with_a_wrong_variable(argument: str) -> None:
    done = run_command(argument, MEMSAVER_JOB="a name")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


def test_columns_of_config_are_aligned() -> None:
    """A name that is longer than its column moved the value of its row."""
    starts = {re.match(r"\S+ +", line).end() for line in run_command("config").stdout.splitlines()}  # type: ignore[union-attr]
    assert len(starts) == 1


def test_the_error_for_a_wrong_host_limit_names_auto() -> None:
    with pytest.raises(memsaver.ConfigError, match="host_limit is 'none', expected 'auto', bytes as an integer"):
        memsaver.configure(host_limit="none")


@pytest.mark.parametrize("size", ["64Xi", "many", "-1"])
def test_command_names_a_wrong_size(size: str) -> None:
    done = run_command("trim", f"--keep={size}")
    assert done.returncode == 2
    assert f"SIZE is '{size}', expected bytes as an integer of 0 or more, or a size such as '64GiB'" in done.stderr


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
