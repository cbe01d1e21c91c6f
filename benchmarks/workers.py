"""Processes that wait for questions and answer them one at a time, a line of JSON each way."""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress


class Worker:
    """A process of this script, started with `--work`, that says something once it is ready."""

    def __init__(self, work, **environment):
        self.work = work
        self._environment = {**os.environ, **environment}
        self._process = None

    def start(self, ends_s):
        """Start it and return what it says then; None when time runs out, or it ends before.

        What ended it, were it a signal, is in its error output.
        """
        command = [sys.executable, "-X", "faulthandler", sys.argv[0], "--work"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(
            [*command, json.dumps(self.work)], text=True, env=self._environment, **pipes
        )
        return self._read(ends_s)

    def ask(self, what, ends_s):
        """Return its answer; None when time runs out, or it has ended."""
        if time.monotonic() >= ends_s or self._process is None:
            return None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            return self._read(ends_s)
        return None

    def stop(self):
        """End it."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _read(self, ends_s):
        watch = threading.Timer(max(0.0, ends_s - time.monotonic()), self._process.kill)
        watch.start()
        try:
            # Libraries print there as well.
            lines = (line for line in self._process.stdout if line.startswith("{"))
            return next((json.loads(line) for line in lines), None)
        finally:
            watch.cancel()


def say(what):
    """Tell the process that asked."""
    print(json.dumps(what), flush=True)


def questions():
    """Yield what is asked, until nobody asks any more."""
    return (json.loads(line) for line in sys.stdin)
