"""The entry point of `python -m kprof`; importing it costs worker processes nothing."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from kprof.cli import run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
