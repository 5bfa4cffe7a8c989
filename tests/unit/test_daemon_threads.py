"""Daemon threads that call memsaver while the interpreter exits: the process ends normally."""

from __future__ import annotations

import subprocess
import sys

import pytest

# An object of sys is deleted late in the exit of the interpreter. While it sleeps, Python ends the threads that need
# the GIL. Its output shows that the exit has come so far.
PROGRAM = """
import os, sys, threading, time
import memsaver

class Late:
    def __del__(self, sleep=time.sleep, write=os.write):
        sleep(0.4)
        write(1, b"end")

class Cycle:  # before Python 3.12 the collector runs within a binding that makes containers
    # Not in the main thread: meanwhile the other thread would make more cycles than it collects.
    def __del__(self, sleep=time.sleep, thread=threading.get_ident, main=threading.get_ident()):
        if thread() != main:
            sleep(0.001)  # other threads run

def stats(region):
    memsaver.stats()

def error(region):
    try:
        region._core.allocate_array(1 << 60)
    except memsaver.OutOfMemoryError:
        pass

def turn(region):
    region.pause()
    region.resume()

def trim(region):
    memsaver.trim([region])

def loop(call, region, begun):
    call(region)
    begun.release()
    while True:
        for _ in range(cycles):
            cycle = Cycle()
            cycle.itself = cycle
        try:
            call(region)
        except memsaver.Error:  # once the interpreter exits, transitions and waits are refused
            pass

sys.late = Late()
begun = threading.Semaphore(0)
call, threads, regions, cycles = sys.argv[1], *map(int, sys.argv[2:])
held = [memsaver.region(f"other{number}", device="cpu") for number in range(regions)]
for number in range(threads):
    region = memsaver.region(f"region{number}", device="cpu", backup="host")
    held.append(region._core.allocate_array(8 << 20))
    threading.Thread(target=loop, args=(globals()[call], region, begun), daemon=True).start()
for _ in range(threads):
    begun.acquire()
"""


@pytest.mark.parametrize("arguments", ["stats 8 0 0", "error 8 0 0", "turn 8 0 0", "trim 8 0 0", "stats 1 1000 10"])
def test_daemon_threads_in_the_library_do_not_abort_the_exit(arguments: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *arguments.split()]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end", "")
