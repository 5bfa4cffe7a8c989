"""Ray's memory monitor, in a cluster whose memory is a file of the test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ray")

from tests.support import GIB, ROOT, environment, fresh_device  # noqa: E402

MOUNTS = ["unshare", "--mount"]

PROGRAM = """
import functools, os, sys, threading, time
from pathlib import Path

print = functools.partial(print, file=os.fdopen(os.dup(1), "w"), flush=True)
os.dup2(2, 1)  # Ray prints messages of its raylets

import ray

import memsaver
from memsaver.ray import Group
from memsaver.ray.ranks import ActorRank
from tests.ray_support import Member, cluster_of_one_machine

MIB = 1 << 20
USAGE = Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")


class Victim(Member):
    def colocated_drain(self, tags):
        if self.dies:
            USAGE.write_text(f"{4000 * MIB}\\n")
            time.sleep(60)


def calm(pid):
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    USAGE.write_text(f"{1000 * MIB}\\n")


device = sys.argv[1]
memsaver.configure(host_device=device, backup_ahead=False)
with cluster_of_one_machine():
    engine = ray.remote(Victim).options(num_cpus=0).remote(device, "weights", MIB)
    pid = ray.get(engine.do.remote("os.getpid()"))
    trainer = Member("", "params", MIB)  # in this process, which the monitor does not kill
    phases = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params"]}}
    group = Group(engine=engine, trainer=trainer, phases=phases)
    group.enter("rollout")
    ray.get(engine.set.remote(dies="yes"))
    end = threading.Thread(target=calm, args=(pid,))
    end.start()
    try:
        group.enter("train")
    except memsaver.Error as error:
        print(type(error.__cause__).__name__, error.role, error.rank)
        print(ActorRank("engine", 0, engine).is_lost(error.__cause__))
    end.join()
    print(os.path.exists(f"/proc/{pid}"))
    group.replace("engine", 0, engine := ray.remote(Victim).options(num_cpus=0).remote(device, "weights", MIB))
    group.enter("train")
    print(trainer.look(), ray.get(engine.look.remote()))
"""


@pytest.mark.skipif(
    subprocess.run(["sh", "-c", f"{' '.join(MOUNTS)} true"], check=False, capture_output=True).returncode != 0,
    reason="no mount namespace can be made here",
)
def test_an_actor_that_rays_memory_monitor_kills_is_a_dead_rank(tmp_path: Path) -> None:
    """The monitor sees the files of a cgroup that the test writes, so no memory of the machine has to be used."""
    group = tmp_path / "cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (group / "memory.stat").write_text("cache 0\nrss 0\ntotal_inactive_file 0\ntotal_active_file 0\n")
    mounts = f"mount --bind {tmp_path}/cgroup /sys/fs/cgroup"
    done = subprocess.run(
        [*MOUNTS, "sh", "-c", f'{mounts} && exec "$@"', "sh", sys.executable, "-c", PROGRAM, fresh_device()],
        env=environment(RAY_memory_usage_threshold="0.9", RAY_memory_monitor_refresh_ms="50"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "OutOfMemoryError engine 0",
        "True",
        "False",
        "('active', True) ('paused', True)",
    ]
