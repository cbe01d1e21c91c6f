"""The command line: one function per command, no logic."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kprof.cost_command import add_cost

if TYPE_CHECKING:
    from collections.abc import Callable

    from kprof.open import Opened
    from kprof.report.section import Section
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
    seconds: Annotated[
        float | None,
        typer.Option(metavar="S", min=0.1, help="End a window after S seconds [--trigger: 30]."),
    ] = None,
    trigger: Annotated[
        str | None,
        typer.Option(
            metavar="WHEN", help="Record a service on demand: signal, file or requests=N."
        ),
    ] = None,
    nsys: Annotated[bool, typer.Option("--nsys", help="Record with Nsight Systems.")] = False,
) -> None:
    """Run a workload unmodified, record some steps, report on them.

    A module: kprof run [OPTIONS] -m MODULE [ARGS]...

    Any other command: kprof run [OPTIONS] -- COMMAND [ARGS]...

    Options of kprof stand before the script. The exit code is the workload's own.
    """
    from kprof.report.progress import Progress
    from kprof.run import RunOptions
    from kprof.run import run as run_workload
    from kprof.service import run_service

    form = _form(words, ctx.obj, is_module=module)
    options = RunOptions(
        tuple(words), form, out, skip, steps, stacks, memory, shapes, force, seconds, nsys
    )
    if trigger is not None:
        outcome = run_service(options, trigger, _say)
    else:
        progress = Progress()
        outcome = run_workload(options, progress)
        progress.close()
    for message in outcome.messages:
        _say(message)
    if outcome.trouble is not None:
        _say(str(outcome.trouble))
        typer.echo(f"kprof: the recording, if any, is kept in {outcome.folder}", err=True)
    if outcome.opened is not None:
        opened = outcome.opened
        _write(
            lambda: _print(opened, json=False)
        )  # Whatever becomes of the output, the exit code is the workload's.
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
    if problem := _write(lambda: _print(opened, json=json)):
        raise KprofError(
            f"the output cannot be written: {problem.strerror}",
            fix=f"see where it goes; the run itself is complete, in {opened.folder}",
        )


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A run, a trace, or a folder of them.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="What to compare with it.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of HTML as well.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
) -> None:
    """Lay two runs side by side, part by part."""
    from kprof.diff import diff_runs, json_of, write_page
    from kprof.errors import KprofError
    from kprof.report.difference import sections_of_difference
    from kprof.report.progress import Progress

    progress = Progress()
    try:
        compared = diff_runs(a, b, progress)
    finally:
        progress.close()
    if out is not None:
        write_page(compared, out, force=force)
    result, sections = json_of(compared) if json else None, sections_of_difference(compared)
    last = f"page: {out}" if out else "as a page: kprof diff A B --out difference.html"
    if problem := _write(lambda: _show(compared.title, sections, result, last)):
        raise KprofError(f"the output cannot be written: {problem}", fix="see where it goes")


@app.command()
def whatif(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run or a trace.")],
    changes: Annotated[
        list[str] | None, typer.Argument(help="TARGET=2, =roofline or =removed; or graphs.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> None:
    """Predict a step's time after changes.

    Each alone, then all together. A TARGET is kernel:, op:, module: or kind: and a name, with *
    for anything; =2 is twice as fast.
    """
    from kprof.report.sections.what_if import section_of
    from kprof.whatif import HINT, ask, json_of

    answers, whole = ask(run, changes or [])
    parts = [section_of(answers, whole=whole)]
    _write(lambda: _show(run.name, parts, json_of(answers) if json else None, HINT))


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


add_cost(app, lambda *shown: _write(lambda: _show(*shown)))


def _form(words: list[str], arguments: list[str], *, is_module: bool) -> Form:
    """Tell a command by the `--` of ours before it, which the parser swallowed."""
    before = len(arguments) - len(words) - 1
    if before >= 0 and arguments[before] == "--":
        return "command"
    return "module" if is_module else "script"


def _write(print_result: Callable[[], None]) -> OSError | None:
    """Print a result; return why that was not possible, unless its reader had seen enough."""
    try:
        print_result()
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
        _show("", [], opened.json, "")
        return
    _show(opened.trace.meta.source, opened.summary, None, f"report: {opened.report}")


def _show(title: str, sections: list[Section], json: bytes | None, last: str) -> None:
    """Print sections and a last line, or the same as JSON."""
    if json is not None:
        sys.stdout.buffer.write(json + b"\n")
        return
    from rich.console import Console

    from kprof.report.terminal import print_summary

    print_summary(title, sections, console := Console())
    console.print(last, soft_wrap=True, markup=False, highlight=False)


def _say(message: str) -> None:
    typer.echo(f"kprof: {message}", err=True)


def run_command_line(args: list[str] | None = None) -> None:
    """Run one command; exit with 2 on what the user or the input caused."""
    from kprof.errors import KprofError

    arguments = sys.argv[1:] if args is None else args
    _accept_any_name()
    try:
        app(arguments, obj=arguments)
    except KprofError as error:
        _say(str(error))
        sys.exit(error.exit_code)


def _accept_any_name() -> None:
    """Let stdout take every character, also where it is closed or knows ASCII alone."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
