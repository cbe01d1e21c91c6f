"""The start of a program with streams that were set aside for it; run by path, without kprof.

A profiler between kprof and the workload prints of its own. So it gets other streams, and this
stands between the two: `handover.py FILE UMASK STDOUT STDERR COMMAND…` writes its process id, which
is the workload's, to FILE, and takes the descriptors STDOUT and STDERR for its own. The umask is
restored as well: Nsight Systems clears it.
"""

import os
import sys
from pathlib import Path


def hand_over(file: str, umask: str, stdout: str, stderr: str, *command: str) -> None:
    """Run `command` in place of this process."""
    os.umask(int(umask))
    Path(file).write_text(str(os.getpid()))
    for given, wanted in ((int(stdout), 1), (int(stderr), 2)):
        os.dup2(given, wanted)
        os.close(given)
    os.execvp(command[0], command)


if __name__ == "__main__":
    hand_over(*sys.argv[1:])
