"""Ray and a job, and Ray's memory monitor."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="needs ray")

from tests.support import GIB, ROOT, environment, fresh_device  # noqa: E402

MOUNTS = ["unshare", "--mount"]
needs_mounts = pytest.mark.skipif(
    subprocess.run(["sh", "-c", f"{' '.join(MOUNTS)} true"], check=False, capture_output=True).returncode != 0,
    reason="no mount namespace can be made here",
)

# An actor and this process share a pool of one machine. Each holds more than a half of it.
PRELUDE = """
import functools, os, sys, threading, time
from pathlib import Path

print = functools.partial(print, file=os.fdopen(os.dup(1), "w"), flush=True)
os.dup2(2, 1)  # Ray prints messages of its raylets

import ray

import memsaver
from memsaver.broker import discovery
from memsaver.broker.admin import AdminClient
from memsaver.ray import Colocated, Group
from memsaver.ray.ranks import ActorRank
from tests import ray_support

MIB = 1 << 20
PHASES = {"rollout": {"engine": ["weights"]}, "train": {"trainer": ["params"]}}


class Rank(Colocated):
    def __init__(self, tag):
        self.buffer = ray_support.Buffer(tag, 40 * MIB)
        self.buffer.fill(1)

    def intact(self):
        return self.buffer.holds(1)

    def where(self):
        return os.getpid(), memsaver._core.in_pool("cpu")


ray.cloudpickle.register_pickle_by_value(ray_support)  # workers cannot import it
variables = {name: os.environ[name] for name in sys.argv[1].split(",")}
with ray_support.cluster_of_one_machine(runtime_env={"env_vars": variables}):
"""


@pytest.fixture
def pools() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="pool", dir="/tmp"))  # short: a socket's path holds 107 bytes
    yield path
    shutil.rmtree(path)


def run(program: str, pools: Path, *prefix: str, **variables: str) -> str:
    """Runs a program after the prelude. The variables of memsaver are set in its actors too, by Ray's runtime_env."""
    own = {
        "MEMSAVER_POOL": "shared",
        "MEMSAVER_POOL_CAPACITY": "64MiB",
        "MEMSAVER_POOL_DIR": str(pools),
        "MEMSAVER_HOST_DEVICE": fresh_device(),
        **{name: value for name, value in variables.items() if name.startswith("MEMSAVER_")},
    }
    settings = environment(**{**variables, **own, "OMP_NUM_THREADS": "1"})
    source = PRELUDE + textwrap.indent(textwrap.dedent(program), "    ")
    done = subprocess.run(
        [*prefix, sys.executable, "-c", source, ",".join(own)],
        env=settings,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_actors_of_a_ray_job_use_its_broker_by_runtime_env(pools: Path) -> None:
    program = """
        engine, trainer = (ray.remote(Rank).options(num_cpus=0) for _ in range(2))
        engine = engine.remote("weights")
        ray.get(engine.pause.remote())
        trainer = trainer.remote("params")
        ray.get(trainer.pause.remote())
        group = Group(engine=[engine], trainer=[trainer], phases=PHASES)
        for phase in ("rollout", "train") * 2:
            with group.enter(phase):
                pass
        assert ray.get([each.where.remote() for each in (engine, trainer)])[0][1]
        [path] = discovery.found()
        with AdminClient(path) as admin:
            print(path.parent.name, len(admin.status()["clients"]))
    """
    assert run(program, pools, MEMSAVER_JOB="of-ray") == "job-of-ray 2\n"


@needs_mounts
@pytest.mark.parametrize("restarts", [0, 1])
def test_an_actor_that_rays_memory_monitor_kills_is_a_dead_rank(pools: Path, tmp_path: Path, restarts: int) -> None:
    """The monitor sees the files of a cgroup that the test writes, so no memory of the machine has to be used."""
    group = tmp_path / "cgroup/memory"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (group / "memory.usage_in_bytes").write_text(f"{GIB}\n")
    (group / "memory.stat").write_text("cache 0\nrss 0\ntotal_inactive_file 0\ntotal_active_file 0\n")
    program = """
        usage = Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")
        restarts = int(os.environ["MEMSAVER_TEST_RESTARTS"])


        class Victim(Rank):
            def colocated_drain(self, tags):
                if self.dies:
                    usage.write_text(f"{4000 * MIB}\\n")
                    time.sleep(60)

            def die_in_next_turn(self):
                self.dies = True

            dies = False


        def calm(pid):
            deadline = time.monotonic() + 60
            while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
                time.sleep(0.01)
            usage.write_text(f"{1000 * MIB}\\n")


        engine = ray.remote(Victim).options(num_cpus=0, max_restarts=restarts).remote("weights")
        pid, is_pooled = ray.get(engine.where.remote())
        ray.get(engine.pause.remote())
        trainer = Rank("params")  # in this process, which the monitor does not kill
        trainer.pause()
        group = Group(engine=[engine], trainer=[trainer], phases=PHASES)
        with group.enter("rollout"):
            ray.get(engine.die_in_next_turn.remote())
        end = threading.Thread(target=calm, args=(pid,))
        end.start()
        try:
            with group.enter("train"):
                print("entered")
        except memsaver.Error as error:
            print(type(error.__cause__).__name__, error.role, error.rank)
            print(ActorRank("engine", 0, engine).is_lost(error.__cause__))
        end.join()
        print(is_pooled, os.path.exists(f"/proc/{pid}"))
        if not restarts:
            group.replace("engine", 0, engine := ray.remote(Victim).options(num_cpus=0).remote("weights"))
        with group.enter("train"):  # after the restart, with the memory of the killed process
            print(trainer.intact())
        with group.enter("rollout"):
            print(ray.get(engine.intact.remote()), ray.get(engine.where.remote())[0] != pid)
    """
    mounts = f"mount --bind {tmp_path}/cgroup /sys/fs/cgroup"
    prefix = [*MOUNTS, "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    monitor = {
        "RAY_memory_usage_threshold": "0.9",
        "RAY_memory_monitor_refresh_ms": "50",
        "MEMSAVER_TEST_RESTARTS": str(restarts),
    }
    assert run(program, pools, *prefix, **monitor).splitlines() == [
        f"{'ActorUnavailableError' if restarts else 'OutOfMemoryError'} engine 0",
        "True",
        "True False",
        "True",
        "True True",
    ]
