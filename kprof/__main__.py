"""Entry point; importing it costs nothing, so worker processes may."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from kprof.cli import run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
