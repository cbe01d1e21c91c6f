"""The entry point of `python -m kprof`; importing it costs worker processes nothing."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    """Run the command line."""
    try:
        from kprof.cli import run_command_line

        run_command_line()
    except KeyboardInterrupt:
        # Before the command; the exit code is the shell's for SIGINT.
        sys.stderr.write("kprof: interrupted\n")
        sys.exit(130)
    finally:
        # Python would look for cycles once more, among all objects of the modules.
        gc.freeze()


if __name__ == "__main__":
    main()
