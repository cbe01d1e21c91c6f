"""The options of `kprof ab`: what A is, how B differs, how surely the two are to be told apart.

`kprof ab`: the main path. Two variants of a workload → pairs of samples → verdict → report.
"""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from typer import Option

from kprof.ab.in_process import flip
from kprof.ab.processes import alternate
from kprof.ab.selftest import (
    describe_calibration,
    doubt_resolution,
    last_calibration,
    parts_of_calibration,
)
from kprof.ab.value import (
    assess,
    check_worth,
    is_asked_for_costs,
    no_price,
    price,
    section_of_costs,
    section_of_targets,
    tokens_per_step,
)
from kprof.ab.variants import AbOptions, Tell, run_options, variants_of
from kprof.analyze.calibration.error_rates import Calibration
from kprof.analyze.cost.answer import Costs
from kprof.analyze.sla.evaluate import Assessment
from kprof.analyze.verdict.per_token import per_token
from kprof.analyze.verdict.plausibility import (
    CALL_NS,
    LAUNCH_NS,
    doubt_ratio,
    find_power_effect,
    reason_below_floor,
)
from kprof.collect.launch import write_description
from kprof.collect.trials import LOG, TrialError, Variant
from kprof.commands import Answer, ShowSecrets, say
from kprof.commands.sla import read_targets
from kprof.comparison import PAIRS_FILE, Claim, Comparison, encode, save
from kprof.errors import KprofError
from kprof.kernels.swap.saved import SWAP_REPORT, read_report
from kprof.report.comparison import sections_of_comparison
from kprof.report.costs import result_of_costs
from kprof.report.html import write_html
from kprof.report.redaction import redacted, secrets_shown
from kprof.report.section import Section
from kprof.report.sla_verdict import Judged, result_of_sla
from kprof.report.swap import sections_of_swap
from kprof.run import name_of
from kprof.storage import make_folder

EXIT_CODES = {"FASTER": 0, "SAME": 0, "INCONCLUSIVE": 3, "INVALID": 3}


def exit_code_of(claim: Claim, smallest_effect: float) -> int:
    """Return the exit code of a verdict: 1 only where B is slower by more than what matters.

    SLOWER by a difference that may or may not matter is 3, and 0 where it certainly does not.
    """
    if claim.verdict != "SLOWER":
        return EXIT_CODES[claim.verdict]
    if claim.is_material or claim.interval is None:
        return 1
    most = 1 + smallest_effect
    return 0 if 1 / most <= claim.interval.low and claim.interval.high <= most else 3


@dataclass(frozen=True)
class Compared:
    """The comparison, what it means to whoever pays, and where it is kept."""

    comparison: Comparison
    folder: Path
    calibration: Calibration | None
    """How often such verdicts err on this machine, where that was measured."""
    assessed: Mapping[str, Assessment] = field(default_factory=dict)
    """How A and B keep the targets, where some were given."""
    costs: Costs | None = None
    is_priced: bool = False
    """Whether costs were asked for."""

    @property
    def report(self) -> Path:
        """The page."""
        return self.folder / "report.html"

    @property
    def sections(self) -> list[Section]:
        """All that is shown, in its order."""
        said = parts_of_calibration(self.calibration)
        found = sections_of_comparison(self.comparison, said)
        if self.assessed:
            found.append(section_of_targets(self.assessed))
        swapped = self.folder / SWAP_REPORT
        if swapped.exists():
            swap = sections_of_swap(read_report(swapped))
            found += [replace(one, order=15) for one in swap]
        if self.costs is not None:
            found.append(section_of_costs(self.costs))
        elif self.is_priced:
            found.append(no_price(self.comparison))
        return sorted(found, key=lambda section: section.order)

    @property
    def exit_code(self) -> int:
        """0: faster, or the same; 1: slower by what matters, or B misses a target; 3: unknown."""
        of_b = self.assessed.get("B")
        is_missed = of_b is not None and of_b.verdict == "MISSED"
        compared = self.comparison
        return 1 if is_missed else exit_code_of(compared.headline, compared.plan.smallest_effect)

    @property
    def besides(self) -> dict[str, object]:
        """What the comparison means, as plain data: it is kept and printed with it."""
        told: dict[str, object] = {"calibration": describe_calibration(self.calibration)}
        if self.calibration is not None:
            told["calibrated"] = msgspec.to_builtins(self.calibration)
        if derived := per_token(self.comparison):
            told["per_token"] = msgspec.to_builtins(derived)
        if self.assessed:
            judged = {arm: Judged(arm, found) for arm, found in self.assessed.items()}
            told["targets"] = {arm: result_of_sla(one) for arm, one in judged.items()}
        if self.is_priced:
            told["costs"] = None if self.costs is None else result_of_costs(self.costs)
        return told

    @property
    def json(self) -> bytes:
        """Everything, as indented JSON: what the folder holds as well."""
        return encode(self.comparison, self.besides)


def compare(options: AbOptions, tell: Tell = lambda message: None) -> Compared:
    """Compare two variants of a workload; `tell` hears of every pair.

    Raises:
        KprofError: a variant cannot be started, crashed, or took no steps that can be compared.
    """
    targets = read_targets(options.targets) if options.targets else ()
    check_worth(targets, options.facts)
    if options.swap:
        # Not without need: it imports torch and Triton.
        from kprof.kernels.swap.swapping import Swap

        Swap((), options.swap.split(","))
    a, b = variants_of(options)
    folder = make_folder(f"{name_of(run_options(options))}-ab", options.out, force=options.force)
    (folder / "raw").mkdir(exist_ok=True)
    write_description(folder / "raw", a.command, (time.time_ns(), None), None)
    taken = _take(a, b, options, folder, tell)
    calibration = last_calibration()
    more = (
        find_power_effect(taken.plan, taken.pairs),
        doubt_resolution(calibration, taken.plan),
        doubt_ratio(taken.headline),
    )
    comparison = replace(
        taken,
        claims=_plausible(taken),
        doubts=(*taken.doubts, *(doubt for doubt in more if doubt)),
        facts=redacted({**({"made by": options.line} if options.line else {}), **taken.facts}),
        tokens_per_step=tokens_per_step(options.facts),
    )
    is_priced = is_asked_for_costs(options)
    compared = Compared(
        comparison,
        folder,
        calibration,
        assess(comparison, targets) if targets else {},
        price(comparison, options.facts) if is_priced else None,
        is_priced,
    )
    save(comparison, folder, compared.besides)
    write_html(f"{comparison.name}: A against B", compared.sections, compared.report)
    return compared


def _plausible(taken: Comparison) -> tuple[Claim, ...]:
    """Return the claims; where steps are too short to be steps, none about their time."""
    first = taken.headline
    on_gpu = "GPU" in taken.facts
    floor = (LAUNCH_NS, "a step that launches a kernel") if on_gpu else (CALL_NS, "a step")
    reason = reason_below_floor(taken.pairs, *floor) if first.metric.unit == "ns" else ""
    if not reason:
        return taken.claims
    return (Claim(first.metric, "INVALID", first.num_pairs, why=reason), *taken.claims[1:])


def _take(a: Variant, b: Variant, options: AbOptions, folder: Path, tell: Tell) -> Comparison:
    """Return what was taken and judged; where there is no verdict, clean up."""
    protocol = flip if options.patch or options.swap else alternate
    try:
        return protocol(a, b, options, folder, tell)
    except (KprofError, KeyboardInterrupt, SystemExit) as stop:
        _clean_up(stop, folder, tell)
        raise


def _clean_up(stop: BaseException, folder: Path, tell: Tell) -> None:
    """Say what a comparison without a verdict has kept; remove its folder where that is nothing."""
    if (folder / PAIRS_FILE).exists():
        tell(f"the pairs taken before are kept in {folder / PAIRS_FILE}")
    elif not isinstance(stop, KprofError):
        tell(f"stopped before the first pair; what was printed is in {folder / 'raw'}")
    elif isinstance(stop, TrialError) and str(stop.trial.log) not in str(stop):
        if stop.trial.windows or any(log.stat().st_size for log in folder.rglob(LOG)):
            tell(f"what was timed and printed until then is kept in {folder}")
        else:
            shutil.rmtree(folder)


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
        Option(metavar="NAMES", help="Replacement kernels of B, such as rmsnorm,swiglu."),
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
    target: Annotated[
        list[str] | None, Option(metavar="T", help="SLA target, such as 'step_p50<=60ms'.")
    ] = None,
    gpu: Annotated[str | None, Option(help="For costs: GPU, as price lists name it.")] = None,
    price: Annotated[str | None, Option(help="For costs: $ per GPU-hour.")] = None,
    gpus: Annotated[str | None, Option(help="For costs: GPUs of the workload [1].")] = None,
    tokens_per_step: Annotated[str | None, Option(help="For costs: tokens per step.")] = None,
    tokens_per_month: Annotated[str | None, Option(help="For costs: tokens per month.")] = None,
    seed: Annotated[
        int | None, Option(metavar="N", help="Seed of the random order [random].")
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
    more than the smallest effect, or misses a target. 2: error. 3: inconclusive or invalid.
    """
    from kprof.ab.variants import AbOptions, share_of
    from kprof.comparison import draw_seed

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
        pairs=pairs,
        smallest_effect=share_of(smallest_effect),
        fixed=fixed,
        energy=energy,
        skip=skip,
        window_s=window,
        seed=draw_seed() if seed is None else seed,
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
