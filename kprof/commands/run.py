"""`kprof run`: a workload recorded, with its report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kprof.commands import Answer, ShowSecrets, say
from kprof.report.redaction import secrets_shown

if TYPE_CHECKING:
    from kprof.run import Form, RunOptions

# Options end at the first word that is not one: what follows belongs to the workload.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def run(
    ctx: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT", help="Script, then its own arguments."),
    ],
    module: Annotated[
        bool, typer.Option("-m", help="SCRIPT is a module, as in python -m.")
    ] = False,
    skip: Annotated[
        int, typer.Option(metavar="N", min=0, help="Warm-up steps before the recording.")
    ] = 5,
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
        typer.Option(
            metavar="S",
            min=0.1,
            help="End the recording after S seconds [default with --trigger: 30].",
        ),
    ] = None,
    trigger: Annotated[
        str | None,
        typer.Option(metavar="WHEN", help="Record a service on demand: signal, file, requests=N."),
    ] = None,
    nsys: Annotated[bool, typer.Option("--nsys", help="Record with Nsight Systems.")] = False,
    ncu: Annotated[
        bool, typer.Option("--ncu", help="Run once more in Nsight Compute (slow).")
    ] = False,
    counters: Annotated[
        bool, typer.Option("--counters", help="Sample hardware counters during the run.")
    ] = False,
    swap: Annotated[
        str | None,
        typer.Option(metavar="KERNELS", help="Swap kernels in: rmsnorm,swiglu=liger; auto."),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            metavar="S", min=1, help="Seconds of --swap auto; it chooses anew [default: 60]."
        ),
    ] = None,
    stop_after_recording: Annotated[
        bool,
        typer.Option("--stop-after-recording", help="End the workload after the recording."),
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="RANKS", help="Ranks to record: 0,8-15 or per-host [default: all]."),
    ] = None,
    show_secrets: ShowSecrets = False,
) -> Answer:
    """Run a workload unmodified, record some steps and report on them.

    A module: kprof run [OPTIONS] -m MODULE [ARGS]...

    Any other command: kprof run [OPTIONS] -- COMMAND [ARGS]...

    Options of kprof stand before the script. The exit code is the workload's own, and 0 where
    --stop-after-recording ended it.
    """
    from kprof.report.progress import Progress
    from kprof.run import RunOptions, run_service
    from kprof.run import run as run_workload

    form = _form(words, ctx.obj, is_module=module)
    options = RunOptions(
        tuple(words),
        form,
        out,
        skip,
        steps,
        stacks,
        memory,
        shapes,
        force,
        seconds,
        nsys,
        ncu,
        counters,
        swap,
        budget,
        stop_after_recording,
        ranks,
    )
    with secrets_shown(shown=show_secrets):
        if trigger is not None:
            outcome = run_service(options, trigger, say)
        else:
            progress = Progress(say, is_patient=True)
            outcome = run_workload(options, progress, _choose, say)
            progress.close()
    for message in outcome.messages:
        say(message)
    if outcome.trouble is not None:
        say(str(outcome.trouble))
        typer.echo(f"kprof: the recording, if any, is kept in {outcome.folder}", err=True)
    if outcome.opened is None:
        raise typer.Exit(outcome.exit_code)
    opened = outcome.opened
    # The exit code is the workload's, also where the output fails.
    last = f"report: {opened.report}"
    source = opened.trace.meta.source
    answer = Answer(source, opened.summary, None, last, outcome.exit_code, if_unwritten=None)
    return answer._replace(shows_secrets=show_secrets)


def _choose(options: RunOptions, command: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """Return the kernels that make a workload faster; none where none does for sure."""
    from kprof.ab.choose import NothingPaysError, chosen
    from kprof.ab.variants import AbOptions
    from kprof.collect.trials import Variant
    from kprof.kernels.swap.swap_report import AUTO

    asked = AbOptions(
        options.words, options.form, swap=AUTO, skip=options.skip, budget_s=options.budget_s
    )
    try:
        # Its raw files are none of the recording.
        return chosen(Variant("A", command), asked, folder, folder / "choice", say).names
    except NothingPaysError as error:
        say(f"{error.problem}: the workload is recorded as it is")
        return ()


def _form(words: list[str], arguments: list[str], *, is_module: bool) -> Form:
    """Tell a command by the `--` of ours before it, which the parser swallowed."""
    before = len(arguments) - len(words) - 1
    if before >= 0 and arguments[before] == "--":
        return "command"
    return "module" if is_module else "script"
