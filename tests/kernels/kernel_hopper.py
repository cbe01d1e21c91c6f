"""Compiling kernels for Hopper, where Triton's interpreter is at work in the tests' own process."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache


def on_hopper(script, **names):
    """Return what the script prints, run with these names in a process of its own."""
    process = _starting()
    process.stdin.write(json.dumps([script, names]) + "\n")
    process.stdin.flush()
    answer = json.loads(process.stdout.readline() or '{"failed": "it ended"}')
    assert "failed" not in answer, answer["failed"]
    return answer["told"]


@cache
def _starting():
    """Start the process that starts those of all scripts, after what takes long in each.

    That is importing torch, and hashing Triton, for the names of what it keeps on disk.
    """
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", STARTING], env=clean, text=True, **pipes)
    atexit.register(process.communicate)
    return process


STARTING = """
import contextlib, io, json, os, sys, traceback
import kprof.kernels.bench.ahead
from triton.experimental.gluon.nvidia import hopper
from triton.runtime.cache import triton_key

triton_key()
for line in sys.stdin:
    if child := os.fork():
        if os.waitpid(child, 0)[1]:
            print(json.dumps({"failed": "its process ended"}), flush=True)
        continue
    script, names = json.loads(line)
    told = io.StringIO()
    try:
        with contextlib.redirect_stdout(told):
            exec(script, names)
        answer = {"told": told.getvalue()}
    except BaseException:
        answer = {"failed": traceback.format_exc()}
    print(json.dumps(answer), flush=True)
    os._exit(0)
"""
