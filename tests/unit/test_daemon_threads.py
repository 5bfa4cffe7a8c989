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
        sleep(0.2)
        write(1, b"end")

def stats(region):
    memsaver.stats()

def error(region):
    try:
        region._core.allocate_array(1 << 60)
    except memsaver.OutOfMemoryError:
        pass

def turn(region):
    region.pause(progress=lambda done, total: None)
    region.resume(progress=lambda done, total: None)

def trim(region):
    memsaver.trim([region])

def loop(call, region, begun):
    call(region)
    begun.release()
    while True:
        try:
            call(region)
        except memsaver.Error:  # once the interpreter exits, transitions and waits are refused
            pass

sys.late = Late()
begun = threading.Semaphore(0)
held = []
threads = 8
for number in range(threads):
    region = memsaver.region(f"region{number}", device="cpu", backup="host")
    held.append(region._core.allocate_array(8 << 20))
    threading.Thread(target=loop, args=(globals()[sys.argv[1]], region, begun), daemon=True).start()
for _ in range(threads):
    begun.acquire()
"""


@pytest.mark.parametrize("call", ["stats", "error", "turn", "trim"])
def test_daemon_threads_in_the_library_do_not_abort_the_exit(call: str) -> None:
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM, call], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end", "")
