"""`kprof run --trigger`: a process that never ends, recorded while somebody asks for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kprof.collect.service import Service, Trigger, Window
from kprof.errors import LaunchError
from kprof.run import RunOptions, RunOutcome, command_of, launch_options, name_of
from kprof.runfolder import make_folder, make_next, remove_empty

# The longest window, in seconds, if the user does not say.
SECONDS = 30.0


def run_service(
    options: RunOptions, trigger: str, say: Callable[[str], None] = lambda message: None
) -> RunOutcome:
    """Run a service to its end; every window of it becomes a run with a report of its own.

    Raises `LaunchError` only for what goes wrong before the service starts. `say` gets what the
    user has to know while it runs.
    """
    kind = Trigger.parse(trigger)
    if options.nsys:
        raise LaunchError(
            "--nsys records one window and --trigger many, so they do not go together",
            fix="leave one of them out",
        )
    if options.ncu:
        raise LaunchError(
            "--ncu runs the workload once more, which a service does not end for",
            fix="leave out --ncu; kprof ncu RUN counts for a workload that ends by itself",
        )
    if options.swap:
        raise LaunchError(
            "--swap makes kernels take over after the first step, and --trigger records no steps",
            fix="call kprof.swapped(model, ...) in the service itself",
        )
    command = command_of(options)
    folder = make_folder(name_of(options), options.out, force=options.force)
    bounded = replace(options, seconds=SECONDS if options.seconds is None else options.seconds)

    def report(window: Window) -> None:
        for message in window.messages:
            say(message)
        if window.parts:
            open_apart(window.folder)
        elif window.folder != folder:
            remove_empty(window.folder)

    service = Service(
        launch_options(bounded, command, folder), kind, lambda: make_next(folder), report
    )
    say(service.instruction)
    exit_code = service.run()
    remove_empty(folder)
    messages = () if service.num_windows else ("Nobody asked for a recording.",)
    return RunOutcome(exit_code, folder, messages, None)


def open_apart(folder: Path) -> None:
    """Analyze a window in a process of its own, so that none of its memory stays beside a service.

    Its output goes to stderr: stdout is the service's.
    """
    command = (sys.executable, "-m", "kprof", "open", str(folder))
    subprocess.run(command, stdout=sys.stderr, check=False, start_new_session=True)
