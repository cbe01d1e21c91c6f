"""`kprof ab`: its options; `kprof.ab.compare` does the work."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from kprof.commands import Answer, ShowSecrets, say
from kprof.errors import KprofError

# Options end at the first word that is not one: what follows belongs to the workload.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def ab(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT", help="The workload (A) and its arguments."),
    ] = None,
    module: Annotated[bool, Option("-m", help="SCRIPT is a module, as in python -m.")] = False,
    env: Annotated[
        list[str] | None, Option(metavar="K=V", help="Environment variable of B.")
    ] = None,
    arg: Annotated[list[str] | None, Option(metavar="WORD", help="Argument of B.")] = None,
    python: Annotated[
        tuple[Path, Path] | None,
        Option(metavar="A.py B.py", help="Compare two scripts instead of SCRIPT."),
    ] = None,
    patch: Annotated[
        str | None,
        Option(metavar="FILE.py:NAME", help="Context manager that B runs in, in one process."),
    ] = None,
    swap: Annotated[
        str | None,
        Option(metavar="NAMES", help="Kernels of B, such as rmsnorm,swiglu; auto: those that pay."),
    ] = None,
    budget: Annotated[
        float | None,
        Option(metavar="S", min=1, help="Seconds of --swap auto; it chooses anew [default: 60]."),
    ] = None,
    pairs: Annotated[
        int | None,
        Option(
            metavar="N",
            min=6,
            max=1000,
            help="Maximum pairs [160; 40 for processes, --fixed or --energy].",
        ),
    ] = None,
    smallest_effect: Annotated[
        str, Option(metavar="SHARE", help="Smallest effect of interest.")
    ] = "1%",
    fixed: Annotated[bool, Option("--fixed", help="Take all pairs: no early stopping.")] = False,
    energy: Annotated[
        bool, Option("--energy", help="Compare the energy per step as well.")
    ] = False,
    skip: Annotated[int, Option(metavar="N", min=0, help="Warm-up steps per process.")] = 5,
    window: Annotated[
        float, Option(metavar="S", min=0.01, help="Minimum seconds per sample.")
    ] = 0.25,
    losses: Annotated[
        int | None,
        Option(metavar="N", min=32, help="Compare the losses of training runs of N steps, too."),
    ] = None,
    target: Annotated[
        list[str] | None, Option(metavar="T", help="SLA target, such as 'step_p50<=60ms'.")
    ] = None,
    gpu: Annotated[
        str | None, Option(metavar="NAME", help="For costs: GPU, as price lists name it.")
    ] = None,
    price: Annotated[str | None, Option(metavar="X", help="For costs: $ per GPU-hour.")] = None,
    gpus: Annotated[
        str | None, Option(metavar="N", help="For costs: GPUs of the workload [default: 1].")
    ] = None,
    tokens_per_step: Annotated[
        str | None, Option(metavar="X", help="For costs: tokens per step.")
    ] = None,
    tokens_per_month: Annotated[
        str | None, Option(metavar="X", help="For costs: tokens per month.")
    ] = None,
    seed: Annotated[
        int | None, Option(metavar="N", help="Seed of the random order [default: random].")
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Folder [default: SCRIPT-ab.kprof].")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
    force: Annotated[bool, Option("--force", help="Replace an existing comparison.")] = False,
    show_secrets: ShowSecrets = False,
) -> Answer:
    """Compare two variants of a workload and say which is faster.

    The verdict is FASTER, SLOWER, SAME, INCONCLUSIVE or INVALID.

    A is the script as it is. B is the same script with --env, --arg, --patch or --swap.
    --python compares two scripts. Without any of them, B is A: a test of the measurement.

    Exit code 0: B is faster, the same, or slower within the smallest effect. 1: B is slower by
    more than the smallest effect, misses a target, or trains worse (--losses). 2: error. 3:
    inconclusive or invalid.
    """
    # Imported where it runs: `--help` needs neither pandas nor scipy.
    from kprof.ab.compare import compare
    from kprof.ab.variants import AbOptions, share_of
    from kprof.comparison import draw_seed
    from kprof.report.redaction import secrets_shown

    words = list(words or [])
    if python is not None:
        words.insert(0, str(python[0]))
    if not words:
        raise KprofError("nothing to compare", fix="name a script: kprof ab --env K=V train.py")
    before = len(ctx.obj) - len(words) - 1
    is_command = python is None and before >= 0 and ctx.obj[before] == "--"
    options = AbOptions(
        words=tuple(words),
        form="command" if is_command else "module" if module else "script",
        other=python[1] if python else None,
        environment=tuple(env or ()),
        arguments=tuple(arg or ()),
        patch=patch,
        swap=swap or "",
        budget_s=budget,
        pairs=pairs,
        smallest_effect=share_of(smallest_effect),
        fixed=fixed,
        energy=energy,
        skip=skip,
        window_s=window,
        seed=draw_seed() if seed is None else seed,
        losses=losses,
        targets=tuple(target or ()),
        facts={
            "gpu": gpu,
            "price": price,
            "gpus": gpus,
            "tokens_per_step": tokens_per_step,
            "tokens_per_month": tokens_per_month,
        },
        out=out,
        force=force,
        line=shlex.join(["kprof", *ctx.obj]),
    )
    with secrets_shown(shown=show_secrets):
        compared = compare(options, say)
    printed = compared.json if json else None
    last = f"report: {compared.report}"
    answer = Answer(compared.comparison.name, compared.sections, printed, last)
    return answer._replace(exit_code=compared.exit_code, shows_secrets=show_secrets)
