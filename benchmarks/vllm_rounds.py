"""vLLM with tensor parallel ranks over HTTP, in verl's order, with new weights in each round.

    python benchmarks/vllm_rounds.py [--model tiny] [--rounds 50] [--ranks 2] [--verify] [--way memsaver]

Engine and workers are processes of their own. A round: sleep at level 2; another process on each GPU fills the free
memory, but for 1 GiB, with 0xA5, and releases it; wake the weights; a trainer's process on each GPU sends all weights
anew; the free memory is filled again; wake the KV cache; reset the prefix cache; generate. An engine of vLLM alone that
never sleeps gets the same weights. The tokens of both are compared in each round, and in the last round with an engine
that has read the weights from a checkpoint. Prints medians of the calls, then one JSON line. The exit status is 1 if
tokens differ. Needs vLLM. ``--verify`` compares contents after each wake-up with those before (MEMSAVER_VERIFY). It
adds two sleeps at level 1, where contents are kept, with and without the comparison, and a flipped byte at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from typing import Any

from support.arguments import count, parse, parser_for
from support.arguments import directory as writable
from support.environment import environment
from support.host import GIB
from support.processes import Process, ask_all
from support.servers.vllm_models import MODELS, WAYS
from support.servers.vllm_server import Server
from support.servers.vllm_updates import filled, trained


def update(server: Server, trainers: list[Process], path: str) -> float:
    """Sends a version of the weights. Returns milliseconds of the server's calls."""
    took = 0.0
    while True:
        found = ask_all(trainers)
        took += server.post("/collective_rpc", {"method": "take_bucket", "args": [path]})
        if found[0]["last"]:
            return took


class Rounds:
    """The processes, and the results."""

    def __init__(self, options: argparse.Namespace, directory: str) -> None:
        self.options, self.directory, self.logs = options, directory, options.logs or directory
        MODELS[options.model].write(directory)
        verify = {"MEMSAVER_VERIFY": "1"} if options.verify else {}
        self.server = Server(
            options.way,
            directory,
            self.logs,
            {**WAYS[options.way], **verify},
            "--enable-sleep-mode",
            ranks=options.ranks,
        )
        self.ready_s = {options.way: self.server.wait_ready()}
        self.awake = Server("awake", directory, self.logs, WAYS["vllm"], ranks=options.ranks)
        self.ready_s["awake"] = self.awake.wait_ready()
        self.paths = {name: f"{directory}/{name}.{{rank}}" for name in ("sleeper", "awake")}
        # A trainer each: a version goes to one of them, then to the other.
        self.trainers = {
            name: [Process(trained, model=options.model, rank=rank, path=path) for rank in range(options.ranks)]
            for name, path in self.paths.items()
        }
        self.fillers = [Process(filled, device=rank) for rank in range(options.ranks)]
        for each in self.trainers.values():
            ask_all(each)
        ask_all(self.fillers)
        self.ms: dict[str, list[float]] = {}
        self.filled_bytes: list[int] = []
        self.differs_at_level_1 = 0

    def timed(self, name: str, took: float) -> None:
        self.ms.setdefault(name, []).append(took)

    def fill(self) -> None:
        self.filled_bytes += [each["bytes"] for each in ask_all(self.fillers)]
        ask_all(self.fillers)  # releases it

    def round(self) -> list[list[int]]:
        server = self.server
        self.timed("sleep, level 2", server.post("/sleep", level=2))
        self.fill()
        self.timed("wake weights", server.post("/wake_up", tags="weights"))
        self.timed("update", update(server, self.trainers["sleeper"], self.paths["sleeper"]))
        self.fill()
        self.timed("wake kv_cache", server.post("/wake_up", tags="kv_cache"))
        found = server.tokens()
        if self.options.verify:
            for suffix, wanted in {" verified": "1", "": ""}.items():
                server.post("/collective_rpc", {"method": "set_verify", "args": [wanted]})
                self.timed("sleep, level 1" + suffix, server.post("/sleep", level=1))
                self.fill()
                self.timed("wake all" + suffix, server.post("/wake_up"))
                self.differs_at_level_1 += server.tokens() != found
            server.post("/collective_rpc", {"method": "set_verify", "args": ["1"]})
        return found

    def flip(self) -> str:
        """Flips a byte of the contents in host memory. Returns the answer to the wake-up."""
        self.server.post("/sleep", level=1)
        self.server.post("/collective_rpc", {"method": "flip_byte"})
        status, text = self.server.call("POST", "/wake_up")
        return f"{status}: {text[:400]}"

    def fresh(self, version: int) -> list[list[int]]:
        """The tokens of an engine that reads a version of the weights from a checkpoint."""
        from safetensors.torch import save_file

        weights = {name: weight.cpu() for name, weight in MODELS[self.options.model].weights(version, "cuda:0")}
        save_file(weights, f"{self.directory}/model.safetensors", {"format": "pt"})
        del weights
        server = Server("fresh", self.directory, self.logs, WAYS["vllm"], ranks=self.options.ranks, load_format="auto")
        try:
            self.ready_s["fresh"] = server.wait_ready()
            return server.tokens()
        finally:
            server.close()

    def close(self) -> None:
        for process in (*self.fillers, *(each for several in self.trainers.values() for each in several)):
            process.close()
        for server in (self.server, self.awake):
            server.close()


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="tiny")
    parser.add_argument("--rounds", type=count, default=50)
    parser.add_argument("--ranks", type=count, default=2)
    parser.add_argument("--verify", action="store_true", help="compare contents after each wake-up")
    parser.add_argument("--way", choices=tuple(WAYS), default="memsaver")
    parser.add_argument("--logs", type=writable, help="directory for the logs of the servers")
    options = parse(parser)
    different: list[int] = []
    seen = set()
    with tempfile.TemporaryDirectory() as directory:
        rounds = Rounds(options, directory)
        try:
            for number in range(1, options.rounds + 1):
                found = rounds.round()
                update(rounds.awake, rounds.trainers["awake"], rounds.paths["awake"])
                expected = rounds.awake.tokens()
                seen.add(json.dumps(found))
                if found != expected:
                    different.append(number)
            rounds.awake.close()
            fresh = rounds.fresh(options.rounds)
            flipped = rounds.flip() if options.verify else ""
            lines = [each for each in rounds.server.log().splitlines() if "memsaver" in each]
        finally:
            rounds.close()
    if found != fresh:
        different.append(-1)
    medians = {name: statistics.median(each) for name, each in rounds.ms.items()}
    print(f"{options.way}, {options.model}, {options.ranks} ranks, {options.rounds} rounds; medians")
    for name, took in medians.items():
        print(f"  {name:20}{took:10.1f} ms")
    print(f"  filled with 0xA5: {min(rounds.filled_bytes) / GIB:.1f} to {max(rounds.filled_bytes) / GIB:.1f} GiB")
    print(f"  {len(seen)} different sequences of tokens in {options.rounds} rounds; different from the engine that "
          f"never slept (-1: from the fresh one) in rounds {different or 'none'}")  # fmt: skip
    if rounds.differs_at_level_1:
        print(f"  tokens differed after {rounds.differs_at_level_1} sleeps at level 1")
    if flipped:
        print(f"  a flipped byte: {flipped}")
    result: dict[str, Any] = {
        "flipped": flipped, "differs_at_level_1": rounds.differs_at_level_1,
        "model": options.model, "way": options.way, "ranks": options.ranks, "rounds": options.rounds,
        "verify": options.verify, "ready_s": rounds.ready_s, "medians_ms": medians, "ms": rounds.ms,
        "filled_bytes": [min(rounds.filled_bytes), max(rounds.filled_bytes)], "sequences": len(seen),
        "different": different, "drop_in": lines[:1],
    }  # fmt: skip
    print(json.dumps({"benchmark": "vllm_rounds", **environment("cuda:0"), **result}))
    sys.exit(bool(different or rounds.differs_at_level_1))


if __name__ == "__main__":
    main()
