"""The command line: one function per command, no logic."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kprof.errors import KprofError
    from kprof.open import Opened
    from kprof.run import Form

app = typer.Typer(
    name="kprof",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Profile GPU workloads unmodified and account for every nanosecond.",
)

# Options end at the first word that is not one: what follows belongs to the workload.
WORKLOAD = {"allow_interspersed_args": False, "ignore_unknown_options": True}


@app.callback(invoke_without_command=True)
def version_or_help(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Profile GPU workloads unmodified and account for every nanosecond."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"kprof {installed('kprof')}")
        raise typer.Exit


@app.command(context_settings=WORKLOAD)
def run(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT", help="What to run, then its own arguments."),
    ],
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    skip: Annotated[int, typer.Option(metavar="N", min=0, help="Warm-up steps to skip.")] = 5,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps to record.")] = 3,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder [default: SCRIPT.kprof].")
    ] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="Record Python stacks (slow).")] = False,
    memory: Annotated[bool, typer.Option("--memory", help="Record every allocation.")] = False,
    shapes: Annotated[bool, typer.Option(help="Record the operators' input shapes.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run.")] = False,
) -> None:
    """Run a workload unmodified, record some steps, report on them.

    A module: kprof run [OPTIONS] -m MODULE [ARGS]...

    Any other command: kprof run [OPTIONS] -- COMMAND [ARGS]...

    Options of kprof stand before the script. The exit code is the workload's own.
    """
    from kprof.report.progress import Progress
    from kprof.run import RunOptions
    from kprof.run import run as run_workload

    form = _form(words, ctx.obj, is_module=module)
    options = RunOptions(tuple(words), form, out, skip, steps, stacks, memory, shapes, force)
    progress = Progress()
    outcome = run_workload(options, progress)
    progress.close()
    for message in outcome.messages:
        typer.echo(f"kprof: {message}", err=True)
    if outcome.trouble is not None:
        _complain(outcome.trouble)
        typer.echo(f"kprof: the recording, if any, is kept in {outcome.folder}", err=True)
    if outcome.opened is not None:
        _show(outcome.opened)  # Whatever becomes of the output, the exit code is the workload's.
    raise typer.Exit(outcome.exit_code)


@app.command("open")
def open_(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Traces, folders of them, or a run.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder [default: NAME.kprof].")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run.")] = False,
) -> None:
    """Analyze a trace, or take a saved run, and write its report.

    With --force a saved run is read again from its recording.
    """
    from kprof.errors import KprofError
    from kprof.open import open_run
    from kprof.report.progress import Progress

    progress = Progress()
    try:
        opened = open_run(paths, out, force=force, progress=progress)
    finally:
        progress.close()
    if problem := _show(opened, json=json):
        raise KprofError(
            f"the output cannot be written: {problem.strerror}",
            fix=f"see where it goes; the run itself is complete, in {opened.folder}",
        )


@app.command()
def roofline(
    json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure what this GPU reaches, once, for later runs on it.

    Takes less than a minute and 13 GiB of the GPU's memory. The roofline of every later
    `kprof run` on this GPU and driver is drawn from it.
    """
    from kprof.roofline import measure_roofline

    measured = measure_roofline()
    if json:
        sys.stdout.buffer.write(measured.json() + b"\n")
        return
    from rich.console import Console

    from kprof.report.ceilings import print_ceilings

    ceilings = measured.ceilings
    figures = [(f.name, f.value, f.unit, f.detail, f.spread) for f in ceilings.figures]
    title = f"{ceilings.gpu}, driver {ceilings.driver}, measured in {ceilings.took_s:.0f} s"
    print_ceilings(title, figures, Console())
    typer.echo(f"kept for later runs: {measured.path or 'nowhere, there is no home folder'}")


@app.command()
def doctor() -> None:
    """Say what this machine can measure, and how to mend the rest."""
    from rich.console import Console

    from kprof.doctor import check_machine
    from kprof.report.checks import print_checks

    checks = [(c.name, c.state, c.found, c.mend) for c in check_machine()]
    print_checks(checks, Console())


def _form(words: list[str], arguments: list[str], *, is_module: bool) -> Form:
    """Tell a command by the `--` of ours before it, which the parser swallowed."""
    before = len(arguments) - len(words) - 1
    if before >= 0 and arguments[before] == "--":
        return "command"
    return "module" if is_module else "script"


def _show(opened: Opened, *, json: bool = False) -> OSError | None:
    """Print the result; return why that was not possible, unless its reader had seen enough."""
    try:
        _print(opened, json=json)
        sys.stdout.flush()
    except SystemExit:  # How rich answers a reader that has gone.
        return None
    except OSError as error:
        # What is left in the buffer must not fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return None if isinstance(error, BrokenPipeError) else error
    return None


def _print(opened: Opened, *, json: bool) -> None:
    if json:
        sys.stdout.buffer.write(opened.json() + b"\n")
        return
    from rich.console import Console

    from kprof.report.terminal import print_summary

    console = Console()
    print_summary(opened.trace, opened.sections, console)
    console.print(f"report: {opened.report}", soft_wrap=True, markup=False, highlight=False)


def _complain(error: KprofError) -> None:
    typer.echo(f"kprof: {error}", err=True)


def run_command_line(args: list[str] | None = None) -> None:
    """Run one command; exit with 2 on what the user or the input caused."""
    from kprof.errors import KprofError

    arguments = sys.argv[1:] if args is None else args
    _accept_any_name()
    try:
        app(arguments, obj=arguments)
    except KprofError as error:
        _complain(error)
        sys.exit(error.exit_code)


def _accept_any_name() -> None:
    """Let stdout take every character, also where it is closed or knows ASCII alone."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
